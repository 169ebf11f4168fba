// What is done where a part of a call has no memory: that call ends with RESOURCE_EXHAUSTED, and the
// process goes on.
//
// gRPC's threads and the pools' call the reactors, and an exception that left one of those calls would
// end the process. So what they do is guarded, but for calls into gRPC (to read, write and finish),
// whose own allocations, like those that it makes before it calls, cannot be made good here. Nor can
// those of Protobuf, whose messages may be no more destroyed once one has failed.
#ifndef BALLAST_SERVER_CALL_GUARD_H_
#define BALLAST_SERVER_CALL_GUARD_H_

#include <grpcpp/support/status.h>

#include <atomic>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/system/memory_guard.h"
#include "proto/status.h"

namespace ballast::server {

// Called before each part that is guarded. Tests have one that throws std::bad_alloc.
inline std::atomic<void (*)()> before_guarded = nullptr;

// What `body` returns, a Status or StatusOr; or OutOfMemoryError.
template <typename Body>
auto Guarded(Body&& body) -> decltype(std::forward<Body>(body)()) {
  return OrOutOfMemory([&] {
    if (const auto before = before_guarded.load(); before != nullptr) before();
    return std::forward<Body>(body)();
  });
}

// The same for one that returns nothing.
template <typename Body>
absl::Status GuardedRun(Body&& body) {
  return Guarded([&] {
    std::forward<Body>(body)();
    return absl::OkStatus();
  });
}

// CANCELLED, because `who` takes no more; without memory for that, OutOfMemoryError.
inline absl::Status GoneError(absl::string_view who) {
  return OrOutOfMemory([&] { return absl::CancelledError(absl::StrCat("the ", who, " is gone")); });
}

// As ToGrpc; without memory for the details, a status that needs none.
inline grpc::Status EndOf(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  grpc::Status end(grpc::StatusCode::RESOURCE_EXHAUSTED, "no memory");
  (void)GuardedRun([&] { end = proto::ToGrpc(status); });
  return end;
}

// What ends a call of which nothing else could be made.
template <typename Reactor>
class OutOfMemoryReactor final : public Reactor {
 public:
  OutOfMemoryReactor() { this->Finish(EndOf(OutOfMemoryError())); }
  void OnDone() override { delete this; }
};

// The reactor that `make` returns; without memory for it, one that says so.
template <typename Reactor, typename Make>
Reactor* MakeReactor(Make&& make) {
  Reactor* made = nullptr;
  const absl::Status status = GuardedRun([&] { made = std::forward<Make>(make)(); });
  return status.ok() ? made : new OutOfMemoryReactor<Reactor>();
}

}  // namespace ballast::server

#endif  // BALLAST_SERVER_CALL_GUARD_H_
