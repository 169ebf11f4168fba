// Closes connections whose client opens calls and gives them up again, without an end.
//
// A call costs the client some bytes, and gRPC's threads, which all clients share, some 100
// microseconds; 1.51 bounds the calls that are open on a connection (kMaxStreamsOfConnection), and
// not how many are opened and reset (CVE-2023-44487). An honest client gives up calls too: all that
// it has open, when it ends, or one after the other, as their time is over. One that comes again at
// once, to do the same, waits: it had gRPC work for half a second, and gets a tenth of that.
#ifndef BALLAST_SERVER_RESET_WATCH_H_
#define BALLAST_SERVER_RESET_WATCH_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>

#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/common/system/rare_warning.h"
#include "server/transport_settings.h"

namespace ballast::server {

// Of TCP: the connections of a unix socket have no names, and are those of users whom its directory
// lets in. Thread-safe.
class ResetWatch {
 public:
  using Clock = std::chrono::steady_clock;
  // A connection that gives up as many calls within so long is closed.
  static constexpr int64_t kMost = 2 * kMaxStreamsOfConnection;
  static constexpr std::chrono::seconds kWithin{60};
  // And no other of its host is let in for so long, for each, and together for:
  static constexpr std::chrono::seconds kHold{5};
  static constexpr std::chrono::seconds kLongestHold{10};

  ResetWatch();  // Closes connections of this process, and warns in its log.
  ResetWatch(std::function<void(const std::string& peer)> close,
             std::function<void(const std::string& line)> warn)
      : close_(std::move(close)), closings_(std::move(warn)) {}

  // The client of `peer`, as gRPC names it ("ipv4:127.0.0.1:50051"), has given up a call, or was
  // refused one because nothing says who it is.
  void GivenUp(const std::string& peer, Clock::time_point now = Clock::now());

  // Until when no connection of this host (SourceOf) is to be let in; a time in the past: it is.
  Clock::time_point HeldUntil(const std::string& source);

 private:
  void Hold(const std::string& source, Clock::time_point now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::function<void(const std::string&)> close_;
  RareWarning closings_;
  Mutex mutex_;
  std::unordered_map<std::string, int64_t> calls_ ABSL_GUARDED_BY(mutex_);  // Since:
  Clock::time_point since_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<std::string, Clock::time_point> held_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_RESET_WATCH_H_
