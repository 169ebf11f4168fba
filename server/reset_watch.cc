#include "server/reset_watch.h"

#include <spdlog/spdlog.h>

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
  std::string line;
  {
    MutexLock lock(mutex_);
    if (now - since_ >= kWithin || calls_.size() >= kMostPeers) {
      calls_.clear();
      since_ = now;
    }
    // What was underway when it was closed is counted on.
    if (++calls_[peer] != kMost) return;
    ++closed_;
    if (now - warned_ >= kWarnEvery) {
      warned_ = now;
      line = absl::StrCat("closed ", std::exchange(closed_, 0), " connections, the last of ", peer,
                          ", that gave up ", kMost, " calls within ", kWithin.count(),
                          " s; see to what that client does");
    }
  }
  close_(peer);
  if (!line.empty()) warn_(line);
}

}  // namespace ballast::server
