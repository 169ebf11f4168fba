// Looking at state; timelines.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/sha256.h"
#include "cpu_optimizer_service/job/job_impl.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {
namespace {

using Clock = std::chrono::steady_clock;

// 640 MB by kBytesPerEvent, which is the most that one trace may reserve.
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
    // From here on the lock is not needed: a decision, an undo and a load wait for this reader, so
    // the chunk stays as it is.
    gate_.StartReading();
  }
  const Chunk& chunk = layout_.chunks()[index];
  ConvertFromFloat(store_->Published(index)[Plane::kMaster], out.data(),
                   spec().groups[chunk.group].return_dtype, chunk.elements);
  StopReading();
  return absl::OkStatus();
}

absl::StatusOr<Snapshot> JobImpl::SnapshotOf(absl::Span<const int> parameters,
                                             absl::Span<const int> chunks, ChunkStore::Room* room) {
  if (!first_weights_.complete()) {
    return absl::FailedPreconditionError(absl::StrCat("job ", spec().name, " has no weights yet"));
  }
  Snapshot snapshot;
  snapshot.layout_ = &layout_;
  snapshot.keep_alive_ = Self();
  for (const GroupSpec& group : spec().groups) {
    snapshot.amsgrad_.push_back(group.hyper_parameters.amsgrad);
  }
  BALLAST_ASSIGN_OR_RETURN(std::vector<ChunkPin> pins, store_->Pin(chunks, room));
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
  std::vector<int> chunks;
  for (const int parameter : parameters) {
    const std::vector<int> needed = layout_.ChunksOfParameter(parameter);
    chunks.insert(chunks.end(), needed.begin(), needed.end());
  }
  // Parameters share chunks, and each chunk is pinned once.
  std::sort(chunks.begin(), chunks.end());
  chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
  return Enter(Admission::kSnapshot, -1,
               [this, self = shared_from_this(), parameters = std::move(parameters),
                chunks = std::move(chunks), done = std::move(done)](absl::Status admitted)
                   ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
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
    // A frozen parameter has no state in the service, so there is nothing to save of it.
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
  // 256 KiB at a time, whatever the size of a parameter.
  std::vector<float> buffer(1 << 16);
  // By parameter and in row-major order, and without padding: how elements lie in chunks must not
  // show.
  for (const CheckpointIndex::Parameter& parameter : index.parameters) {
    sha256.AddValue(parameter.update_count);
    const int p = layout_.FindParameter(parameter.name);
    const int planes = PlanesOf(spec().groups[spec().layout.parameters[p].group]);
    for (int plane = 0; plane < planes; ++plane) {
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
                   // Hashing takes long, so it runs without the lock; the next decision waits for
                   // it.
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
    // Of a step in progress the beginning has gone by, so the trace begins with the one after it.
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
