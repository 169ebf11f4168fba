// Looking at state, loading it, going back a step; timelines.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/sha256.h"
#include "cpu_optimizer_service/job/job_impl.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMostEvents = 4'000'000;
// As they are recorded, in tables that double, and as they are put together and sorted.
constexpr int64_t kBytesPerEvent = 4 * sizeof(TraceEvent);
// Accepted for jobs that may have any number, and the most that is reckoned with.
constexpr int64_t kMicroSteps = 16;
constexpr int64_t kMostMicroSteps = 64;
// How often a caller is asked whether it still waits.
constexpr std::chrono::milliseconds kPoll(50);
// After the last commit its weights are still on their way; so long is waited for the slowest rank.
constexpr std::chrono::seconds kSendingTime(5);
constexpr std::chrono::milliseconds kSendingPoll(2);
constexpr char kGivenUp[] = "the caller has given up waiting";

}  // namespace

// ---------------------------------------------------------------- reading

void JobImpl::StopReading() {
  Section section(*this);
  gate_.StopReading();
  StartDecisionIfDue();
}

absl::Status JobImpl::ReadShard(Generation generation, uint64_t step, int index,
                                absl::Span<std::byte> out) {
  {
    MutexLock lock(mutex_);
    if (gate_.phase() == Phase::kClosed) return CheckUsable();
    BALLAST_RETURN_IF_ERROR(CheckGeneration(generation));
    BALLAST_RETURN_IF_ERROR(CheckUsable());
    if (!first_weights_.complete()) {
      return absl::FailedPreconditionError(
          absl::StrCat("job ", spec().name, " has no weights yet"));
    }
    // While an update runs, the chunks that it has finished stay as they are, and only they.
    const bool updating = gate_.phase() == Phase::kUpdating;
    Answer answer = gate_.Ask(Admission::kReadNow);
    if (updating && step == record_.committed_step) answer = Answer::kChanging;
    if (answer != Answer::kGranted) return StatusOf(answer);
    if (step != record_.committed_step + (updating ? 1 : 0) || store_->step(index) != step) {
      return absl::FailedPreconditionError(absl::StrCat("chunk ", index, " of job ", spec().name,
                                                        " is at step ", store_->step(index),
                                                        ", not ", step));
    }
    gate_.StartReading();
  }
  const Chunk& chunk = layout_.chunks()[index];
  ConvertFromFloat(store_->Published(index)[Plane::kMaster], out.data(),
                   spec().groups[chunk.group].return_dtype, chunk.elements);
  StopReading();
  return absl::OkStatus();
}

absl::StatusOr<Snapshot> JobImpl::SnapshotOf(absl::Span<const int> parameters,
                                             absl::Span<const int> chunks) {
  if (!first_weights_.complete()) {
    return absl::FailedPreconditionError(absl::StrCat("job ", spec().name, " has no weights yet"));
  }
  Snapshot snapshot;
  snapshot.layout_ = &layout_;
  snapshot.keep_alive_ = Self();
  for (const GroupSpec& group : spec().groups) {
    snapshot.amsgrad_.push_back(group.hyper_parameters.amsgrad);
  }
  BALLAST_ASSIGN_OR_RETURN(std::vector<ChunkPin> pins, store_->Pin(chunks));
  for (size_t i = 0; i < chunks.size(); ++i) {
    snapshot.pins_.emplace(chunks[i], std::move(pins[i]));
  }
  for (const int parameter : parameters) {
    snapshot.update_counts_[parameter] = record_.update_counts[parameter];
  }
  snapshot.step_ = record_.committed_step;
  return snapshot;
}

Pending JobImpl::TakeSnapshot(std::vector<int> parameters, Done<Snapshot> done) {
  absl::flat_hash_set<int> needed;
  for (const int parameter : parameters) {
    for (const int chunk : layout_.ChunksOfParameter(parameter)) needed.insert(chunk);
  }
  return Enter(Admission::kSnapshot, -1,
               [this, self = shared_from_this(), parameters = std::move(parameters),
                chunks = std::vector<int>(needed.begin(), needed.end()), done = std::move(done)](
                   absl::Status admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                 Reply<Snapshot>(std::move(done), admitted.ok()
                                                      ? SnapshotOf(parameters, chunks)
                                                      : absl::StatusOr<Snapshot>(admitted));
               });
}

void JobImpl::ReadCommitted(int parameter, Plane plane, int64_t offset,
                            absl::Span<float> out) const {
  const int64_t end = offset + static_cast<int64_t>(out.size());
  layout_.VisitRange(parameter, offset, end, [&](const ChunkPiece& piece) {
    std::memcpy(out.data() + (piece.parameter_offset - offset),
                store_->Published(piece.chunk)[plane] + piece.chunk_offset,
                piece.elements * sizeof(float));
  });
}

CheckpointIndex JobImpl::MakeIndex(const JobRecord& record) const {
  CheckpointIndex index = {.job = spec().name, .uid = uid()};
  index.step = record.committed_step;
  index.generation = record.generation.count;
  index.trainer_state = record.trainer_state;
  if (const auto& steps = record.history.recent_steps; !steps.empty()) {
    index.last_step = steps.back();
  }
  for (int group = 0; group < layout_.group_count(); ++group) {
    index.groups.push_back(
        {.name = spec().groups[group].name, .hyper_parameters = record.hyper_parameters[group]});
  }
  for (int p = 0; p < static_cast<int>(spec().layout.parameters.size()); ++p) {
    const ParameterSpec& parameter = spec().layout.parameters[p];
    if (!parameter.trainable) continue;
    index.parameters.push_back({.name = parameter.name,
                                .shape = parameter.shape,
                                .group = spec().groups[parameter.group].name,
                                .elements = layout_.place(p).elements,
                                .update_count = record.update_counts[p]});
  }
  return index;
}

std::string JobImpl::HashState(const CheckpointIndex& index) const {
  Sha256 sha256;
  std::vector<float> buffer(1 << 16);
  for (const CheckpointIndex::Parameter& parameter : index.parameters) {
    sha256.AddValue(parameter.update_count);
    const int p = layout_.FindParameter(parameter.name);
    const bool amsgrad = spec().groups[spec().layout.parameters[p].group].hyper_parameters.amsgrad;
    for (int plane = 0; plane < (amsgrad ? 4 : 3); ++plane) {
      for (int64_t offset = 0; offset < parameter.elements;
           offset += static_cast<int64_t>(buffer.size())) {
        const auto piece = absl::MakeSpan(buffer).first(
            std::min<int64_t>(static_cast<int64_t>(buffer.size()), parameter.elements - offset));
        ReadCommitted(p, static_cast<Plane>(plane), offset, piece);
        sha256.Add(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(piece.data()),
                                       piece.size() * sizeof(float)));
      }
    }
  }
  return sha256.Hex();
}

std::string JobImpl::StateHash() {
  return Await<std::string>([&](Done<std::string> done) {
           Enter(Admission::kRead, -1,
                 [this, done = std::move(done)](
                     absl::Status admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                   if (!admitted.ok()) return Reply<std::string>(std::move(done), admitted);
                   gate_.StartReading();
                   RunAfter([this, index = MakeIndex(record_), done = std::move(done)]() mutable {
                     std::string hash = HashState(index);
                     StopReading();
                     std::move(done)(std::move(hash));
                   });
                 });
         })
      .value_or("");
}

// ---------------------------------------------------------------- load

absl::Status JobImpl::CheckLoadable(const Checkpoint& checkpoint) const {
  const CheckpointIndex& index = checkpoint.index();
  const auto refuse = [&](const auto&... what) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the checkpoint of job ", index.job, " does not fit job ", spec().name, ": ", what...));
  };
  absl::flat_hash_set<std::string> seen;
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
    if (!seen.insert(saved.name).second) return refuse("it has ", saved.name, " twice");
  }
  for (const ParameterSpec& parameter : spec().layout.parameters) {
    if (parameter.trainable && !seen.contains(parameter.name)) {
      return refuse("it has no parameter ", parameter.name);
    }
  }
  for (const GroupSpec& group : spec().groups) {
    const auto saved =
        std::find_if(index.groups.begin(), index.groups.end(),
                     [&](const CheckpointIndex::Group& g) { return g.name == group.name; });
    if (saved == index.groups.end()) return refuse("it has no group ", group.name);
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
    std::fill_n(to, chunk.elements, 0.0f);
    for (const ChunkPiece& piece : layout_.Pieces(index)) {
      if (!status.ok()) break;
      status = checkpoint.Read(spec().layout.parameters[piece.parameter].name,
                               static_cast<Plane>(plane), piece.parameter_offset,
                               absl::MakeSpan(to + piece.chunk_offset, piece.elements));
    }
  }
  store_->Publish(write, checkpoint.index().step);
  return status;
}

StepRecord JobImpl::LastRecord(const CheckpointIndex& index) const {
  const StepRecord& last = *index.last_step;
  StepRecord record = last;
  // The checkpoint may have its groups in another order, and some that the job has not.
  const auto of_job = [&](const auto& saved, const auto& otherwise, auto& values) {
    if (saved.empty()) return;
    values.assign(layout_.group_count(), otherwise);
    for (int group = 0; group < layout_.group_count(); ++group) {
      for (size_t i = 0; i < index.groups.size(); ++i) {
        if (index.groups[i].name == spec().groups[group].name) values[group] = saved[i];
      }
    }
  };
  of_job(last.hyper_parameters, HyperParameters(), record.hyper_parameters);
  of_job(last.outcome.decision.multipliers, 1, record.outcome.decision.multipliers);
  of_job(last.voted.multipliers, 1, record.voted.multipliers);
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
    if (!call->Begin()) return;
    absl::StatusOr<OpenedCheckpoint> opened = OrOutOfMemory([&] { return OpenToLoad(request); });
    absl::Status status = opened.ok() ? CheckLoadable(opened->checkpoint) : opened.status();
    if (status.ok() && call->cancelled()) status = absl::CancelledError(kGivenUp);
    if (!status.ok()) return std::move(*shared_done)(std::move(status));
    auto checkpoint = std::make_shared<const OpenedCheckpoint>(*std::move(opened));
    const auto start = [this, self, shared_done, request,
                        checkpoint]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      gate_.StartLoading();
      kept_state_.loading = KeptLoad{.path = request.path, .weights_only = request.weights_only};
      Keep();
      EnterHere(Admission::kReplaceState, -1,
                [this, self, shared_done, checkpoint](absl::Status admitted)
                    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                      if (!admitted.ok()) {  // Broken.
                        return Reply<CheckpointInfo>(std::move(*shared_done), admitted);
                      }
                      RunAfter([this, self, shared_done, checkpoint] {
                        environment_.disk_threads->Run([this, self, shared_done, checkpoint] {
                          Guarded([&] { ReplaceState(*checkpoint, std::move(*shared_done)); });
                        });
                      });
                    });
    };
    Enter(
        Admission::kLoad, -1,
        [this, start, shared_done](absl::Status admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
          if (!admitted.ok()) {
            return Reply<CheckpointInfo>(std::move(*shared_done), admitted);
          }
          RaiseGeneration(
              absl::StrCat("job ", spec().name, " was loaded from a checkpoint; attach again"),
              start);
        },
        number);
  };
  environment_.disk_threads->Run([self = Self(), load] { self->Guarded(load); });
  return Pending([in_gate = PendingOf(number), call, shared_done] {
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
  BALLAST_ASSIGN_OR_RETURN(OpenedCheckpoint opened,
                           OpenNewest(file_system, request.path, MostIndexBytes(spec())));
  for (const std::string& damage : opened.passed_over) {
    if (!environment_.warn) break;
    environment_.warn(absl::StrCat("job ", spec().name, " is loaded from ", opened.directory,
                                   ", not from a newer checkpoint: ", damage));
  }
  return opened;
}

void JobImpl::ReplaceState(const OpenedCheckpoint& opened, Done<CheckpointInfo> done) {
  const Checkpoint& checkpoint = opened.checkpoint;
  absl::Status status;
  for (int chunk = 0; chunk < static_cast<int>(layout_.chunks().size()) && status.ok(); ++chunk) {
    status = OrOutOfMemory([&] { return LoadChunk(checkpoint, chunk); });
  }
  Section section(*this);
  if (broken()) return Reply<CheckpointInfo>(std::move(done), broken_);
  gate_.FinishLoading(/*torn=*/!status.ok());
  if (!status.ok()) {
    torn_by_ = opened.directory;
    kept_state_.loading.reset();
    Keep();
    return Reply<CheckpointInfo>(std::move(done), status);
  }
  const CheckpointIndex& index = checkpoint.index();
  record_.committed_step = index.step;
  record_.previous.reset();
  last_vote_ = {};
  saved_step_ = index.step;
  saved_at_ = Clock::now();
  record_.resumed_uid = index.uid;
  record_.trainer_state = index.trainer_state;
  if (index.last_step.has_value()) {
    const StepRecord last = LastRecord(index);
    record_.history.Replace(&last);
  } else {
    record_.history.Replace(nullptr);
  }
  store_->SetStep(index.step);
  for (const CheckpointIndex::Parameter& saved : index.parameters) {
    record_.update_counts[layout_.FindParameter(saved.name)] = saved.update_count;
  }
  for (int group = 0; group < layout_.group_count(); ++group) {
    for (const CheckpointIndex::Group& saved : index.groups) {
      if (saved.name == spec().groups[group].name) {
        record_.hyper_parameters[group] = saved.hyper_parameters;
      }
    }
  }
  first_weights_.CompleteAll();
  torn_by_.clear();
  kept_state_.loading.reset();
  Keep();
  Reply<CheckpointInfo>(std::move(done), CheckpointInfo{.directory = opened.directory,
                                                        .step = record_.committed_step,
                                                        .generation = record_.generation,
                                                        .passed_over = opened.passed_over});
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
  const KeptJob::Undone& last = kept_state_.undone;
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
  last_vote_ = {};
  saved_step_ = std::min(saved_step_, step);
  const bool applied = previous.applied;
  kept_state_.undid_update = applied;
  kept_state_.undone = {.step = undone, .generation = record_.generation};
  // One flip of the record has all that and the generation. Until the chunks have followed nobody
  // reads them.
  RaiseGeneration(
      absl::StrCat("step ", undone, " of job ", spec().name, " was undone; the generation is now ",
                   ToString(record_.generation.Next()), "; attach again"),
      [this, self = shared_from_this(), step, undone, applied, done = std::move(done)]()
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
            if (applied) {
              store_->SwitchBack(step);
            } else {
              store_->SetStep(step);
            }
            Reply<uint64_t>(std::move(done), undone);
          });
}

// ---------------------------------------------------------------- timelines

int64_t JobImpl::MostTraceEvents(uint32_t steps) const {
  const auto chunks = static_cast<int64_t>(layout_.chunks().size());
  const int64_t micro_steps = spec().max_micro_steps == 0
                                  ? kMicroSteps
                                  : std::min<int64_t>(spec().max_micro_steps, kMostMicroSteps);
  constexpr int64_t kOthersOfChunk =
      6;  // Sums and sending perhaps twice, a provisional update, an update.
  constexpr int64_t kOfStep = 3;
  const int64_t of_step = chunks * (micro_steps + kOthersOfChunk) + kOfStep;
  // Twice: a step may be aborted and done again.
  return of_step > kMostEvents ? kMostEvents : std::min(2 * int64_t{steps} * of_step, kMostEvents);
}

absl::StatusOr<Trace> JobImpl::TraceSteps(uint32_t steps,
                                          const std::function<bool()>& still_wanted) {
  const int64_t max_events = MostTraceEvents(steps);
  BALLAST_ASSIGN_OR_RETURN(MemoryBudget::Reservation memory,
                           environment_.budget->Reserve(
                               max_events * kBytesPerEvent,
                               absl::StrCat("a trace of ", steps, " steps of job ", spec().name)));
  uint64_t last_step = 0;
  {
    MutexLock lock(mutex_);
    BALLAST_RETURN_IF_ERROR(CheckUsable());
    const uint64_t first_step =
        record_.committed_step + (std::holds_alternative<std::monostate>(step_) ? 1 : 2);
    last_step = first_step + steps - 1;
    BALLAST_RETURN_IF_ERROR(trace_.Start(first_step, steps, max_events));
  }
  std::optional<Clock::time_point> committed;
  while (still_wanted()) {
    MutexLock lock(mutex_);
    if (broken() || gate_.phase() == Phase::kClosed || record_.committed_step > last_step) break;
    if (record_.committed_step == last_step) {
      if (!committed.has_value()) committed = Clock::now();
      if (trace_.all_sent() || Clock::now() > *committed + kSendingTime) break;
    }
    step_over_.WaitUntil(mutex_, Clock::now() + (committed.has_value() ? kSendingPoll : kPoll));
  }
  Trace trace = trace_.Stop();
  // A reader may take its time.
  memory.ShrinkTo(static_cast<int64_t>(trace.events.capacity() * sizeof(TraceEvent)));
  trace.memory = std::move(memory);
  return trace;
}

}  // namespace ballast
