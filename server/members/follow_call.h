// A link of a job's lead, at another member: MemberService.Follow.
#ifndef BALLAST_SERVER_MEMBERS_FOLLOW_CALL_H_
#define BALLAST_SERVER_MEMBERS_FOLLOW_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ballast/v1/members.pb.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/job/members/words.h"
#include "server/access/access.h"
#include "server/call_pool.h"
#include "server/members/outgoing_words.h"

namespace ballast::server {

// Owns itself: gRPC calls OnDone last, which deletes it.
class FollowCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // The engine and the pools outlive it.
  FollowCall(Engine& engine, CallPools& pools, grpc::CallbackServerContext& context,
             const absl::StatusOr<Caller>& caller);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone() override;

 private:
  // Says what the link is for. Its errors end the call.
  absl::Status Open(const v1::OpenFollow& open);
  absl::Status Hear(const v1::FollowRequest& request);
  // Behind a write that is under way.
  void End(const absl::Status& status);
  // Not once it ends.
  void Read() {
    MutexLock lock(mutex_);
    if (!end_.has_value()) StartRead(&read_buffer_);
  }

  Engine& engine_;
  CallPools& pools_;
  const absl::StatusOr<Caller> caller_;
  CallPool::Place place_;
  const std::shared_ptr<WatchedCall> watched_;
  std::shared_ptr<OutgoingWords<MemberWord>> words_;
  grpc::ByteBuffer read_buffer_;
  // Only used while a message is handled, and by OnDone.
  JobSpec spec_;
  std::unique_ptr<Engine::PartLink> part_;
  Mutex mutex_;
  grpc::ByteBuffer write_buffer_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_MEMBERS_FOLLOW_CALL_H_
