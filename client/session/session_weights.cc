// The calls between steps: weights, counts, checkpoints.
#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/session/join.h"
#include "client/session/log.h"
#include "client/session/payload_pieces.h"
#include "client/session/retry.h"
#include "client/session/session_impl.h"
#include "cpu_optimizer_service/common/plan/memory_need.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::client {
namespace {

// ABORTED: the service detached the rank when a stream broke. Reopening takes the rank again, or ends
// the session.
bool MayHealUpload(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsAborted(status);
}

std::vector<std::byte> Filled(int chunk, int64_t elements,
                              const std::function<void(int chunk, absl::Span<float> out)>& fill) {
  std::vector<std::byte> bytes(elements * sizeof(float));  // Aligned for any type.
  fill(chunk, {reinterpret_cast<float*>(bytes.data()), static_cast<size_t>(elements)});
  return bytes;
}

}  // namespace

absl::Status SessionImpl::RetryBetweenSteps(
    const std::function<absl::Status()>& call,
    const std::function<bool(const absl::Status&)>& may_heal) const {
  const absl::Status status =
      Retry(clock_, options_.reconnect_timeout, call, [&](const absl::Status& failed) {
        return may_heal(failed) && progress_.failure().ok() && transport_->CanReconnect();
      });
  if (status.ok()) return status;
  BALLAST_RETURN_IF_ERROR(progress_.failure());
  return status;
}

absl::Status SessionImpl::UploadWeights(
    const std::function<void(int chunk, absl::Span<float> out)>& fill) {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("UploadWeights"));
  return Upload({}, fill);
}

absl::Status SessionImpl::UploadState(
    const FirstState& state, const std::function<void(int chunk, absl::Span<float> out)>& fill) {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("UploadState"));
  if (state.step == 0) {
    return absl::InvalidArgumentError("a state of step 0 has no moments: upload weights alone");
  }
  BALLAST_RETURN_IF_ERROR(Validate(state, options_.job));
  return Upload(state, fill);
}

absl::Status SessionImpl::Upload(
    const FirstState& state, const std::function<void(int chunk, absl::Span<float> out)>& fill) {
  // Before the upload: with the last rank's part the job is at this step, and a stream that is
  // reopened after that must find the same step here (OnAttachedAgain).
  const uint64_t step_before = committed_step_;
  if (awaiting_weights_ && state.step > 0) committed_step_ = state.step;
  const absl::Status sent = SendFirstWeights(state, fill);
  // As far as this rank knows, the job is where it was.
  if (!sent.ok()) committed_step_ = step_before;
  return Annotate(sent, absl::StrCat(Context(), ": upload of first weights"));
}

absl::Status SessionImpl::SendFirstWeights(
    const FirstState& state, const std::function<void(int chunk, absl::Span<float> out)>& fill) {
  const absl::Span<const int> own = layout_.chunks_of_rank(options_.rank);
  std::vector<int> chunks(own.begin(), own.end());
  std::erase_if(chunks, [&](int chunk) {
    return std::ranges::all_of(layout_.Pieces(chunk), [&](const ChunkPiece& piece) {
      return inherited_[piece.parameter];
    });
  });
  v1::OpenTrain open = OpenMessage();
  std::vector<size_t> planes(options_.job.groups.size(), 1);
  if (state.step > 0) {
    open.mutable_first_state()->set_step(state.step);
    open.mutable_first_state()->mutable_update_counts()->Add(state.update_counts.begin(),
                                                             state.update_counts.end());
    std::ranges::transform(PlanesByGroup(options_.job), planes.begin(), &PlaneList::size);
  }
  int attempts = 0;
  absl::StatusOr<v1::UploadWeightsResponse> response;
  const absl::Status sent = RetryBetweenSteps(
      [&] {
        ++attempts;
        response =
            transport_->UploadWeights(open, absl::InfiniteDuration(), chunks, [&](int chunk) {
              const Chunk& of = layout_.chunks()[chunk];
              return Filled(chunk, static_cast<int64_t>(planes[of.group]) * of.elements, fill);
            });
        return response.status();
      },
      MayHealUpload);
  if (attempts > 1 && absl::IsFailedPrecondition(sent)) {
    // An earlier attempt succeeded and only its answer was lost, if the job has its weights.
    BALLAST_ASSIGN_OR_RETURN(const v1::Job job, GetJob());
    if (job.phase() != v1::AWAITING_WEIGHTS) return absl::OkStatus();
  }
  BALLAST_RETURN_IF_ERROR(sent);
  if (response->chunks() != static_cast<int64_t>(chunks.size())) {
    return absl::InternalError(
        absl::StrCat("the service took ", response->chunks(), " of ", chunks.size(), " chunks"));
  }
  return absl::OkStatus();
}

absl::Status SessionImpl::WriteState(
    StateWrite write, absl::Duration timeout,
    const std::function<void(int chunk, absl::Span<float> out)>& fill) {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("WriteState"));
  const std::string context = absl::StrCat(Context(), ": writing state");
  // Before the write is complete no rank gets another number.
  BALLAST_ASSIGN_OR_RETURN(const v1::Job job, GetJob());
  write.step = committed_step_;
  write.number = job.state_writes() + 1;
  BALLAST_RETURN_IF_ERROR(Annotate(Validate(write, options_.job), context));
  v1::OpenTrain open = OpenMessage();
  *open.mutable_state_write() = proto::ToProto(write);
  const std::vector<int> chunks = ChunksOf(write, layout_);
  const absl::Status written = RetryBetweenSteps(
      [&] {
        return transport_
            ->UploadWeights(open, timeout, chunks,
                            [&](int chunk) {
                              const auto planes = static_cast<int64_t>(write.planes.size());
                              return Filled(chunk, planes * layout_.chunks()[chunk].elements, fill);
                            })
            .status();
      },
      MayHealUpload);
  if (!absl::IsDeadlineExceeded(written)) return Annotate(written, context);
  BALLAST_ASSIGN_OR_RETURN(const v1::Job late, GetJob());
  std::vector<int> awaited;
  for (const v1::RankProgress& rank : late.ranks()) {
    if (!rank.writes_state() && rank.rank() != options_.rank) awaited.push_back(rank.rank());
  }
  return absl::DeadlineExceededError(
      absl::StrCat(context, ": rank ", absl::StrJoin(awaited, ", "),
                   " has not brought its part; all ranks write the same before they begin a step"));
}

absl::Status SessionImpl::ReadWeights() {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("ReadWeights"));
  BALLAST_RETURN_IF_ERROR(CheckTakesSteps("ReadWeights"));
  const std::string context = absl::StrCat(Context(), ": reading weights");
  // A session that has ended does not wait further: the service may have forgotten this rank's
  // weights.
  const auto get_job = [this]() -> absl::StatusOr<v1::Job> {
    BALLAST_RETURN_IF_ERROR(progress_.failure());
    return GetJob();
  };
  const absl::StatusOr<v1::Job> job = AwaitFirstWeights(get_job, clock_, options_);
  if (!job.ok()) {
    BALLAST_RETURN_IF_ERROR(progress_.failure());
    return Annotate(job.status(), context);
  }
  // A rank without chunks reads none that would tell it.
  if (awaiting_weights_) committed_step_ = job->committed_step();
  awaiting_weights_ = false;
  // An empty list would mean all chunks.
  if (layout_.chunks_of_rank(options_.rank).empty()) return absl::OkStatus();
  // A sink of this call's own, because sink_ is the stream's; and the trainer's callback, because
  // sink_ would count the chunks among those of a step.
  WeightSink sink(layout_, options_.job.groups, options_.rank, weights_at_, options_.on_weights);
  sink.Begin();
  std::optional<uint64_t> step;
  const absl::Status read =
      RetryBetweenSteps([&] { return FetchWeights(sink, step, absl::InfiniteDuration()); });
  if (!read.ok()) {
    BALLAST_RETURN_IF_ERROR(progress_.failure());
    return Annotate(read, context);
  }
  committed_step_ = *step;
  return absl::OkStatus();
}

absl::Status SessionImpl::FetchWeights(WeightSink& sink, std::optional<uint64_t>& step,
                                       absl::Duration limit) {
  // An earlier call delivered all chunks and broke before its end. An empty list would mean all
  // chunks.
  if (step.has_value() && sink.missing_chunks() == 0) return absl::OkStatus();
  v1::ReadWeightsRequest request;
  request.set_name(proto::JobName(options_.job.name));
  request.set_uid(attached_.uid());
  request.set_rank(options_.rank);
  // The service refuses if another step is committed by now, so weights of two steps never mix.
  if (step.has_value()) request.set_step(*step);
  for (int chunk : sink.ListMissing()) request.add_chunks(static_cast<uint32_t>(chunk));
  const auto place = [&](const v1::WeightHeader& header, PayloadPieces payload) {
    step = header.step();  // If the call fails now, the rest must be of the same step.
    return sink.Place(header, payload);
  };
  BALLAST_ASSIGN_OR_RETURN(const v1::ReadWeightsResponse first,
                           transport_->ReadWeights(request, limit, place));
  step = first.step();
  if (sink.missing_chunks() == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(sink.missing_chunks(), " chunks did not arrive"));
}

// ---------------------------------------------------------------- the second round

std::vector<int> SessionImpl::ChunksOfTwoRounds() const {
  const absl::Span<const int> own = layout_.chunks_of_rank(options_.rank);
  std::vector<int> chunks(own.begin(), own.end());
  std::erase_if(chunks, [&](int chunk) {
    const GroupSpec& group = options_.job.groups[layout_.chunks()[chunk].group];
    return !HasTwoRounds(group.hyper_parameters.rule);
  });
  return chunks;
}

int64_t SessionImpl::BytesInBFloat16(int chunk) const {
  return layout_.chunks()[chunk].elements * SizeBytes(DType::kBFloat16);
}

absl::Span<std::byte> SessionImpl::OrthogonalOf(std::vector<std::vector<std::byte>>& own,
                                                int chunk) const {
  if (shared_memory_ == nullptr) return absl::MakeSpan(own[chunk]);
  return shared_memory_->gradient(chunk).subspan(0, BytesInBFloat16(chunk));
}

absl::StatusOr<std::vector<HyperParameters>> SessionImpl::ReadDirections(
    const std::function<void(int chunk, absl::Span<const std::byte> direction)>& place) {
  const absl::StatusOr<bool> awaits = progress_.AwaitDirections(options_.seal_timeout);
  if (!awaits.ok()) {
    BALLAST_RETURN_IF_ERROR(progress_.failure());
    return Annotate(awaits.status(), Context());
  }
  std::vector<HyperParameters> values;
  if (!*awaits) return values;
  std::vector<int> missing = ChunksOfTwoRounds();
  v1::ReadWeightsRequest request;
  request.set_name(proto::JobName(options_.job.name));
  request.set_uid(attached_.uid());
  request.set_rank(options_.rank);
  request.set_step(progress_.step());
  request.set_directions(true);
  std::vector<std::byte> direction;
  const absl::Status read = RetryBetweenSteps([&]() -> absl::Status {
    // An earlier call delivered all chunks and broke before its end. An empty list means all.
    const bool is_repeated = request.chunks_size() > 0;
    if (is_repeated && missing.empty()) missing.push_back(request.chunks(0));
    request.clear_chunks();
    for (const int chunk : missing) request.add_chunks(static_cast<uint32_t>(chunk));
    request.clear_process_id();
    if (SharesMemory()) request.set_process_id(options_.process_id);
    const auto take = [&](const v1::WeightHeader& header, PayloadPieces payload) -> absl::Status {
      const int chunk = static_cast<int>(header.chunk());
      if (std::erase(missing, chunk) == 0) {
        return absl::DataLossError(absl::StrCat("directions of chunk ", chunk, " are not awaited"));
      }
      direction.resize(BytesInBFloat16(chunk));
      if (header.shared() && shared_memory_ != nullptr) {
        place(chunk, shared_memory_->weights(chunk).subspan(0, direction.size()));
        return absl::OkStatus();
      }
      if (TotalBytes(payload) != direction.size()) {
        return absl::DataLossError(absl::StrCat("directions of chunk ", chunk, " have ",
                                                TotalBytes(payload), " bytes, expected ",
                                                direction.size()));
      }
      CopyPieces(payload, direction.data());
      place(chunk, direction);
      return absl::OkStatus();
    };
    BALLAST_ASSIGN_OR_RETURN(const v1::ReadWeightsResponse first,
                             transport_->ReadWeights(request, absl::InfiniteDuration(), take));
    values.clear();
    for (const v1::HyperParameters& of_group : first.hyper_parameters()) {
      BALLAST_ASSIGN_OR_RETURN(values.emplace_back(), proto::FullFromProto(of_group));
    }
    return absl::OkStatus();
  });
  if (ReasonOf(read) == reason::kOtherStep) {
    // An operator has ended the round.
    BALLAST_RETURN_IF_ERROR(progress_.AwaitCommitted(options_.seal_timeout).status());
    return std::vector<HyperParameters>();
  }
  BALLAST_RETURN_IF_ERROR(Annotate(read, absl::StrCat(Context(), ": reading directions")));
  if (values.size() != options_.job.groups.size()) {
    return absl::DataLossError(
        absl::StrCat(Context(), ": directions came with the values of ", values.size(), " groups"));
  }
  if (missing.empty()) return values;
  return absl::DataLossError(
      absl::StrCat(Context(), ": the directions of ", missing.size(), " chunks did not arrive"));
}

absl::Status SessionImpl::GiveOrthogonal(
    const std::function<void(int chunk, absl::Span<std::byte> out)>& fill) {
  if (!progress_.standing().awaits_orthogonal) {
    BALLAST_RETURN_IF_ERROR(progress_.failure());
    if (progress_.standing().committed)
      return absl::OkStatus();  // An operator has ended the round.
    return absl::FailedPreconditionError(
        absl::StrCat(Context(), ": GiveOrthogonal before ReadDirections"));
  }
  // Gradients of the step are no longer needed where O goes.
  std::vector<std::vector<std::byte>> own(layout_.chunks().size());
  for (const int chunk : ChunksOfTwoRounds()) {
    if (shared_memory_ == nullptr) own[chunk].resize(BytesInBFloat16(chunk));
    fill(chunk, OrthogonalOf(own, chunk));
  }
  {
    const MutexLock lock(orthogonal_mutex_);
    orthogonal_ = std::move(own);
    has_orthogonal_ = true;
  }
  return Annotate(
      RetryBetweenSteps([&] { return SendOrthogonal(absl::InfiniteDuration()); }, MayHealUpload),
      absl::StrCat(Context(), ": giving what the rank has orthogonalized"));
}

absl::Status SessionImpl::SendOrthogonal(absl::Duration limit) {
  const MutexLock lock(orthogonal_mutex_);  // One call at a time.
  const std::vector<int> chunks = ChunksOfTwoRounds();
  if (!has_orthogonal_ || chunks.empty()) return absl::OkStatus();
  v1::OpenTrain open = OpenMessage();
  open.set_orthogonal_step(progress_.step());
  const bool shares_memory = SharesMemory();
  open.set_weights_in_shared_memory(shares_memory);
  std::vector<absl::Span<const std::byte>> given(layout_.chunks().size());
  if (!shares_memory) {
    for (const int chunk : chunks) given[chunk] = OrthogonalOf(orthogonal_, chunk);
  }
  const auto chunk_at = [&](int chunk) {
    return std::vector<std::byte>(given[chunk].begin(), given[chunk].end());
  };
  const absl::Status sent = transport_->UploadWeights(open, limit, chunks, chunk_at).status();
  return ReasonOf(sent) == reason::kOtherStep ? absl::OkStatus() : sent;
}

absl::StatusOr<v1::Job> SessionImpl::GetJob() const {
  absl::StatusOr<v1::Job> job;
  BALLAST_RETURN_IF_ERROR(RetryBetweenSteps([&] {
    job = client::GetJob(*transport_, options_.job.name, attached_.uid());
    return job.status();
  }));
  return job;
}

absl::StatusOr<JobCounts> SessionImpl::ReadCounts() {
  BALLAST_RETURN_IF_ERROR(progress_.failure());
  BALLAST_ASSIGN_OR_RETURN(const v1::Job job, GetJob());
  return JobCounts{.applied_steps = job.applied_steps(),
                   .skipped_steps = job.skipped_steps(),
                   .not_kept_steps = job.not_kept_steps(),
                   .coverage_complete_steps = job.coverage_complete_steps(),
                   .speculated_chunks = job.speculation().speculated_chunks(),
                   .published_chunks = job.speculation().published_chunks(),
                   .redone_chunks = job.speculation().redone_chunks()};
}

absl::Status SessionImpl::SaveCheckpoint(const std::string& directory) {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("SaveCheckpoint"));
  v1::SaveJobRequest request;
  request.set_name(proto::JobName(options_.job.name));
  request.set_directory(directory);
  return Annotate(transport_->SaveJob(request).status(),
                  absl::StrCat(Context(), ": saving to ", directory));
}

absl::Status SessionImpl::LoadCheckpoint(const std::string& directory) {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("LoadCheckpoint"));
  v1::LoadJobRequest request;
  request.set_name(proto::JobName(options_.job.name));
  request.set_directory(directory);
  const absl::StatusOr<v1::LoadJobResponse> loaded = transport_->LoadJob(request);
  if (!loaded.ok()) {
    return Annotate(loaded.status(), absl::StrCat(Context(), ": loading ", directory));
  }
  for (const std::string& damage : loaded->passed_over()) {
    Log().warn("job {}: a newer checkpoint is damaged: {}", options_.job.name, damage);
  }
  Log().info("job {} is at step {} of {}", options_.job.name, loaded->step(), loaded->directory());
  // The generation has risen, which ends the streams of all ranks, this one included.
  keeper_->Stop();
  OnEnded(WithReason(absl::AbortedError("a checkpoint was loaded; open the session again"),
                     reason::kOlderGeneration));
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> SessionImpl::UndoStep() {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("UndoStep"));
  v1::UndoStepRequest request;
  request.set_name(proto::JobName(options_.job.name));
  // With step and generation the request may be repeated: a repetition gets the answer of the
  // first, and undoes nothing more.
  request.set_step(committed_step_);
  *request.mutable_generation() = attached_.generation();
  if (!options_.takes_steps) {  // Others do, unnoticed.
    BALLAST_ASSIGN_OR_RETURN(const v1::Job job, GetJob());
    request.set_step(job.committed_step());
    *request.mutable_generation() = job.generation();
  }
  absl::StatusOr<v1::UndoStepResponse> undone;
  const auto undo = [&] {
    undone = transport_->UndoStep(request);
    return undone.status();
  };
  // Not RetryBetweenSteps: what ends this session meanwhile may be the undo whose answer was lost.
  const absl::Status status =
      Retry(clock_, options_.reconnect_timeout, undo, [&](const absl::Status& failed) {
        return absl::IsUnavailable(failed) && transport_->CanReconnect();
      });
  if (!status.ok()) return Annotate(status, absl::StrCat(Context(), ": undoing the last step"));
  Log().info("step {} of job {} was undone", undone->undone_step(), options_.job.name);
  // As after a load.
  keeper_->Stop();
  OnEnded(WithReason(absl::AbortedError("a step was undone; open the session again"),
                     reason::kOlderGeneration));
  return undone->undone_step();
}

}  // namespace ballast::client
