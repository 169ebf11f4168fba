// Closes connections with more streams than they may have.
//
// gRPC 1.51 refuses streams beyond the limit (kMaxStreamsOfConnection) once the client has
// acknowledged the settings that say it. For a client that never does there is no limit, and each
// stream takes some 11 to 17 KB, before its call is known to any service. gRPC makes the streams of
// all that one read has brought before anything can close the connection.
#ifndef BALLAST_SERVER_STREAM_WATCH_H_
#define BALLAST_SERVER_STREAM_WATCH_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "cpu_optimizer_service/common/system/rare_warning.h"
#include "server/transport_settings.h"

namespace ballast::server {

// For all gRPC servers of this process. TCP only, as reset_watch.h. Not thread-safe.
class StreamWatch {
 public:
  // With room for a client that does not wait for the settings.
  static constexpr int64_t kMost = 2 * kMaxStreamsOfConnection;

  // Often enough: in a second one connection gets a hundred thousand streams.
  static constexpr std::chrono::milliseconds kLookEvery{100};

  StreamWatch();  // Closes connections of this process, and warns in its log.
  StreamWatch(std::function<void(const std::string& peer)> close,
              std::function<void(const std::string& line)> warn)
      : close_(std::move(close)), closings_(std::move(warn)) {}

  // Looks at some hundred connections, and goes on with the others the next time: each takes some
  // microseconds.
  void Look();

 private:
  void LookAt(intptr_t server);

  const std::function<void(const std::string& peer)> close_;
  RareWarning closings_;
  std::map<intptr_t, intptr_t> next_;  // By server: the socket to go on from.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STREAM_WATCH_H_
