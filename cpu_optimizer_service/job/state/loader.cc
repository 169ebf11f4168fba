#include "cpu_optimizer_service/job/state/loader.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/packed/packed_state.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/steady_time.h"
#include "cpu_optimizer_service/job/state/index_record.h"

namespace ballast {

namespace {

using Clock = std::chrono::steady_clock;

constexpr char kGivenUp[] = "the caller has given up waiting";

}  // namespace

// ---------------------------------------------------------------- load

absl::Status Loader::CheckLoadable(const Checkpoint& checkpoint, bool convert_state) const {
  const CheckpointIndex& index = checkpoint.index();
  const auto refuse = [&](const auto&... what) {
    return absl::FailedPreconditionError(absl::StrCat("the checkpoint of job ", index.job,
                                                      " does not fit job ", core_.spec().name, ": ",
                                                      what...));
  };
  std::vector<bool> seen(core_.spec().layout.parameters.size());
  for (const CheckpointIndex::Parameter& saved : index.parameters) {
    const int p = core_.layout.FindParameter(saved.name);
    if (p == -1) return refuse("the job has no parameter ", saved.name);
    const ParameterSpec& parameter = core_.spec().layout.parameters[p];
    if (!parameter.trainable) return refuse(saved.name, " is frozen in the job");
    if (parameter.shape != saved.shape) {
      return refuse(saved.name, " has shape [", absl::StrJoin(saved.shape, ", "),
                    "] in the checkpoint and [", absl::StrJoin(parameter.shape, ", "),
                    "] in the job");
    }
    if (const std::string& group = core_.spec().groups[parameter.group].name;
        group != saved.group) {
      return refuse(saved.name, " is in group ", saved.group, " in the checkpoint and ", group,
                    " in the job");
    }
    if (saved.format != core_.layout.format(p) && !checkpoint.is_weights() && !convert_state) {
      return refuse(
          "the state of ", saved.name, " is ", Name(saved.format), " in the checkpoint and ",
          Name(core_.layout.format(p)),
          " in the job; ask for a conversion with --convert-state, or convert_state in Python");
    }
    seen[p] = true;
  }
  for (size_t p = 0; p < seen.size(); ++p) {
    const ParameterSpec& parameter = core_.spec().layout.parameters[p];
    if (parameter.trainable && !seen[p]) return refuse("it has no parameter ", parameter.name);
  }
  for (const GroupSpec& group : core_.spec().groups) {
    const CheckpointIndex::Group* const saved = index.FindGroup(group.name);
    if (saved == nullptr) return refuse("it has no group ", group.name);
    const std::string planes = DifferenceOfPlanes(absl::StrCat("group ", group.name),
                                                  group.hyper_parameters, saved->hyper_parameters);
    if (!planes.empty()) return refuse(planes);
    const int number = static_cast<int>(&group - core_.spec().groups.data());
    const absl::Status format =
        CheckStateFormat(saved->hyper_parameters, core_.spec().layout.state(number).format);
    if (!format.ok() && !checkpoint.is_weights()) {
      return refuse("group ", group.name, ": ", format.message());
    }
  }
  return absl::OkStatus();
}

absl::Status Loader::CheckConverted(const Checkpoint& checkpoint) const {
  if (checkpoint.is_weights()) return absl::OkStatus();
  for (const CheckpointIndex::Parameter& saved : checkpoint.index().parameters) {
    const StateFormat format = core_.layout.format(core_.layout.FindParameter(saved.name));
    if (format == saved.format) continue;
    BALLAST_ASSIGN_OR_RETURN(const auto bad, checkpoint.FindBadValue(saved, format, NeedsHere()));
    if (!bad.has_value()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(Name(bad->plane), " of ", saved.name, " is ", bad->value, " at element ",
                     bad->element, ", which ", Name(format), " state cannot hold; use fp32"));
  }
  return absl::OkStatus();
}

absl::Status Loader::LoadValues(const Checkpoint& checkpoint, const ChunkPiece& piece,
                                const Slot& to) {
  const ParameterSpec& parameter = core_.spec().layout.parameters[piece.parameter];
  const HyperParameters& values = core_.spec().groups[parameter.group].hyper_parameters;
  std::vector<float> read(piece.elements);
  for (const Plane plane : PlanesOf(values)) {
    if (checkpoint.is_weights() && plane != Plane::kMaster) {
      std::ranges::fill(read, InitialValue(values, plane));
    } else {
      BALLAST_RETURN_IF_ERROR(
          checkpoint.Read(parameter.name, plane, piece.parameter_offset, absl::MakeSpan(read)));
    }
    WritePlane(to, plane, piece.chunk_offset, read);
  }
  return absl::OkStatus();
}

absl::Status Loader::LoadChunk(const Checkpoint& checkpoint, int index) {
  const Chunk& chunk = core_.layout.chunks()[index];
  const HyperParameters& values = core_.spec().groups[chunk.group].hyper_parameters;
  BALLAST_ASSIGN_OR_RETURN(const ChunkStore::Write write,
                           memory_.store->BeginWrite(index, Destination::kInPlaceIfFree));
  // Padding belongs to no piece and must be zero.
  const PlaneList planes = PlanesOf(values);
  for (const Plane stored : StoredPlanesOf(planes, chunk.format)) {
    std::fill_n(write.to.As<std::byte>(stored), StoredBytes(chunk.format, stored, chunk.elements),
                std::byte());
  }
  absl::Status status;
  for (const ChunkPiece& piece : core_.layout.Pieces(index)) {
    if (!status.ok()) break;
    const std::string& name = core_.spec().layout.parameters[piece.parameter].name;
    if (checkpoint.is_weights() || checkpoint.format(name) != chunk.format) {
      status = LoadValues(checkpoint, piece, write.to);
      continue;
    }
    for (const Plane stored : StoredPlanesOf(planes, chunk.format)) {
      if (!status.ok()) break;
      const auto out = absl::MakeSpan(
          write.to.As<std::byte>(stored) + StoredBytes(chunk.format, stored, piece.chunk_offset),
          StoredBytes(chunk.format, stored, piece.elements));
      status =
          checkpoint.ReadStored(name, stored, StoredCount(stored, piece.parameter_offset), out);
    }
  }
  // Also after an error: a write in place cannot be dropped. The job is torn then, and only a load
  // or a close helps.
  memory_.store->Publish(write, checkpoint.index().step);
  return status;
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
Pending Loader::Load(LoadRequest request, Done<CheckpointInfo> done) {
  const auto number = std::make_shared<uint64_t>(0);
  auto shared_done = std::make_shared<Done<CheckpointInfo>>(std::move(done));
  const auto call = std::make_shared<LoadCall>();
  const auto load = [this, keep = core_.KeepAlive(), request = std::move(request), shared_done,
                     number, call] {
    // Its caller may have gone while it was queued behind other loads and saves.
    if (!call->Begin()) return;
    const Clock::time_point began = Clock::now();
    absl::StatusOr<OpenedCheckpoint> opened = OpenAndCheck(request);
    absl::Status status = opened.status();
    std::shared_ptr<MemberTasks::Task> others;
    if (status.ok() && has_others()) {
      JobCore::Section section(core_);
      others = others_.tasks.Begin();
    }
    // What others have opened for it is not used, or is used now.
    const auto end_others = [this, others](bool are_used) {
      if (others == nullptr) return;
      JobCore::Section section(core_);
      others_.tasks.End(*others, are_used ? std::nullopt : std::optional(LeadWord::Task::End()));
    };
    if (others != nullptr) status = CheckOthers(*others, request, *opened);
    // To verify a large checkpoint takes long. Up to here nothing of the job has changed.
    if (status.ok() && call->cancelled()) status = absl::CancelledError(kGivenUp);
    if (!status.ok()) {
      end_others(/*are_used=*/false);
      opened = status;  // Whoever is told may delete it.
      return std::move(*shared_done)(std::move(status));
    }
    auto checkpoint = std::make_shared<OpenedCheckpoint>(*std::move(opened));
    const auto start = [this, keep, shared_done, checkpoint,
                        began]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
      // The step is cleared. Before anything is written, those who read in place have to end.
      core_.gate.StartLoading();
      core_.EnterHere(
          Admission::kReplaceState, -1,
          [this, keep, shared_done, checkpoint, began](absl::Status /*admitted*/)
              ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
                core_.RunAfter([this, keep, shared_done, checkpoint, began] {
                  core_.environment.disk_threads->Run([this, keep, shared_done, checkpoint, began] {
                    ReplaceState(checkpoint, began, std::move(*shared_done));
                  });
                });
              });
    };
    core_.Enter(
        Admission::kLoad, -1,
        [this, start, shared_done, checkpoint, weights_only = request.weights_only,
         end_others](absl::Status admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
          core_.RunAfter([end_others, ok = admitted.ok()] { end_others(ok); });
          if (!admitted.ok()) {
            return core_.Reply<CheckpointInfo>(std::move(*shared_done), admitted);
          }
          // In one flip of the record with the generation. Not the folder: a newer one may come
          // there.
          core_.record.loading = KeptLoad{.path = checkpoint->directory,
                                          .weights_only = weights_only,
                                          .loads = ++core_.record.loads,
                                          .sha256 = checkpoint->checkpoint.index().sha256};
          other_has_not_ = absl::OkStatus();
          Generation next = core_.record.generation.Next();
          // What is saved from here on counts as newer.
          next.epoch = std::max(next.epoch, checkpoint->checkpoint.index().epoch);
          raise_generation_(next,
                            absl::StrCat("job ", core_.spec().name,
                                         " was loaded from a checkpoint; attach again"),
                            start);
        },
        number);
  };
  core_.environment.disk_threads->Run(load);
  return Pending([in_gate = core_.PendingOf(number), call, shared_done] {
    // Either this or the disk thread has the Done, whichever moved the state first.
    if (call->Cancel()) return std::move(*shared_done)(absl::CancelledError(kGivenUp));
    in_gate.Cancel();
  });
}

absl::StatusOr<OpenedCheckpoint> Loader::OpenToLoad(const LoadRequest& request) const {
  FileSystem& file_system = *core_.environment.file_system;
  if (request.weights_only) {
    // A job at its begin, of nobody's state.
    JobRecord begin = {.update_counts =
                           std::vector<int64_t>(core_.spec().layout.parameters.size())};
    for (const GroupSpec& group : core_.spec().groups) {
      begin.hyper_parameters.push_back(group.hyper_parameters);
    }
    CheckpointIndex index = view_.MakeIndex(begin);
    index.uid.clear();
    BALLAST_ASSIGN_OR_RETURN(Checkpoint weights,
                             Checkpoint::OpenWeights(file_system, request.path, std::move(index),
                                                     MostIndexBytes(core_.spec()), has_others()));
    return OpenedCheckpoint{
        .checkpoint = std::move(weights), .directory = request.path, .passed_over = {}};
  }
  BALLAST_ASSIGN_OR_RETURN(OpenedCheckpoint opened,
                           OpenNewest(file_system, request.path, MostIndexBytes(core_.spec()),
                                      core_.environment.checkpoint_uses, NeedsHere()));
  for (const std::string& damage : opened.passed_over) {
    if (!core_.environment.warn) break;
    core_.Warn(absl::StrCat("job ", core_.spec().name, " is loaded from ", opened.directory,
                            ", not from a newer checkpoint: ", damage));
  }
  return opened;
}

void Loader::ReplaceState(std::shared_ptr<OpenedCheckpoint> opened, Clock::time_point began,
                          Done<CheckpointInfo> done) {
  absl::Status status;
  const std::vector<PlaneList> planes = PlanesByGroup(core_.spec());
  const auto bytes_of = [&](const Chunk& chunk) {
    return SlotBytes(chunk.elements, planes[chunk.group], chunk.format);
  };
  auto progress = core_.BeginActivity(ActivityKind::kLoadingCheckpoint, memory_.need.state_bytes,
                                      opened->directory);
  for (int chunk = 0; chunk < static_cast<int>(core_.layout.chunks().size()) && status.ok();
       ++chunk) {
    status = LoadChunk(opened->checkpoint, chunk);
    progress->Count(bytes_of(core_.layout.chunks()[chunk]));
  }
  progress = nullptr;  // Before its caller is told.
  JobCore::Section section(core_);
  status.Update(std::exchange(other_has_not_, absl::OkStatus()));
  status.Update(waits_end_);
  replaced_ = Replaced{.opened = std::move(opened),
                       .began = began,
                       .done = std::move(done),
                       .status = std::move(status)};
  FinishIfAllHave();
}

void Loader::FinishIfAllHave() {
  if (!replaced_.has_value()) return;
  const bool awaits_others =
      has_others() && core_.identity.is_lead() && replaced_->status.ok() && !others_.have_loaded();
  if (awaits_others) return;
  Replaced replaced = *std::exchange(replaced_, std::nullopt);
  OpenedCheckpoint& opened = *replaced.opened;
  const absl::Status& status = replaced.status;
  // The record still says that the checkpoint is being loaded. Where the process dies before the
  // flip below, the next one loads it again.
  core_.gate.FinishLoading(/*torn=*/!status.ok());
  const KeptLoad load = *std::exchange(core_.record.loading, std::nullopt);
  if (!status.ok()) {
    core_.record.torn_by = opened.directory;
    core_.Tell(absl::StrCat("not loaded from ", opened.directory, ": ", status.message()));
  } else {
    core_.record.loads = load.loads;
    TakeRecord(opened.checkpoint.index(), core_, *memory_.store, saver_);
    // A checkpoint may be loaded in place of first weights.
    core_.first_weights.CompleteAll();
    core_.record.torn_by.clear();
    origin_.Show();
    core_.Tell(absl::StrCat("loaded step ", core_.record.committed_step, " from ", opened.directory,
                            " in ", std::round(10 * SecondsSince(replaced.began)) / 10, " s"));
  }
  journal_.Keep();
  if (has_others() && !core_.identity.is_lead()) others_.tell_lead(load.loads, status);
  absl::StatusOr<CheckpointInfo> result = CheckpointInfo{.directory = opened.directory,
                                                         .step = core_.record.committed_step,
                                                         .generation = core_.record.generation,
                                                         .passed_over = opened.passed_over};
  if (!status.ok()) result = status;
  // It may be deleted once the record says that it is loaded, and before its caller is told.
  core_.RunAfter([done = std::move(replaced.done), use = std::move(opened.use),
                  result = std::move(result)]() mutable {
    use = nullptr;
    std::move(done)(std::move(result));
  });
}

absl::StatusOr<OpenedCheckpoint> Loader::OpenAndCheck(const LoadRequest& request) const {
  const auto progress = core_.BeginActivity(ActivityKind::kVerifyingCheckpoint, 0, request.path);
  const CountsIn here(*progress);
  BALLAST_ASSIGN_OR_RETURN(OpenedCheckpoint opened, OpenToLoad(request));
  BALLAST_RETURN_IF_ERROR(CheckLoadable(opened.checkpoint, request.convert_state));
  BALLAST_RETURN_IF_ERROR(CheckConverted(opened.checkpoint));
  return opened;
}

void Loader::LoadAgain(const KeptLoad& load) {
  const auto began = std::chrono::steady_clock::now();
  absl::StatusOr<OpenedCheckpoint> opened =
      OpenAndCheck({.path = load.path, .weights_only = load.weights_only, .convert_state = true});
  // Each member loads the same.
  if (opened.ok() && has_others() && opened->checkpoint.index().sha256 != load.sha256) {
    opened = absl::FailedPreconditionError(
        absl::StrCat(load.path, " is not the checkpoint any more that was to be loaded"));
  }
  const auto tell = [warn = core_.environment.warn, name = core_.spec().name,
                     path = load.path](const absl::Status& ended) {
    if (ended.ok() || !warn) return;
    warn(
        absl::StrCat("job ", name, " is torn: loading ", path, " again failed: ", ended.message()));
  };
  if (opened.ok()) {
    return ReplaceState(std::make_shared<OpenedCheckpoint>(*std::move(opened)), began,
                        [tell](absl::StatusOr<CheckpointInfo> done) { tell(done.status()); });
  }
  {
    JobCore::Section section(core_);
    // The earlier process may have replaced a part of the state already.
    core_.gate.FinishLoading(/*torn=*/true);
    core_.record.torn_by = load.path;
    core_.record.loading.reset();
    other_has_not_ = absl::OkStatus();
    journal_.Keep();
    if (has_others() && !core_.identity.is_lead()) others_.tell_lead(load.loads, opened.status());
  }
  tell(opened.status());
}

// ---------------------------------------------------------------- undo

Pending Loader::Undo(UndoRequest request, Done<uint64_t> done) {
  return core_.Enter(
      Admission::kUndo, -1,
      [this, keep = core_.KeepAlive(), request, done = std::move(done)](absl::Status admitted)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
            // Also where ranks have begun that step again.
            if (WasUndone(request)) return core_.Reply<uint64_t>(std::move(done), request.step);
            if (admitted.ok()) admitted = CheckMayUndo(request);
            if (!admitted.ok()) return core_.Reply<uint64_t>(std::move(done), admitted);
            const Generation next = core_.record.generation.Next();
            ++core_.record.loads;
            UndoNow(next,
                    absl::StrCat("step ", core_.record.committed_step, " of job ",
                                 core_.spec().name, " was undone; the generation is now ",
                                 ToString(next), "; attach again"),
                    std::move(done));
          });
}

bool Loader::UndoPart(const LeadWord::Undo& undo) {
  if (undo.generation <= core_.record.generation) return false;
  const bool has_it = core_.record.committed_step == undo.step && core_.record.previous.has_value();
  // It had no link when the step was decided.
  const bool has_not = core_.record.committed_step + 1 == undo.step;
  if (!has_it && !has_not) return false;
  core_.record.loads = undo.loads;
  if (has_not) {
    core_.record.previous.reset();
    raise_generation_(undo.generation, undo.why, [] {});
    return true;
  }
  UndoNow(undo.generation, undo.why, [](const absl::StatusOr<uint64_t>&) {});
  return true;
}

bool Loader::WasUndone(const UndoRequest& request) const {
  const UndoneStep& last = core_.record.undone;
  return request.step != 0 && request.step == last.step && request.generation == last.generation;
}

absl::Status Loader::CheckMayUndo(const UndoRequest& request) const {
  if (!core_.spec().keep_previous) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job ", core_.spec().name, " does not keep the state before its last step; to undo ",
        "steps, create it with keep_previous"));
  }
  if (request.step != 0 && (request.step != core_.record.committed_step ||
                            request.generation != core_.record.generation)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job ", core_.spec().name, " is at step ", core_.record.committed_step, " of generation ",
        ToString(core_.record.generation), ", but the call undoes step ", request.step,
        " of generation ", ToString(request.generation), "; look at the job and decide again"));
  }
  BALLAST_RETURN_IF_ERROR(others_.check_none_has_begun());
  if (core_.record.previous.has_value()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "job ", core_.spec().name, " has nothing to undo at step ", core_.record.committed_step,
      ": no step was committed since the job was created, loaded or undone"));
}

void Loader::UndoNow(const Generation& to, std::string why, Done<uint64_t> done) {
  const uint64_t undone = core_.record.committed_step;
  PreviousState previous = *std::exchange(core_.record.previous, std::nullopt);
  const uint64_t step = previous.committed_step;
  core_.record.committed_step = step;
  core_.record.hyper_parameters = std::move(previous.hyper_parameters);
  core_.record.update_counts = std::move(previous.update_counts);
  core_.record.trainer_state = std::move(previous.trainer_state);
  // A step whose second round is outstanding is in no history yet.
  if (!std::exchange(core_.record.directions, std::nullopt).has_value()) {
    core_.record.history.Undo();
    core_.history.Undo();
  }
  core_.record.last_vote = {};
  saver_.schedule.GoBackTo(step);
  const bool applied = previous.applied;
  core_.record.undid_update = applied;
  core_.record.undone = {
      .step = undone, .generation = core_.record.generation, .loads = core_.record.loads};
  // One flip of the record has all that and the generation. Until the chunks have followed nobody
  // reads them.
  auto go_back = [this, keep = core_.KeepAlive(), step, undone, applied, done = std::move(done)](
                     absl::Status /*admitted*/) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
    // The record has flipped. A skipped step changed no chunk, so only the number in the table's
    // words goes back.
    if (applied) {
      memory_.store->SwitchBack(step);
    } else {
      memory_.store->SetStep(step);
    }
    core_.gate.FinishLoading(/*torn=*/false);
    core_.Tell(absl::StrCat("step ", undone, " was undone, and it is at step ", step, " again"));
    core_.Reply<uint64_t>(std::move(done), undone);
  };
  raise_generation_(to, std::move(why),
                    [this, go_back = std::move(go_back)]()
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                          // At a member that the lead has told, there may be readers.
                          core_.gate.StartLoading();
                          core_.EnterHere(Admission::kReplaceState, -1, std::move(go_back));
                        });
}

}  // namespace ballast
