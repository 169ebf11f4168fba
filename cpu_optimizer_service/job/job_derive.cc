// A job that goes on from another one, or from a checkpoint, with other parameters (Derivation).
//
// Both jobs are there until the new one has all its weights. The old one may go on meanwhile: then
// the new one is given up. Otherwise one flip of the new one's record makes it the job, and the old
// one is closed.
#include <algorithm>
#include <map>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/job_impl.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"

namespace ballast {

absl::Status JobImpl::CheckMayDerive() const {
  BALLAST_RETURN_IF_ERROR(CheckUsable());
  if (!first_weights_.complete()) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(
            "job ", spec().name, " has no weights yet, and no job can be derived from it")),
        reason::kNoWeightsYet);
  }
  // Of a step that all ranks have taken back, or left, nothing is wanted.
  bool is_between = std::holds_alternative<std::monostate>(step_);
  if (const auto* open = std::get_if<OpenStep>(&step_); open != nullptr) {
    is_between = true;
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      if (open->ranks()[rank].begun && ranks_[rank].listener != nullptr) is_between = false;
    }
  }
  if (is_between && writing_ == nullptr) return absl::OkStatus();
  return WithReason(absl::FailedPreconditionError(absl::StrCat(
                        "a rank of job ", spec().name, " has begun step ",
                        record_.committed_step + 1, ", or writes state before it, without the ",
                        "parameters that another one wants; all ranks change them alike")),
                    reason::kOtherSettings);
}

std::vector<std::string> JobImpl::Ancestry() const {
  std::vector<std::string> ancestry = {uid()};
  for (const std::string& each : record_.ancestors) {
    if (ancestry.size() < kMostAncestors) ancestry.push_back(each);
  }
  return ancestry;
}

void JobImpl::Move() {
  ++moves_;
  if (!std::exchange(has_derived_, false)) return;
  RunAfter([moved = environment_.moved, self = Self()] { moved(self); });
}

absl::StatusOr<JobImpl::Lent> JobImpl::Lend() {
  return Await<Lent>([&](Done<Lent> done) {
    Enter(Admission::kRead, -1,
          [this, done = std::move(done)](absl::Status admitted)
              ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                if (admitted.ok()) admitted = CheckMayDerive();
                if (!admitted.ok()) return Reply<Lent>(std::move(done), admitted);
                gate_.StartReading();  // What would change its state waits.
                has_derived_ = true;
                Reply<Lent>(std::move(done), Lent{.index = MakeIndex(record_),
                                                  .history = record_.history,
                                                  .save_schedule = save_schedule_,
                                                  .resumed_uid = record_.resumed_uid,
                                                  .ancestors = Ancestry(),
                                                  .moves = moves_});
              });
  });
}

absl::Status JobImpl::Inherit(JobImpl& origin) {
  BALLAST_ASSIGN_OR_RETURN(Lent lent, origin.Lend());
  absl::Cleanup stop_reading = [&origin] { origin.StopReading(); };  // Also without memory.
  const absl::Status inherited = Inherit(
      lent.index, [&](const std::string& name, Plane plane, int64_t offset, absl::Span<float> out) {
        origin.ReadCommitted(origin.layout_.FindParameter(name), plane, offset, out);
        return absl::OkStatus();
      });
  std::move(stop_reading).Invoke();
  BALLAST_RETURN_IF_ERROR(inherited);
  history_.GoOnFrom(origin.history_);
  MutexLock lock(mutex_);
  origin_moves_ = lent.moves;
  save_schedule_ = lent.save_schedule;
  record_.resumed_uid = lent.resumed_uid;
  record_.ancestors = std::move(lent.ancestors);
  record_.history = std::move(lent.history);
  for (StepRecord& step : record_.history.recent_steps) step = WithGroups(step, lent.index.groups);
  return absl::OkStatus();
}

absl::Status JobImpl::InheritCheckpoint(const std::string& path, JobImpl* origin) {
  uint64_t moves = 0;
  std::vector<std::string> ancestors;
  if (origin != nullptr) {
    MutexLock lock(origin->mutex_);
    BALLAST_RETURN_IF_ERROR(origin->CheckMayDerive());
    origin->has_derived_ = true;
    moves = origin->moves_;
    ancestors = origin->Ancestry();
  }
  {
    MutexLock lock(mutex_);
    origin_moves_ = moves;
    record_.ancestors = std::move(ancestors);
  }
  const auto progress = BeginActivity(ActivityKind::kLoadingCheckpoint, need_.state_bytes, path);
  const CountsIn here(*progress);
  BALLAST_ASSIGN_OR_RETURN(const OpenedCheckpoint opened,
                           OpenNewest(*environment_.file_system, path,
                                      std::max(kMostForeignIndexBytes, MostIndexBytes(spec())),
                                      environment_.checkpoint_uses));
  return Inherit(opened.checkpoint.index(),
                 [&](const std::string& name, Plane plane, int64_t offset, absl::Span<float> out) {
                   return opened.checkpoint.Read(name, plane, offset, out);
                 });
}

absl::Status JobImpl::Inherit(const CheckpointIndex& index, const ReadPlane& read) {
  BALLAST_RETURN_IF_ERROR(ChooseInherited(index));
  const auto chunks = static_cast<int>(layout_.chunks().size());
  if (!identity_.derivation.checkpoint.empty()) {  // The pool's threads wait for no disk.
    for (int chunk = 0; chunk < chunks; ++chunk) {
      BALLAST_RETURN_IF_ERROR(InheritChunk(chunk, read));
    }
  } else {
    std::vector<absl::Status> read_chunks(chunks);
    environment_.tasks->ForEach(chunks, [&](int64_t chunk) {
      read_chunks[chunk] =
          OrOutOfMemory([&] { return InheritChunk(static_cast<int>(chunk), read); });
    });
    for (const absl::Status& each : read_chunks) BALLAST_RETURN_IF_ERROR(each);
  }
  MutexLock lock(mutex_);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (std::ranges::all_of(layout_.Pieces(chunk),
                            [&](const ChunkPiece& piece) { return inherited_[piece.parameter]; })) {
      first_weights_.Inherit(chunk);
    }
  }
  TakeRecord(index);
  for (size_t p = 0; p < inherited_.size(); ++p) {
    if (!inherited_[p]) record_.update_counts[p] = 0;
  }
  // As they are described now. Nor does a group's name say that it is the same one.
  for (size_t group = 0; group < spec().groups.size(); ++group) {
    record_.hyper_parameters[group] = spec().groups[group].hyper_parameters;
  }
  if (!identity_.derivation.uid.empty()) first_weights_.Hold();
  return absl::OkStatus();
}

absl::Status JobImpl::ChooseInherited(const CheckpointIndex& index) {
  std::map<std::string, bool> amsgrad;  // By name of a group.
  for (const CheckpointIndex::Group& group : index.groups) {
    amsgrad[group.name] = group.hyper_parameters.amsgrad;
  }
  inherited_.assign(spec().layout.parameters.size(), false);
  for (const CheckpointIndex::Parameter& saved : index.parameters) {
    const int p = layout_.FindParameter(saved.name);
    if (p == -1) continue;
    const ParameterSpec& parameter = spec().layout.parameters[p];
    if (!parameter.trainable || parameter.shape != saved.shape) continue;
    // It says which planes there are.
    if (spec().groups[parameter.group].hyper_parameters.amsgrad != amsgrad[saved.group]) {
      return absl::FailedPreconditionError(
          absl::StrCat("job ", spec().name, " cannot be derived: amsgrad of parameter ", saved.name,
                       " is ", amsgrad[saved.group] ? "on" : "off",
                       " in what it would go on from, and not here; leave ", "amsgrad as it is"));
    }
    inherited_[p] = true;
  }
  const bool has_any = std::ranges::any_of(spec().layout.parameters, &ParameterSpec::trainable);
  if (has_any && std::ranges::find(inherited_, true) == inherited_.end()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job ", spec().name,
        " cannot be derived: no parameter has the name and shape of one in what it would go on ",
        "from; give the names that it has there, or create a job of another name"));
  }
  return absl::OkStatus();
}

absl::Status JobImpl::InheritChunk(int index, const ReadPlane& read) {
  const Slot& slot = store_->Published(index);
  for (const ChunkPiece& piece : layout_.Pieces(index)) {
    if (!inherited_[piece.parameter]) continue;
    for (int plane = 0; plane < kMaxPlanes; ++plane) {
      if (slot.planes[plane] == nullptr) continue;
      BALLAST_RETURN_IF_ERROR(
          read(spec().layout.parameters[piece.parameter].name, static_cast<Plane>(plane),
               piece.parameter_offset,
               absl::MakeSpan(slot.planes[plane] + piece.chunk_offset, piece.elements)));
    }
  }
  return absl::OkStatus();
}

void JobImpl::WriteFirst(int index, Plane plane, absl::Span<const float> values) {
  float* const to = store_->Published(index).planes[static_cast<int>(plane)];
  if (inherited_.empty()) {
    std::copy(values.begin(), values.end(), to);
    return;
  }
  for (const ChunkPiece& piece : layout_.Pieces(index)) {
    if (inherited_[piece.parameter]) continue;
    std::copy_n(values.data() + piece.chunk_offset, piece.elements, to + piece.chunk_offset);
  }
}

Pending JobImpl::GiveWayTo(std::shared_ptr<JobImpl> derived, Done<bool> done) {
  return Enter(Admission::kClose, -1,
               [this, self = Self(), derived = std::move(derived), done = std::move(done)](
                   absl::Status admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                 if (admitted.ok()) admitted = CheckMayDerive();
                 if (!admitted.ok()) return Reply<bool>(std::move(done), admitted);
                 switch (derived->TakePlace(moves_)) {
                   case Succession::kMoved:
                     return Reply<bool>(
                         std::move(done),
                         absl::FailedPreconditionError(absl::StrCat(
                             "job ", spec().name, " has gone on, to step ", record_.committed_step,
                             ", since another one was derived from it; derive it again")));
                   case Succession::kMissing:
                     return Reply<bool>(std::move(done), false);
                   case Succession::kDone:
                     RunAfter([derived] { const Section section(*derived); });
                     break;
                 }
                 CloseNow(absl::StrCat("job ", spec().name, " goes on as another one, uid ",
                                       derived->uid(), ", which was derived from it"),
                          std::move(done));
               });
}

JobImpl::Succession JobImpl::TakePlace(uint64_t origin_moves) {
  MutexLock lock(mutex_);  // No section: what that would run must not meet the origin's lock.
  if (origin_moves != origin_moves_) return Succession::kMoved;
  // A rank was taken anew since the last of them came: it brings its own again.
  if (first_weights_.missing() > 0) return Succession::kMissing;
  CompleteFirstWeights();
  return Succession::kDone;
}

}  // namespace ballast
