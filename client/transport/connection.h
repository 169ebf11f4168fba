// The connection to a service across reconnects: one attempt to connect about every second,
// whatever happens to earlier attempts.
//
//   Connection connection(channel);  // Of Connect or NewChannel (client/connect.h).
//   BALLAST_ASSIGN_OR_RETURN(auto connected, connection.Connected(absl::Seconds(10)));
//   v1::JobService::Stub(connected).GetJob(...);
//
// gRPC's own reconnecting is too slow for a trainer. A channel without a call is polled only by a
// timer of five seconds. An attempt that a silent peer has accepted lasts 20 seconds. A failed name
// is resolved again after up to two minutes. So each attempt here has its own channel, and this
// class polls them all. A slow handshake continues beside later attempts, and the first to finish
// wins.
//
// Thread-safe.
#ifndef BALLAST_CLIENT_TRANSPORT_CONNECTION_H_
#define BALLAST_CLIENT_TRANSPORT_CONNECTION_H_

#include <grpcpp/channel.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {

// A channel from `make` that a Connection replaces by others from `make`.
std::shared_ptr<grpc::Channel> MakeReplaceable(
    std::function<std::shared_ptr<grpc::Channel>()> make);

class Connection {
 public:
  // A channel that is not from MakeReplaceable is never replaced: it connects by gRPC's rules.
  explicit Connection(std::shared_ptr<grpc::Channel> channel);

  // The channel for the next call. If no channel is connected, begins an attempt, and another one
  // every second. Returns when one succeeds or the newest fails: a call on that channel ends at
  // once, with the reason. UNAVAILABLE: neither happened within `limit`; the attempts continue.
  // CANCELLED: after Cancel.
  absl::StatusOr<std::shared_ptr<grpc::Channel>> Connected(absl::Duration limit);
  // The last one that Connected returned.
  std::shared_ptr<grpc::Channel> channel() const;
  // Ends Connected, and every later one.
  void Cancel() { cancelled_ = true; }

 private:
  void Begin() ABSL_EXCLUSIVE_LOCKS_REQUIRED(connecting_);
  // What Connected returns; null: no result yet.
  std::shared_ptr<grpc::Channel> Outcome() ABSL_EXCLUSIVE_LOCKS_REQUIRED(connecting_);

  std::function<std::shared_ptr<grpc::Channel>()> make_;  // Empty: the channel is not replaced.
  std::atomic<bool> cancelled_ = false;
  // One thread at a time connects; others use its result.
  Mutex connecting_;
  std::deque<std::shared_ptr<grpc::Channel>> attempts_ ABSL_GUARDED_BY(connecting_);
  std::chrono::steady_clock::time_point next_ ABSL_GUARDED_BY(connecting_);  // Attempt.
  mutable Mutex mutex_;
  std::shared_ptr<grpc::Channel> channel_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TRANSPORT_CONNECTION_H_
