#include "server/shared_memory/shared_memory_offers.h"

#include <sys/random.h>

#include <algorithm>

namespace ballast::server {
namespace {

// Takes the same time wherever the first difference is, so that timing reveals nothing about a
// token.
bool Equal(absl::string_view shown, const uint8_t* token, size_t bytes) {
  if (shown.size() != bytes) return false;
  uint8_t difference = 0;
  for (size_t i = 0; i < bytes; ++i) difference |= static_cast<uint8_t>(shown[i]) ^ token[i];
  return difference == 0;
}

}  // namespace

std::optional<std::string> SharedMemoryOffers::Add(const std::shared_ptr<Job>& job,
                                                   RankHolder holder, Clock::time_point now) {
  Token token;
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
    return std::nullopt;
  }
  std::string shown(token.begin(), token.end());
  const std::pair<std::string, int> key(job->uid(), holder.rank);
  MutexLock lock(mutex_);
  DropDead(now);
  const auto found = open_.find(key);
  // Two calls of AttachWorker may arrive here in either order.
  if (found != open_.end() && found->second.claim.holder.generation > holder.generation) {
    return std::nullopt;
  }
  if (found == open_.end() && open_.size() >= most_) {
    open_.erase(std::min_element(open_.begin(), open_.end(), [](const auto& a, const auto& b) {
      return a.second.expires < b.second.expires;
    }));
  }
  // The offer before it ends: a process that has been replaced must not get memory of the rank.
  open_.insert_or_assign(key, Offer{.token = token,
                                    .claim = {.job = job, .holder = std::move(holder)},
                                    .expires = now + lifetime_});
  return shown;
}

std::optional<SharedMemoryOffers::Claim> SharedMemoryOffers::Take(absl::string_view token,
                                                                  Clock::time_point now) {
  MutexLock lock(mutex_);
  DropDead(now);
  auto match = open_.end();
  // To the end also behind a match: the time must not tell where that was.
  for (auto offer = open_.begin(); offer != open_.end(); ++offer) {
    if (Equal(token, offer->second.token.data(), offer->second.token.size())) match = offer;
  }
  if (match == open_.end()) return std::nullopt;
  Claim claim = std::move(match->second.claim);
  open_.erase(match);
  return claim;
}

void SharedMemoryOffers::DropDead(Clock::time_point now) {
  std::erase_if(open_, [now](const auto& entry) {
    return entry.second.expires <= now || entry.second.claim.job.expired();
  });
}

}  // namespace ballast::server
