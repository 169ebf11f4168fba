#include "server/train/weights_reader.h"

#include <grpcpp/server_context.h>

#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/frame.h"
#include "proto/status.h"
#include "server/call_errors.h"
#include "server/find_job.h"
#include "server/train/weight_message.h"

namespace ballast::server {

namespace {

// A request may name 2^20 chunks.
// Where they are not packed each takes 4 bytes: a tag, and 3 for a number below 2^20.
constexpr size_t kMostRequestBytes = size_t{5} << 20;

}  // namespace

WeightsReader::WeightsReader(const Engine& engine, CallPools& pools,
                             grpc::CallbackServerContext& context,
                             const absl::StatusOr<Caller>& caller, const grpc::ByteBuffer& request)
    : pools_(pools),
      watched_(
          pools.watch.Watch([&context] { context.TryCancel(); }, WatchedCall::kAnswerSeconds)) {
  const absl::StatusOr<v1::ReadWeightsResponse> first =
      caller.ok() ? Open(engine, *caller, request) : caller.status();
  if (!first.ok()) {
    Finish(proto::ToGrpc(first.status()));
    return;
  }
  Write(proto::SerializeControl(*first));
}

void WeightsReader::Write(grpc::ByteBuffer bytes) {
  write_buffer_ = std::move(bytes);
  watched_->PeerMustAct();
  StartWrite(&write_buffer_);
}

// The next chunk is converted when the last one has been taken, so a slow reader needs no memory.
void WeightsReader::OnWriteDone(bool ok) {
  watched_->PeerActed();
  if (!ok) return Finish(proto::ToGrpc(GoneError("reader")));
  if (next_ == chunks_.size()) return Finish(grpc::Status::OK);
  absl::StatusOr<grpc::ByteBuffer> bytes = NextChunk();
  if (!bytes.ok()) return Finish(proto::ToGrpc(bytes.status()));
  Write(*std::move(bytes));
}

void WeightsReader::OnDone() {
  watched_->Ended();
  pools_.LetGo(std::move(job_));
  delete this;
}

absl::StatusOr<v1::ReadWeightsResponse> WeightsReader::Open(const Engine& engine,
                                                            const Caller& caller,
                                                            const grpc::ByteBuffer& bytes) {
  BALLAST_ASSIGN_OR_RETURN(place_, pools_.streams.Enter());
  BALLAST_ASSIGN_OR_RETURN(const v1::ReadWeightsRequest request,
                           proto::ParseRequest<v1::ReadWeightsRequest>(bytes, kMostRequestBytes));
  BALLAST_ASSIGN_OR_RETURN(job_, FindJob(engine, caller, request.name(), request.uid()));
  // A job does not know who reads its weights; a slow reader would keep the memory of a closed one.
  watched_->IsOverIf(IsGone(engine, caller, *job_));
  // Generation and step are taken once. A load or a commit while chunks are read ends the call with
  // an error (ReadShard), so no answer has weights of two steps.
  const Attachment position = job_->Position();
  if (position.awaiting_weights) {
    return absl::FailedPreconditionError(
        absl::StrCat(request.name(), " has no weights yet; upload them first"));
  }
  generation_ = position.generation;
  step_ = position.committed_step;
  directions_ = request.directions();
  // Who only looks writes nothing to a rank's memory.
  if (caller.Has(Role::kTrainer, job_->spec().name)) process_id_ = request.process_id();
  if (request.has_step() && request.step() != step_) {
    const absl::Status other = absl::FailedPreconditionError(absl::StrCat(
        request.name(), " is at step ", step_, ", not at ", request.step(), " as requested"));
    return directions_ ? WithReason(other, reason::kOtherStep) : other;
  }
  BALLAST_ASSIGN_OR_RETURN(v1::ReadWeightsResponse first,
                           MakeFirstMessage(*job_, step_, directions_));
  BALLAST_RETURN_IF_ERROR(ChooseChunks(request));
  return first;
}

absl::Status WeightsReader::ChooseChunks(const v1::ReadWeightsRequest& request) {
  const Layout& layout = job_->layout();
  if (request.rank() < 0 || request.rank() >= layout.world_size()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", request.rank(), " of ", request.name(),
                                                   ", which has world size ", layout.world_size()));
  }
  const size_t chunks = layout.chunks_of_rank(request.rank()).size();
  first_of_rank_ = layout.first_of_rank(request.rank());
  if (request.chunks().empty()) {
    chunks_.resize(chunks);
    std::iota(chunks_.begin(), chunks_.end(), first_of_rank_);
    std::erase_if(chunks_, [&](int chunk) {
      const int group = layout.chunks()[chunk].group;
      return directions_ && !HasTwoRounds(job_->spec().groups[group].hyper_parameters.rule);
    });
    return absl::OkStatus();
  }
  // Each at most once, so that an answer is no larger than the job.
  std::vector<bool> chosen(chunks, false);
  for (const uint32_t chunk : request.chunks()) {
    if (chunk >= chunks) {
      return absl::InvalidArgumentError(absl::StrCat(
          "chunk ", chunk, " of rank ", request.rank(), " of ", request.name(), ", which has ",
          chunks, ", from 0 on; ask for those, or for none to have all"));
    }
    if (chosen[chunk]) {
      return absl::InvalidArgumentError(absl::StrCat("chunk ", chunk, " of ", request.name(),
                                                     " is asked for twice; name each once"));
    }
    chosen[chunk] = true;
    chunks_.push_back(first_of_rank_ + static_cast<int>(chunk));
  }
  return absl::OkStatus();
}

absl::StatusOr<grpc::ByteBuffer> WeightsReader::NextChunk() {
  const int chunk = chunks_[next_++];
  if (directions_ && !process_id_.empty()) {
    BALLAST_ASSIGN_OR_RETURN(const bool shared, job_->ShareDirections(step_, chunk, process_id_));
    if (shared) {
      v1::WeightHeader header = MakeWeightHeader(step_, chunk - first_of_rank_);
      header.set_shared(true);
      return proto::SerializeReadWeights(header, {}, [] {});
    }
  }
  BALLAST_ASSIGN_OR_RETURN(const OwnedWeights weights,
                           directions_ ? ReadDirections(*job_, step_, chunk)
                                       : ReadWeights(*job_, generation_, step_, chunk));
  return proto::SerializeReadWeights(MakeWeightHeader(step_, chunk - first_of_rank_),
                                     weights.bytes(), [memory = weights.memory] {});
}

}  // namespace ballast::server
