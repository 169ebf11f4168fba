#include "server/jobs/state_reader.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::server {
namespace {

static_assert(std::endian::native == std::endian::little, "payloads are little-endian");

// 256 KiB of fp32.
constexpr int64_t kElementsPerMessage = 64 << 10;

}  // namespace

StateReader::StateReader(const Engine& engine, CallPools& pools,
                         grpc::CallbackServerContext& context, const absl::StatusOr<Caller>& caller,
                         const grpc::ByteBuffer& request)
    : StreamedAnswer(pools, context) {
  const absl::Status started =
      caller.ok() ? Start(engine, pools, *caller, request) : caller.status();
  if (!started.ok()) End(started);
}

absl::Status StateReader::Start(const Engine& engine, CallPools& pools, const Caller& caller,
                                const grpc::ByteBuffer& request) {
  BALLAST_ASSIGN_OR_RETURN(CallPool::Place place, pools.readers.Enter());
  Keep(std::move(place));
  BALLAST_ASSIGN_OR_RETURN(request_, proto::ParseRequest<v1::ReadStateRequest>(request));
  BALLAST_ASSIGN_OR_RETURN(parameter_,
                           FindParameter(engine, caller, request_.name(), request_.uid()));
  BALLAST_ASSIGN_OR_RETURN(plane_, proto::FromProto(request_.plane()));
  if (!parameter_.spec().trainable) {
    return absl::InvalidArgumentError(
        absl::StrCat(request_.name(), " is frozen and has no state here"));
  }
  if (!request_.here()) BALLAST_RETURN_IF_ERROR(CheckIsHere(*parameter_.job, parameter_.index));
  ranges_ = ElementsHere(*parameter_.job, parameter_.index);
  // The Done may end the call, and gRPC delete it, before TakeSnapshot has returned.
  const std::shared_ptr<Job> job = parameter_.job;
  EndsWith(engine, caller, *job);
  const std::shared_ptr<PendingCall> kept = pending();
  kept->Await(job->TakeSnapshot({parameter_.index}, [this](absl::StatusOr<Snapshot> snapshot) {
    Opened(std::move(snapshot));
  }));
  return absl::OkStatus();
}

void StateReader::Opened(absl::StatusOr<Snapshot> snapshot) {
  if (!snapshot.ok()) return End(snapshot.status());
  snapshot_ = *std::move(snapshot);
  if (snapshot_.has_plane(parameter_.index, plane_)) return Begin();
  End(absl::InvalidArgumentError(absl::StrCat(request_.name(), " has no plane ", Name(plane_),
                                              "; it has ",
                                              NamesOf(snapshot_.planes(parameter_.index)))));
}

bool StateReader::Fill(v1::ReadStateResponse& message) {
  // A parameter of no elements still has a first message.
  while (next_range_ < ranges_.size() && offset_ >= ranges_[next_range_].end) ++next_range_;
  const bool has_more = next_range_ < ranges_.size();
  if (begun_ && !has_more) return false;
  if (!std::exchange(begun_, true)) {
    message.set_step(snapshot_.step());
    *message.mutable_generation() = proto::ToProto(snapshot_.generation());
    message.set_state_writes(snapshot_.state_writes());
    message.set_loads(snapshot_.loads());
    message.set_update_count(snapshot_.update_count(parameter_.index));
    message.mutable_shape()->Add(parameter_.spec().shape.begin(), parameter_.spec().shape.end());
  }
  if (!has_more) return true;
  offset_ = std::max(offset_, ranges_[next_range_].begin);
  piece_.resize(std::min(kElementsPerMessage, ranges_[next_range_].end - offset_));
  snapshot_.Read(parameter_.index, plane_, offset_, absl::MakeSpan(piece_));
  message.set_offset(offset_);
  message.set_data(piece_.data(), piece_.size() * sizeof(float));
  offset_ += static_cast<int64_t>(piece_.size());
  return true;
}

}  // namespace ballast::server
