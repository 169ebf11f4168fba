// First weights of a job, with or without the moments of a state that it goes on from.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {

absl::StatusOr<Job::Uploader> JobImpl::BeginFirstWeights(const RankHolder& holder,
                                                         FirstState state) {
  BALLAST_RETURN_IF_ERROR(Validate(state, spec()));
  Uploader uploader = {
      .generation = holder.generation, .process_id = holder.process_id, .moments = state.step > 0};
  state.update_counts.resize(spec().layout.parameters.size(), 0);
  MutexLock lock(mutex_);
  if (gate_.phase() == Phase::kClosed) return CheckUsable();
  BALLAST_RETURN_IF_ERROR(CheckGeneration(holder.generation));
  BALLAST_RETURN_IF_ERROR(CheckHolder(holder.rank, holder.process_id));
  BALLAST_RETURN_IF_ERROR(CheckUsable());
  if (!inherited_.empty() && state.step > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", spec().name, " is derived from another one, and new parameters begin ",
                     "without moments; write those between steps"));
  }
  const bool same = !inherited_.empty() || (state.step == record_.committed_step &&
                                            state.update_counts == record_.update_counts);
  // Of a job that has its weights, each chunk is refused.
  if (!same && !first_weights_.complete()) {
    if (!first_weights_.none()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", holder.rank, " of job ", spec().name, " begins with a state of step ",
          state.step, ", and first weights have come with another one, of step ",
          record_.committed_step, state.step == record_.committed_step ? " with other counts" : "",
          "; start all ranks again with one state"));
    }
    const auto swap = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      std::swap(record_.committed_step, state.step);
      record_.update_counts.swap(state.update_counts);
    };
    swap();
    try {
      // Before any of these weights is there, so that where a later process finds them, the record
      // has the step and the counts of their state.
      Keep();
    } catch (...) {
      swap();  // What is not kept has not begun.
      throw;
    }
    first_weights_.BeginOtherState();
  }
  uploader.state = first_weights_.state();
  uploader.session = first_weights_.forgotten(holder.rank);
  return uploader;
}

void JobImpl::ShowFirstWeights() {
  if (first_weights_.none() || first_weights_.complete()) return taking_first_weights_.reset();
  // As weights: where moments come with them, all of a chunk come at once.
  const auto bytes = static_cast<int64_t>(sizeof(float));
  if (taking_first_weights_ == nullptr) {
    int64_t elements = 0;
    for (const Chunk& chunk : layout_.chunks()) elements += chunk.elements;
    taking_first_weights_ = BeginActivity(ActivityKind::kTakingFirstWeights, bytes * elements);
  }
  // The chunks are about of one size.
  const auto chunks = static_cast<int64_t>(layout_.chunks().size());
  Progress& progress = *taking_first_weights_;
  progress.Count(progress.total_bytes() / chunks * (chunks - first_weights_.missing()) -
                 progress.done_bytes());
}

absl::Status JobImpl::CheckFirst(int index, Plane plane, absl::Span<const float> values) const {
  const std::string what = absl::StrCat("first ", plane == Plane::kMaster ? "weights" : Name(plane),
                                        " of chunk ", index, " have ");
  if (const std::optional<int64_t> bad = FirstBadValue(plane, values); bad.has_value()) {
    const ChunkPiece at = layout_.PieceAt(index, *bad);
    if (at.parameter == -1) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, values[*bad], " in the padding; padding must be zero"));
    }
    return BadValue(absl::StrCat("the first ", plane == Plane::kMaster ? "weight" : Name(plane),
                                 " of ", spec().layout.parameters[at.parameter].name),
                    plane, values[*bad], at.parameter_offset);
  }
  for (const ChunkPiece& padding : layout_.padding_of(index)) {
    for (int64_t i = padding.chunk_offset; i < padding.chunk_offset + padding.elements; ++i) {
      if (values[i] == 0) continue;
      return absl::InvalidArgumentError(absl::StrCat(what, values[i], " in the padding at element ",
                                                     i, "; padding must be zero"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> JobImpl::WriteInitialWeights(
    int64_t index, absl::Span<const absl::Span<const std::byte>> payload,
    const std::optional<Uploader>& uploader) {
  if (index < 0 || index >= static_cast<int64_t>(layout_.chunks().size())) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", index, " is not in job ", spec().name,
                                                   ", which has ", layout_.chunks().size()));
  }
  const Chunk& chunk = layout_.chunks()[index];
  const bool moments = uploader.has_value() && uploader->moments;
  const int planes = moments ? PlanesOf(spec().groups[chunk.group]) : 1;
  size_t size_bytes = 0;
  for (const auto& piece : payload) size_bytes += piece.size();
  if (size_bytes != planes * chunk.elements * sizeof(float)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "first weights of chunk ", index, " have ", size_bytes, " bytes, expected ",
        planes == 1 ? "" : absl::StrCat(planes, " planes of "), chunk.elements, " fp32 values"));
  }
  // Gathered and checked apart, so that weights which are refused leave the chunk as it was.
  std::vector<float> values(planes * chunk.elements);
  auto* out = reinterpret_cast<std::byte*>(values.data());
  for (const auto& piece : payload) {
    if (!piece.empty()) std::memcpy(out, piece.data(), piece.size());
    out += piece.size();
  }
  const auto plane_of = [&](int plane) {
    return absl::MakeConstSpan(values).subspan(plane * chunk.elements, chunk.elements);
  };
  for (int plane = 0; plane < planes; ++plane) {
    BALLAST_RETURN_IF_ERROR(
        CheckFirst(static_cast<int>(index), static_cast<Plane>(plane), plane_of(plane)));
  }
  // Nothing is waited for. While a load or a clearing is under way, the generation has risen and an
  // uploader of the older one is refused; a clearing itself touches no weights, and nothing reads
  // them before all are there.
  // What is checked under this lock must hold until the planes are copied, so they are copied under
  // it.
  Section section(*this);
  if (gate_.phase() == Phase::kClosed) return CheckUsable();
  if (uploader.has_value()) {
    BALLAST_RETURN_IF_ERROR(CheckGeneration(uploader->generation));
    BALLAST_RETURN_IF_ERROR(CheckHolder(chunk.rank, uploader->process_id));
  }
  BALLAST_RETURN_IF_ERROR(CheckUsable());
  if (first_weights_.complete()) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(
            "job ", spec().name, " has its weights; load a checkpoint to replace them")),
        reason::kHasWeights);
  }
  if (uploader.has_value() && uploader->state != first_weights_.state()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "another rank of job ", spec().name, " has begun its first weights with another state, of ",
        "step ", record_.committed_step, "; start all ranks again with one state"));
  }
  // Of an earlier session of the same process, whose bytes were under way for longer than it lived.
  if (uploader.has_value() && uploader->session != first_weights_.forgotten(chunk.rank)) {
    return WithReason(
        absl::AbortedError(absl::StrCat("another session has taken rank ", chunk.rank, " of job ",
                                        spec().name, " and brings its first weights")),
        reason::kStreamReplaced);
  }
  const Slot& slot = store_->Published(static_cast<int>(index));
  for (int plane = 0; plane < planes; ++plane) {
    WriteFirst(static_cast<int>(index), static_cast<Plane>(plane), plane_of(plane));
  }
  // Moments of an upload that was given up may lie there.
  for (int plane = planes; plane < kMaxPlanes && first_weights_.state() > 0; ++plane) {
    if (slot.planes[plane] != nullptr) std::fill_n(slot.planes[plane], chunk.elements, 0.0f);
  }
  // After the planes: a later process takes this word for it that they are there.
  store_->SetArrived(static_cast<int>(index), true);
  ++changes_;
  first_weights_.Arrive(index);
  ShowFirstWeights();
  if (first_weights_.missing() > 0) return false;
  if (identity_.derivation.uid.empty()) {
    CompleteFirstWeights();
  } else {
    RunAfter([take_place = environment_.take_place, self = Self()] { take_place(self); });
  }
  return first_weights_.complete();
}

void JobImpl::CompleteFirstWeights() {
  first_weights_.CompleteAll();
  ShowFirstWeights();
  // After a death the words may be of a state that was given up.
  store_->SetStep(record_.committed_step);
  if (inherited_.empty()) save_schedule_.BeginAt(record_.committed_step);
  Keep();
  Tell(absl::StrCat("has all first weights, and ",
                    inherited_.empty() ? "begins" : "goes on from another job's state", " at step ",
                    record_.committed_step));
}

}  // namespace ballast
