// Looking at state; timelines.
#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"

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

absl::Status JobImpl::ReadShard(Generation generation, uint64_t step, int index,
                                absl::Span<std::byte> out) {
  {
    JobCore::Lock lock(core_);
    if (core_.gate.phase() == Phase::kClosed) return core_.CheckUsable();
    BALLAST_RETURN_IF_ERROR(members_.CheckGeneration(generation));
    BALLAST_RETURN_IF_ERROR(core_.CheckUsable());
    BALLAST_RETURN_IF_ERROR(view_.CheckThere());
    // While an update runs, the chunks that it has finished stay as they are, and only they. In a
    // second round the step is committed.
    const bool updating =
        core_.gate.phase() == Phase::kUpdating && !core_.record.directions.has_value();
    Answer answer = core_.gate.Ask(Admission::kReadNow);
    if (updating && step == core_.record.committed_step) answer = Answer::kChanging;
    if (core_.record.directions.has_value() && memory_.store->is_half(index)) {
      answer = Answer::kChanging;
    }
    if (answer != Answer::kGranted) return core_.StatusOf(answer);
    if (step != core_.record.committed_step + (updating ? 1 : 0) ||
        memory_.store->step(index) != step || memory_.store->is_half(index)) {
      return absl::FailedPreconditionError(absl::StrCat("chunk ", index, " of job ", spec().name,
                                                        " is at step ", memory_.store->step(index),
                                                        ", not ", step));
    }
    // From here on the lock is not needed: a decision, an undo and a load wait for this reader, so
    // the chunk stays as it is.
    core_.gate.StartReading();
  }
  view_.ReadWeights(index, out.data());
  core_.StopReading();
  return absl::OkStatus();
}

Pending JobImpl::TakeSnapshot(std::vector<int> parameters, Done<Snapshot> done) {
  std::vector<int> chunks;
  for (const int parameter : parameters) {
    const std::vector<int> needed = core_.layout.ChunksOfParameter(parameter);
    chunks.insert(chunks.end(), needed.begin(), needed.end());
  }
  // Parameters share chunks, and each chunk is pinned once.
  std::sort(chunks.begin(), chunks.end());
  chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
  return core_.Enter(Admission::kSnapshot, -1,
                     [this, self = shared_from_this(), parameters = std::move(parameters),
                      chunks = std::move(chunks), done = std::move(done)](absl::Status admitted)
                         ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                           core_.Reply<Snapshot>(std::move(done),
                                                 admitted.ok()
                                                     ? view_.SnapshotOf(parameters, chunks, self)
                                                     : absl::StatusOr<Snapshot>(admitted));
                         });
}

std::string JobImpl::StateHash() {
  return Await<std::string>([&](Done<std::string> done) {
           core_.Enter(Admission::kRead, -1,
                       [this, done = std::move(done)](absl::Status admitted)
                           ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                             if (!admitted.ok())
                               return core_.Reply<std::string>(std::move(done), admitted);
                             // Hashing takes long, so it runs without the lock; the next decision waits for
                             // it.
                             core_.gate.StartReading();
                             core_.RunAfter([this, index = view_.MakeIndex(core_.record),
                                             done = std::move(done)]() mutable {
                               std::string hash = view_.Hash(index);
                               core_.StopReading();
                               std::move(done)(std::move(hash));
                             });
                           });
         })
      .value_or("");
}

// ---------------------------------------------------------------- timelines

int64_t JobImpl::MostTraceEvents(uint32_t steps) const {
  const auto chunks = static_cast<int64_t>(core_.layout.chunks().size());
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
                           core_.environment.budget->Reserve(
                               max_events * kBytesPerEvent,
                               absl::StrCat("a trace of ", steps, " steps of job ", spec().name)));
  uint64_t last_step = 0;
  {
    JobCore::Lock lock(core_);
    BALLAST_RETURN_IF_ERROR(core_.CheckUsable());
    // Of a step in progress the beginning has gone by, so the trace begins with the one after it.
    const uint64_t first_step = core_.record.committed_step + (machine_.between_steps() ? 1 : 2);
    last_step = first_step + steps - 1;
    BALLAST_RETURN_IF_ERROR(core_.trace.Start(first_step, steps, max_events));
  }
  std::optional<Clock::time_point> committed;
  while (still_wanted()) {
    JobCore::Lock lock(core_);
    if (core_.gate.phase() == Phase::kClosed || core_.record.committed_step > last_step) break;
    if (core_.record.committed_step == last_step) {
      if (!committed.has_value()) committed = Clock::now();
      if (core_.trace.all_sent() || Clock::now() > *committed + kSendingTime) break;
    }
    core_.WaitForStepOver(Clock::now() + (committed.has_value() ? kSendingPoll : kPoll));
  }
  Trace trace = core_.trace.Stop();
  // A reader may take its time.
  memory.ShrinkTo(static_cast<int64_t>(trace.events.capacity() * sizeof(TraceEvent)));
  trace.memory = std::move(memory);
  return trace;
}

}  // namespace ballast
