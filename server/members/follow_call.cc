#include "server/members/follow_call.h"

#include <grpcpp/server_context.h>

#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/members/words_codec.h"
#include "proto/convert.h"
#include "proto/frame.h"
#include "proto/status.h"
#include "server/call_errors.h"

namespace ballast::server {

FollowCall::FollowCall(Engine& engine, CallPools& pools, grpc::CallbackServerContext& context,
                       const absl::StatusOr<Caller>& caller)
    : engine_(engine),
      pools_(pools),
      caller_(caller),
      watched_(pools.watch.Watch([&context] { context.TryCancel(); }, WatchedCall::kOpenSeconds)) {
  words_ = std::make_shared<OutgoingWords<MemberWord>>(
      [this](std::function<void()> task) { pools_.members.Run(std::move(task)); },
      [this](std::string bytes) {
        v1::FollowResponse response;
        response.set_word(std::move(bytes));
        MutexLock lock(mutex_);
        if (end_.has_value()) return;
        write_buffer_ = proto::SerializeControl(response);
        writing_ = true;
        StartWrite(&write_buffer_);
      },
      [this] {
        End(absl::UnavailableError("a newer link of the job's lead has taken the place of this"));
      });
  if (!caller.ok()) {
    End(caller.status());
    return;
  }
  watched_->PeerMustAct();
  Read();
}

void FollowCall::OnReadDone(bool ok) {
  watched_->PeerActed();
  if (!ok) return End(absl::OkStatus());
  const auto handle = [this] {
    absl::Status handled = [&]() -> absl::Status {
      BALLAST_ASSIGN_OR_RETURN(const auto request,
                               proto::ParseControl<v1::FollowRequest>(read_buffer_));
      read_buffer_.Clear();
      if (part_ != nullptr) return Hear(request);
      if (!request.has_open()) return NotFirstError();
      return Open(request.open());
    }();
    handled.ok() ? Read() : End(handled);
  };
  // To lay a job out takes long.
  if (part_ == nullptr) return pools_.members.Run(handle);
  handle();
}

absl::Status FollowCall::Open(const v1::OpenFollow& open) {
  BALLAST_ASSIGN_OR_RETURN(const proto::ResourceName name, proto::ParseJobName(open.name()));
  BALLAST_RETURN_IF_ERROR(caller_->Check(name.job));
  if (open.format() != kWordsFormat) {
    return absl::FailedPreconditionError(
        absl::StrCat("this service understands words of members of format ", kWordsFormat,
                     ", and the lead's are of format ", open.format(),
                     "; run releases at all members whose formats are the same"));
  }
  BALLAST_ASSIGN_OR_RETURN(place_, pools_.members.Enter());
  BALLAST_ASSIGN_OR_RETURN(const Follow follow, DecodeFollow(open.follow()));
  if (follow.spec.name != name.job) {
    return absl::InvalidArgumentError("a link for another job than it names");
  }
  watched_->IsOverIf(caller_->IsRevoked(name.job));
  spec_ = follow.spec;
  BALLAST_ASSIGN_OR_RETURN(part_, engine_.FollowLead(follow, caller_->principal(), words_));
  return absl::OkStatus();
}

absl::Status FollowCall::Hear(const v1::FollowRequest& request) {
  if (request.kind_case() != v1::FollowRequest::kWord) return NoKindError();
  BALLAST_ASSIGN_OR_RETURN(LeadWord word, DecodeLeadWord(request.word(), spec_));
  part_->Hear(std::move(word));
  return absl::OkStatus();
}

void FollowCall::OnWriteDone(bool ok) {
  std::optional<absl::Status> end;
  {
    MutexLock lock(mutex_);
    writing_ = false;
    end = end_;
  }
  if (end.has_value()) return Finish(proto::ToGrpc(*end));
  if (ok) words_->Written();
}

void FollowCall::End(const absl::Status& status) {
  {
    MutexLock lock(mutex_);
    if (end_.has_value()) return;
    end_ = status;
    if (writing_) return;
  }
  Finish(proto::ToGrpc(status));
}

void FollowCall::OnDone() {
  watched_->Ended();
  words_->Close();
  // The last reference to a part may be here, and frees its memory.
  pools_.creation.Run([part = std::shared_ptr<Engine::PartLink>(std::move(part_))] {});
  delete this;
}

}  // namespace ballast::server
