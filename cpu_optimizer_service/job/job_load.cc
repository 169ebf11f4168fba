// Replacing a job's state: by a checkpoint's, or by that of the step before.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/steady_time.h"
#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {

namespace {

using Clock = std::chrono::steady_clock;

constexpr char kGivenUp[] = "the caller has given up waiting";

}  // namespace

// ---------------------------------------------------------------- load

absl::Status JobImpl::CheckLoadable(const Checkpoint& checkpoint) const {
  const CheckpointIndex& index = checkpoint.index();
  const auto refuse = [&](const auto&... what) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the checkpoint of job ", index.job, " does not fit job ", spec().name, ": ", what...));
  };
  std::vector<bool> seen(spec().layout.parameters.size());
  for (const CheckpointIndex::Parameter& saved : index.parameters) {
    const int p = layout_.FindParameter(saved.name);
    if (p == -1) return refuse("it has a parameter ", saved.name, " that the job has not");
    const ParameterSpec& parameter = spec().layout.parameters[p];
    if (!parameter.trainable) return refuse(saved.name, " is frozen in the job");
    if (parameter.shape != saved.shape) {
      return refuse(saved.name, " has shape [", absl::StrJoin(saved.shape, ", "), "] there and [",
                    absl::StrJoin(parameter.shape, ", "), "] in the job");
    }
    if (const std::string& group = spec().groups[parameter.group].name; group != saved.group) {
      return refuse(saved.name, " is in group ", saved.group, " there and ", group, " in the job");
    }
    if (seen[p]) return refuse("it has ", saved.name, " twice");
    seen[p] = true;
  }
  for (size_t p = 0; p < seen.size(); ++p) {
    const ParameterSpec& parameter = spec().layout.parameters[p];
    if (parameter.trainable && !seen[p]) return refuse("it has no parameter ", parameter.name);
  }
  for (const GroupSpec& group : spec().groups) {
    const auto saved =
        std::find_if(index.groups.begin(), index.groups.end(),
                     [&](const CheckpointIndex::Group& g) { return g.name == group.name; });
    if (saved == index.groups.end()) return refuse("it has no group ", group.name);
    // It says which planes there are, in the checkpoint and in the job.
    if (saved->hyper_parameters.amsgrad != group.hyper_parameters.amsgrad) {
      return refuse("amsgrad of group ", group.name, " differs");
    }
  }
  return absl::OkStatus();
}

absl::Status JobImpl::LoadChunk(const Checkpoint& checkpoint, int index) {
  const Chunk& chunk = layout_.chunks()[index];
  BALLAST_ASSIGN_OR_RETURN(const ChunkStore::Write write,
                           store_->BeginWrite(index, Destination::kInPlaceIfFree));
  absl::Status status;
  for (int plane = 0; plane < kMaxPlanes; ++plane) {
    float* const to = write.to.planes[plane];
    if (to == nullptr) continue;
    // Padding belongs to no piece and must be zero.
    std::fill_n(to, chunk.elements, 0.0f);
    for (const ChunkPiece& piece : layout_.Pieces(index)) {
      if (!status.ok()) break;
      status = checkpoint.Read(spec().layout.parameters[piece.parameter].name,
                               static_cast<Plane>(plane), piece.parameter_offset,
                               absl::MakeSpan(to + piece.chunk_offset, piece.elements));
    }
  }
  // Also after an error: a write in place cannot be dropped. The job is torn then, and only a load
  // or a close helps.
  store_->Publish(write, checkpoint.index().step);
  return status;
}

StepRecord JobImpl::WithGroups(const StepRecord& of,
                               absl::Span<const CheckpointIndex::Group> groups) const {
  StepRecord record = of;
  // They may be in another order, and some that the job has not.
  const auto of_job = [&](const auto& theirs, const auto& otherwise, auto& values) {
    if (theirs.empty()) return;
    values.assign(layout_.group_count(), otherwise);
    for (int group = 0; group < layout_.group_count(); ++group) {
      for (size_t i = 0; i < groups.size(); ++i) {
        if (groups[i].name == spec().groups[group].name) values[group] = theirs[i];
      }
    }
  };
  of_job(of.hyper_parameters, HyperParameters(), record.hyper_parameters);
  of_job(of.outcome.decision.multipliers, 1, record.outcome.decision.multipliers);
  of_job(of.voted.multipliers, 1, record.voted.multipliers);
  return record;
}

namespace {

// How far a load has come that its caller may give up.
class LoadCall {
 public:
  // For the disk thread. False: the caller has gone.
  bool Begin() { return Move(State::kBegun); }
  // True: it had not begun, and does not any more; the caller of this calls the Done.
  bool Cancel() {
    cancelled_ = true;
    return Move(State::kGivenUp);
  }
  bool cancelled() const { return cancelled_; }

 private:
  enum class State : uint8_t { kQueued, kBegun, kGivenUp };
  bool Move(State to) {
    State queued = State::kQueued;
    return state_.compare_exchange_strong(queued, to);
  }

  std::atomic<State> state_ = State::kQueued;
  std::atomic<bool> cancelled_ = false;
};

}  // namespace

// Verified on a disk thread; then, in the gate, the step is cleared and readers are waited for;
// then read on a disk thread again.
Pending JobImpl::Load(LoadRequest request, Done<CheckpointInfo> done) {
  const auto number = std::make_shared<uint64_t>(0);
  auto shared_done = std::make_shared<Done<CheckpointInfo>>(std::move(done));
  const auto call = std::make_shared<LoadCall>();
  const auto load = [this, self = Self(), request = std::move(request), shared_done, number, call] {
    // Its caller may have gone while it was queued behind other loads and saves.
    if (!call->Begin()) return;
    const Clock::time_point began = Clock::now();
    absl::StatusOr<OpenedCheckpoint> opened = OrOutOfMemory([&] {
      const auto progress = BeginActivity(ActivityKind::kVerifyingCheckpoint, 0, request.path);
      const CountsIn here(*progress);
      return OpenToLoad(request);
    });
    absl::Status status = opened.ok() ? CheckLoadable(opened->checkpoint) : opened.status();
    // To verify a large checkpoint takes long. Up to here nothing of the job has changed.
    if (status.ok() && call->cancelled()) status = absl::CancelledError(kGivenUp);
    if (!status.ok()) {
      opened = status;  // Whoever is told may delete it.
      return std::move(*shared_done)(std::move(status));
    }
    auto checkpoint = std::make_shared<OpenedCheckpoint>(*std::move(opened));
    const auto start = [this, self, shared_done, checkpoint,
                        began]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      // The step is cleared. Before anything is written, those who read in place have to end.
      gate_.StartLoading();
      EnterHere(Admission::kReplaceState, -1,
                [this, self, shared_done, checkpoint,
                 began](absl::Status admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                  if (!admitted.ok()) {  // Broken.
                    return Reply<CheckpointInfo>(std::move(*shared_done), admitted);
                  }
                  RunAfter([this, self, shared_done, checkpoint, began] {
                    environment_.disk_threads->Run([this, self, shared_done, checkpoint, began] {
                      Guarded([&] { ReplaceState(*checkpoint, began, std::move(*shared_done)); });
                    });
                  });
                });
    };
    Enter(
        Admission::kLoad, -1,
        [this, start, shared_done, checkpoint, weights_only = request.weights_only](
            absl::Status admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
          if (!admitted.ok()) {
            return Reply<CheckpointInfo>(std::move(*shared_done), admitted);
          }
          // In one flip of the record with the generation. Not the folder: a newer one may come
          // there.
          record_.loading = KeptLoad{.path = checkpoint->directory, .weights_only = weights_only};
          RaiseGeneration(
              absl::StrCat("job ", spec().name, " was loaded from a checkpoint; attach again"),
              start);
        },
        number);
  };
  environment_.disk_threads->Run([self = Self(), load] { self->Guarded(load); });
  return Pending([in_gate = PendingOf(number), call, shared_done] {
    // Either this or the disk thread has the Done, whichever moved the state first.
    if (call->Cancel()) return std::move(*shared_done)(absl::CancelledError(kGivenUp));
    in_gate.Cancel();
  });
}

absl::StatusOr<OpenedCheckpoint> JobImpl::OpenToLoad(const LoadRequest& request) const {
  FileSystem& file_system = *environment_.file_system;
  if (request.weights_only) {
    // A job at its begin, of nobody's state.
    JobRecord begin = {.update_counts = std::vector<int64_t>(spec().layout.parameters.size())};
    for (const GroupSpec& group : spec().groups) {
      begin.hyper_parameters.push_back(group.hyper_parameters);
    }
    CheckpointIndex index = MakeIndex(begin);
    index.uid.clear();
    BALLAST_ASSIGN_OR_RETURN(Checkpoint weights,
                             Checkpoint::OpenWeights(file_system, request.path, std::move(index),
                                                     MostIndexBytes(spec())));
    return OpenedCheckpoint{
        .checkpoint = std::move(weights), .directory = request.path, .passed_over = {}};
  }
  BALLAST_ASSIGN_OR_RETURN(
      OpenedCheckpoint opened,
      OpenNewest(file_system, request.path, MostIndexBytes(spec()), environment_.checkpoint_uses));
  for (const std::string& damage : opened.passed_over) {
    if (!environment_.warn) break;
    environment_.warn(absl::StrCat("job ", spec().name, " is loaded from ", opened.directory,
                                   ", not from a newer checkpoint: ", damage));
  }
  return opened;
}

void JobImpl::ReplaceState(OpenedCheckpoint& opened, Clock::time_point began,
                           Done<CheckpointInfo> done) {
  const Checkpoint& checkpoint = opened.checkpoint;
  absl::Status status;
  const std::vector<int> planes = PlanesByGroup(spec());
  const auto bytes_of = [&](const Chunk& chunk) {
    return SlotBytes(chunk.elements, planes[chunk.group]);
  };
  auto progress =
      BeginActivity(ActivityKind::kLoadingCheckpoint, need_.state_bytes, opened.directory);
  for (int chunk = 0; chunk < static_cast<int>(layout_.chunks().size()) && status.ok(); ++chunk) {
    status = OrOutOfMemory([&] { return LoadChunk(checkpoint, chunk); });
    progress->Count(bytes_of(layout_.chunks()[chunk]));
  }
  progress = nullptr;  // Before its caller is told.
  Section section(*this);
  // It ends after the record says that it is loaded, and before its caller is told, at the end of
  // the section.
  const CheckpointUses::Use use = std::move(opened.use);
  if (broken()) return Reply<CheckpointInfo>(std::move(done), broken_);
  // The record still says that the checkpoint is being loaded. Where the process dies before the
  // flip below, the next one loads it again.
  gate_.FinishLoading(/*torn=*/!status.ok());
  if (!status.ok()) {
    record_.torn_by = opened.directory;
    record_.loading.reset();
    Keep();
    Tell(absl::StrCat("not loaded from ", opened.directory, ": ", status.message()));
    return Reply<CheckpointInfo>(std::move(done), status);
  }
  TakeRecord(checkpoint.index());
  // A checkpoint may be loaded in place of first weights.
  first_weights_.CompleteAll();
  record_.torn_by.clear();
  record_.loading.reset();
  ShowFirstWeights();
  Keep();
  Tell(absl::StrCat("loaded step ", record_.committed_step, " from ", opened.directory, " in ",
                    std::round(10 * SecondsSince(began)) / 10, " s"));
  Reply<CheckpointInfo>(std::move(done), CheckpointInfo{.directory = opened.directory,
                                                        .step = record_.committed_step,
                                                        .generation = record_.generation,
                                                        .passed_over = opened.passed_over});
}

void JobImpl::TakeRecord(const CheckpointIndex& index) {
  record_.committed_step = index.step;
  // Previous versions are of what was replaced, and so there is nothing to undo.
  record_.previous.reset();
  record_.last_vote = {};
  save_schedule_.SavedAt(index.step, Clock::now());
  record_.resumed_uid = index.uid;
  record_.trainer_state = index.trainer_state;
  history_.Clear();
  record_.history.Replace(nullptr);
  if (index.last_step.has_value()) {
    const StepRecord last = WithGroups(*index.last_step, index.groups);
    record_.history.Replace(&last);
    history_.AddEarlier(last);
  }
  store_->SetStep(index.step);
  for (const CheckpointIndex::Parameter& saved : index.parameters) {
    const int p = layout_.FindParameter(saved.name);
    if (p != -1) record_.update_counts[p] = saved.update_count;
  }
  for (int group = 0; group < layout_.group_count(); ++group) {
    for (const CheckpointIndex::Group& saved : index.groups) {
      if (saved.name == spec().groups[group].name) {
        record_.hyper_parameters[group] = saved.hyper_parameters;
      }
    }
  }
}

// ---------------------------------------------------------------- undo

Pending JobImpl::UndoStep(UndoRequest request, Done<uint64_t> done) {
  return Enter(Admission::kUndo, -1,
               [this, self = shared_from_this(), request, done = std::move(done)](
                   absl::Status admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                 // Also where ranks have begun that step again.
                 if (WasUndone(request)) return Reply<uint64_t>(std::move(done), request.step);
                 if (admitted.ok()) admitted = CheckMayUndo(request);
                 if (!admitted.ok()) return Reply<uint64_t>(std::move(done), admitted);
                 UndoNow(std::move(done));
               });
}

bool JobImpl::WasUndone(const UndoRequest& request) const {
  const UndoneStep& last = record_.undone;
  return request.step != 0 && request.step == last.step && request.generation == last.generation;
}

absl::Status JobImpl::CheckMayUndo(const UndoRequest& request) const {
  if (!spec().keep_previous) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", spec().name, " does not keep the state before its last step; to undo ",
                     "steps, create it with keep_previous"));
  }
  if (request.step != 0 &&
      (request.step != record_.committed_step || request.generation != record_.generation)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job ", spec().name, " is at step ", record_.committed_step, " of generation ",
        ToString(record_.generation), ", and step ", request.step, " of generation ",
        ToString(request.generation), " was to be undone; look at the job, and decide again"));
  }
  if (record_.previous.has_value()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "job ", spec().name, " has nothing to undo at step ", record_.committed_step,
      ": one step can be undone, once it is committed, and none has been since the job was ",
      "created, loaded or undone"));
}

void JobImpl::UndoNow(Done<uint64_t> done) {
  const uint64_t undone = record_.committed_step;
  PreviousState previous = *std::exchange(record_.previous, std::nullopt);
  const uint64_t step = previous.committed_step;
  record_.committed_step = step;
  record_.hyper_parameters = std::move(previous.hyper_parameters);
  record_.update_counts = std::move(previous.update_counts);
  record_.trainer_state = std::move(previous.trainer_state);
  record_.history.Undo();
  history_.Undo();
  record_.last_vote = {};
  save_schedule_.GoBackTo(step);
  const bool applied = previous.applied;
  record_.undid_update = applied;
  record_.undone = {.step = undone, .generation = record_.generation};
  // One flip of the record has all that and the generation. Until the chunks have followed nobody
  // reads them.
  RaiseGeneration(
      absl::StrCat("step ", undone, " of job ", spec().name, " was undone; the generation is now ",
                   ToString(record_.generation.Next()), "; attach again"),
      [this, self = shared_from_this(), step, undone, applied, done = std::move(done)]()
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
            // The record has flipped. A skipped step changed no chunk, so only the number in the
            // table's words goes back.
            if (applied) {
              store_->SwitchBack(step);
            } else {
              store_->SetStep(step);
            }
            Tell(absl::StrCat("step ", undone, " was undone, and it is at step ", step, " again"));
            Reply<uint64_t>(std::move(done), undone);
          });
}

}  // namespace ballast
