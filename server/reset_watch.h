// Closes connections whose client opens calls and gives them up again, without an end.
//
// A call costs the client some bytes, and gRPC's threads, which are everybody's, some 100
// microseconds; 1.51 bounds the calls that are open on a connection (kMaxStreamsOfConnection), and
// not how many are opened and reset (CVE-2023-44487). An honest client gives up calls too: all that
// it has open, when it ends, or one after the other, as their time is over.
#ifndef BALLAST_SERVER_RESET_WATCH_H_
#define BALLAST_SERVER_RESET_WATCH_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>

#include "cpu_optimizer_service/common/system/mutex.h"
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
  // That is told in the log, at most so often.
  static constexpr std::chrono::seconds kWarnEvery{10};

  ResetWatch();  // Closes connections of this process, and warns in its log.
  ResetWatch(std::function<void(const std::string& peer)> close,
             std::function<void(const std::string& line)> warn)
      : close_(std::move(close)), warn_(std::move(warn)) {}

  // The client of `peer`, as gRPC names it ("ipv4:127.0.0.1:50051"), has given up a call.
  void GivenUp(const std::string& peer, Clock::time_point now = Clock::now());

 private:
  const std::function<void(const std::string&)> close_;
  const std::function<void(const std::string&)> warn_;
  Mutex mutex_;
  std::unordered_map<std::string, int64_t> calls_ ABSL_GUARDED_BY(mutex_);  // Since:
  Clock::time_point since_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point warned_ ABSL_GUARDED_BY(mutex_);
  int64_t closed_ ABSL_GUARDED_BY(mutex_) = 0;  // Since then.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_RESET_WATCH_H_
