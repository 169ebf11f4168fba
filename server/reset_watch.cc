#include "server/reset_watch.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/listener.h"

namespace ballast::server {
namespace {

// Of connections that are counted at once: each costs some 100 bytes until the time is over.
constexpr size_t kMostPeers = 100'000;

}  // namespace

ResetWatch::ResetWatch()
    : ResetWatch([](const std::string& peer) { CloseConnectionsOf(peer); },
                 [](const std::string& line) { spdlog::warn("{}", line); }) {}

void ResetWatch::GivenUp(const std::string& peer, Clock::time_point now) {
  if (!absl::StartsWith(peer, "ipv4:") && !absl::StartsWith(peer, "ipv6:")) return;
  {
    MutexLock lock(mutex_);
    // All counts begin again together, for which one time is enough; so around that instant a
    // connection may come to nearly twice as many. Where too many peers are counted, they begin
    // again earlier.
    if (now - since_ >= kWithin || calls_.size() >= kMostPeers) {
      calls_.clear();
      since_ = now;
    }
    // What was underway when it was closed is counted on.
    if (++calls_[peer] != kMost) return;
    Hold(SourceOf(peer), now);
  }
  // Without the lock, which every call that is given up takes: this looks at all descriptors of the
  // process.
  close_(peer);
  closings_.Happened(
      [&](int64_t closed) {
        return absl::StrCat("closed ", closed, " connections, the last of ", peer,
                            ", that gave up ", kMost, " calls, or had them refused, within ",
                            kWithin.count(), " s; see to what that client does");
      },
      now);
}

void ResetWatch::Hold(const std::string& source, Clock::time_point now) {
  std::erase_if(held_, [&](const auto& held) { return held.second <= now; });
  // A flood from even more hosts is not held; this must not grow with it.
  if (held_.size() >= kMostPeers) return;
  Clock::time_point& until = held_.try_emplace(source, now).first->second;
  until = std::min(until + kHold, now + kLongestHold);
}

ResetWatch::Clock::time_point ResetWatch::HeldUntil(const std::string& source) {
  MutexLock lock(mutex_);
  const auto held = held_.find(source);
  return held == held_.end() ? Clock::time_point() : held->second;
}

}  // namespace ballast::server
