#include "cpu_optimizer_service/job/state/state_origin.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/packed/packed_state.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/state/index_record.h"

namespace ballast {

// ---------------------------------------------------------------- from the ranks

absl::StatusOr<Job::Uploader> StateOrigin::Begin(const RankHolder& holder, FirstState state) {
  BALLAST_RETURN_IF_ERROR(Validate(state, core_.spec()));
  Uploader uploader = {
      .generation = holder.generation, .process_id = holder.process_id, .moments = state.step > 0};
  state.update_counts.resize(core_.spec().layout.parameters.size(), 0);
  JobCore::Lock lock(core_);
  if (core_.gate.phase() == Phase::kClosed) return core_.CheckUsable();
  BALLAST_RETURN_IF_ERROR(members_.CheckGeneration(holder.generation));
  BALLAST_RETURN_IF_ERROR(members_.CheckHolder(holder.rank, holder.process_id));
  BALLAST_RETURN_IF_ERROR(core_.CheckUsable());
  if (!inherited_.empty() && state.step > 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job ", core_.spec().name, " is derived from another one, and new parameters begin ",
        "without moments; write those between steps"));
  }
  const bool same = !inherited_.empty() || (state.step == core_.record.committed_step &&
                                            state.update_counts == core_.record.update_counts);
  // Of a job that has its weights, each chunk is refused.
  if (!same && !core_.first_weights.complete()) {
    if (!core_.first_weights.none()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", holder.rank, " of job ", core_.spec().name, " begins with a state of step ",
          state.step, ", but first weights came with a state of step ", core_.record.committed_step,
          state.step == core_.record.committed_step ? " and other update counts" : "",
          "; restart all ranks from the same state"));
    }
    const auto swap = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
      std::swap(core_.record.committed_step, state.step);
      core_.record.update_counts.swap(state.update_counts);
    };
    swap();
    try {
      // Before any of these weights is there, so that where a later process finds them, the record
      // has the step and the counts of their state.
      journal_.Keep();
    } catch (...) {
      swap();  // What is not kept has not begun.
      throw;
    }
    core_.first_weights.BeginOtherState();
  }
  uploader.state = core_.first_weights.state();
  uploader.session = core_.first_weights.forgotten(holder.rank);
  return uploader;
}

void StateOrigin::Show() {
  if (core_.first_weights.none() || core_.first_weights.complete()) return progress_.reset();
  // As weights: where moments come with them, all of a chunk come at once.
  const auto bytes = static_cast<int64_t>(sizeof(float));
  if (progress_ == nullptr) {
    int64_t elements = 0;
    for (const Chunk& chunk : core_.layout.chunks()) elements += chunk.elements;
    progress_ = core_.BeginActivity(ActivityKind::kTakingFirstWeights, bytes * elements);
  }
  // The chunks are about of one size.
  const auto chunks = static_cast<int64_t>(core_.layout.chunks().size());
  Progress& progress = *progress_;
  progress.Count(progress.total_bytes() / chunks * (chunks - core_.first_weights.missing()) -
                 progress.done_bytes());
}

absl::Status StateOrigin::CheckFirst(int index, Plane plane, absl::Span<const float> values) const {
  const std::string what = absl::StrCat("first ", plane == Plane::kMaster ? "weights" : Name(plane),
                                        " of chunk ", index, " have ");
  if (const std::optional<int64_t> bad =
          FirstBadValue(plane, core_.layout.chunks()[index].format, values);
      bad.has_value()) {
    const ChunkPiece at = core_.layout.PieceAt(index, *bad);
    if (at.parameter == -1) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, values[*bad], " in the padding; padding must be zero"));
    }
    return BadValue(absl::StrCat("the first ", plane == Plane::kMaster ? "weight" : Name(plane),
                                 " of ", core_.spec().layout.parameters[at.parameter].name),
                    plane, values[*bad], at.parameter_offset);
  }
  for (const ChunkPiece& padding : core_.layout.padding_of(index)) {
    for (int64_t i = padding.chunk_offset; i < padding.chunk_offset + padding.elements; ++i) {
      if (values[i] == 0) continue;
      return absl::InvalidArgumentError(absl::StrCat(what, values[i], " in the padding at element ",
                                                     i, "; padding must be zero"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> StateOrigin::Write(int64_t index,
                                        absl::Span<const absl::Span<const std::byte>> payload,
                                        const std::optional<Uploader>& uploader) {
  if (index < 0 || index >= static_cast<int64_t>(core_.layout.chunks().size())) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", index, " is not in job ",
                                                   core_.spec().name, ", which has ",
                                                   core_.layout.chunks().size()));
  }
  const Chunk& chunk = core_.layout.chunks()[index];
  const bool moments = uploader.has_value() && uploader->moments;
  const HyperParameters& of_group = core_.spec().groups[chunk.group].hyper_parameters;
  const PlaneList all = PlanesOf(of_group);
  const size_t planes = moments ? all.size() : 1;
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
  const auto values_of = [&](size_t place) {
    return absl::MakeConstSpan(values).subspan(place * chunk.elements, chunk.elements);
  };
  for (size_t place = 0; place < planes; ++place) {
    BALLAST_RETURN_IF_ERROR(CheckFirst(static_cast<int>(index), all[place], values_of(place)));
  }
  // Nothing is waited for. While a load or a clearing is under way, the generation has risen and an
  // uploader of the older one is refused; a clearing itself touches no weights, and nothing reads
  // them before all are there.
  // What is checked under this lock must hold until the planes are copied, so they are copied under
  // it.
  JobCore::Section section(core_);
  if (core_.gate.phase() == Phase::kClosed) return core_.CheckUsable();
  if (uploader.has_value()) {
    BALLAST_RETURN_IF_ERROR(members_.CheckGeneration(uploader->generation));
    BALLAST_RETURN_IF_ERROR(members_.CheckHolder(chunk.rank, uploader->process_id));
  }
  BALLAST_RETURN_IF_ERROR(core_.CheckUsable());
  if (core_.first_weights.complete()) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(
            "job ", core_.spec().name, " has its weights; load a checkpoint to replace them")),
        reason::kHasWeights);
  }
  if (uploader.has_value() && uploader->state != core_.first_weights.state()) {
    return absl::FailedPreconditionError(
        absl::StrCat("another rank of job ", core_.spec().name,
                     " uploads first weights with another state, of step ",
                     core_.record.committed_step, "; restart all ranks from the same state"));
  }
  // Of an earlier session of the same process, whose bytes were under way for longer than it lived.
  if (uploader.has_value() && uploader->session != core_.first_weights.forgotten(chunk.rank)) {
    return WithReason(
        absl::AbortedError(absl::StrCat("another session has taken rank ", chunk.rank, " of job ",
                                        core_.spec().name, " and brings its first weights")),
        reason::kStreamReplaced);
  }
  for (size_t place = 0; place < planes; ++place) {
    WriteFirst(static_cast<int>(index), all[place], values_of(place));
  }
  for (size_t place = planes; place < all.size(); ++place) {
    const float initial = InitialValue(of_group, all[place]);
    // Fresh memory has zeros, unless moments of an upload that was given up lie there.
    if (initial == 0 && core_.first_weights.state() == 0) continue;
    values.assign(chunk.elements, 0.0f);
    for (const ChunkPiece& piece : core_.layout.Pieces(static_cast<int>(index))) {
      std::fill_n(values.begin() + piece.chunk_offset, piece.elements, initial);
    }
    WriteFirst(static_cast<int>(index), all[place], values);
  }
  // After the planes: a later process takes this word for it that they are there.
  memory_.store->SetArrived(static_cast<int>(index), true);
  journal_.Touch();
  core_.first_weights.Arrive(index);
  Show();
  if (core_.first_weights.missing() > 0) return false;
  // A derived job is complete once it takes the place of its origin, and one with several members
  // once all of them have theirs.
  if (core_.identity.derivation.uid.empty() && core_.spec().member_count() == 1) Complete();
  return true;
}

void StateOrigin::Forget(int rank) {
  if (core_.first_weights.complete()) return;
  const absl::Span<const int> chunks = core_.layout.chunks_of_rank(rank);
  for (const int chunk : chunks) memory_.store->SetArrived(chunk, false);
  core_.first_weights.Forget(rank, chunks);
  Show();
}

void StateOrigin::Complete() {
  core_.first_weights.CompleteAll();
  Show();
  // After a death the words may be of a state that was given up.
  memory_.store->SetStep(core_.record.committed_step);
  if (inherited_.empty()) saver_.schedule.BeginAt(core_.record.committed_step);
  journal_.Keep();
  core_.Tell(absl::StrCat("has all first weights, and ",
                          inherited_.empty() ? "begins" : "goes on from another job's state",
                          " at step ", core_.record.committed_step));
}

// ---------------------------------------------------------------- from another job, or a checkpoint

absl::Status StateOrigin::Inherit(const CheckpointIndex& index, const ReadPlane& read) {
  BALLAST_RETURN_IF_ERROR(ChooseInherited(index));
  const auto chunks = static_cast<int>(core_.layout.chunks().size());
  if (!core_.identity.derivation.checkpoint.empty()) {  // The pool's threads wait for no disk.
    for (int chunk = 0; chunk < chunks; ++chunk) {
      BALLAST_RETURN_IF_ERROR(InheritChunk(chunk, read));
    }
  } else {
    std::vector<absl::Status> read_chunks(chunks);
    core_.environment.tasks->ForEach(chunks, [&](int64_t chunk) {
      read_chunks[chunk] = InheritChunk(static_cast<int>(chunk), read);
    });
    for (const absl::Status& each : read_chunks) BALLAST_RETURN_IF_ERROR(each);
  }
  JobCore::Lock lock(core_);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (std::ranges::all_of(core_.layout.Pieces(chunk),
                            [&](const ChunkPiece& piece) { return inherited_[piece.parameter]; })) {
      core_.first_weights.Inherit(chunk);
    }
  }
  TakeRecord(index, core_, *memory_.store, saver_);
  for (size_t p = 0; p < inherited_.size(); ++p) {
    if (!inherited_[p]) core_.record.update_counts[p] = 0;
  }
  // As they are described now. Nor does a group's name say that it is the same one.
  for (size_t group = 0; group < core_.spec().groups.size(); ++group) {
    core_.record.hyper_parameters[group] = core_.spec().groups[group].hyper_parameters;
  }
  if (!core_.identity.derivation.uid.empty()) core_.first_weights.Hold();
  return absl::OkStatus();
}

absl::Status StateOrigin::ChooseInherited(const CheckpointIndex& index) {
  std::map<std::string, HyperParameters> saved_groups;  // By name.
  for (const CheckpointIndex::Group& group : index.groups) {
    saved_groups[group.name] = group.hyper_parameters;
  }
  inherited_.assign(core_.spec().layout.parameters.size(), false);
  for (const CheckpointIndex::Parameter& saved : index.parameters) {
    const int p = core_.layout.FindParameter(saved.name);
    if (p == -1) continue;
    const ParameterSpec& parameter = core_.spec().layout.parameters[p];
    if (!parameter.trainable || parameter.shape != saved.shape) continue;
    const std::string planes = DifferenceOfPlanes(
        absl::StrCat("parameter ", saved.name),
        core_.spec().groups[parameter.group].hyper_parameters, saved_groups[saved.group]);
    std::string difference = planes;
    if (planes.empty() && saved.format != core_.layout.format(p)) {
      difference = absl::StrCat("the state of ", saved.name, " is ", Name(core_.layout.format(p)),
                                " here and ", Name(saved.format), " there");
    }
    if (!difference.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("job ", core_.spec().name,
                       " cannot be derived from its source: ", difference, "; give it the same"));
    }
    inherited_[p] = true;
  }
  const bool has_any =
      std::ranges::any_of(core_.spec().layout.parameters, &ParameterSpec::trainable);
  if (has_any && std::ranges::find(inherited_, true) == inherited_.end()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job ", core_.spec().name,
        " cannot be derived: no parameter has the name and shape of one in its source; use the ",
        "names of the source, or create a job with another name"));
  }
  return absl::OkStatus();
}

absl::Status StateOrigin::InheritChunk(int index, const ReadPlane& read) {
  const Slot& slot = memory_.store->Published(index);
  std::vector<float> values;
  for (const ChunkPiece& piece : core_.layout.Pieces(index)) {
    if (!inherited_[piece.parameter]) continue;
    const ParameterSpec& parameter = core_.spec().layout.parameters[piece.parameter];
    values.resize(piece.elements);
    for (const Plane plane : PlanesOf(core_.spec().groups[parameter.group].hyper_parameters)) {
      BALLAST_RETURN_IF_ERROR(
          read(parameter.name, plane, piece.parameter_offset, absl::MakeSpan(values)));
      WritePlane(slot, plane, piece.chunk_offset, values);
    }
  }
  return absl::OkStatus();
}

void StateOrigin::WriteFirst(int index, Plane plane, absl::Span<const float> values) {
  const Slot& slot = memory_.store->Published(index);
  if (inherited_.empty()) return WritePlane(slot, plane, 0, values);
  for (const ChunkPiece& piece : core_.layout.Pieces(index)) {
    if (inherited_[piece.parameter]) continue;
    WritePlane(slot, plane, piece.chunk_offset, values.subspan(piece.chunk_offset, piece.elements));
  }
}

}  // namespace ballast
