// The timeline of some steps: when it begins, how long it may grow, when it is over.
#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/job_impl.h"

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

}  // namespace

int64_t JobImpl::MostTraceEvents(uint32_t steps) const {
  const auto chunks = static_cast<int64_t>(layout_.chunks().size());
  const int64_t micro_steps = spec_.max_micro_steps == 0
                                  ? kMicroSteps
                                  : std::min<int64_t>(spec_.max_micro_steps, kMostMicroSteps);
  constexpr int64_t kOthersOfChunk = 6;  // Sums and sending perhaps twice, a guess, an update.
  constexpr int64_t kOfStep = 3;
  const int64_t of_step = chunks * (micro_steps + kOthersOfChunk) + kOfStep;
  // Twice: a step may be aborted and done again.
  return of_step > kMostEvents ? kMostEvents : std::min(2 * int64_t{steps} * of_step, kMostEvents);
}

uint64_t JobImpl::NextStepToBegin() const {
  return committed_step_ + (std::holds_alternative<std::monostate>(step_) ? 1 : 2);
}

absl::StatusOr<Trace> JobImpl::TraceSteps(uint32_t steps,
                                          const std::function<bool()>& still_wanted) {
  const int64_t max_events = MostTraceEvents(steps);
  BALLAST_ASSIGN_OR_RETURN(MemoryBudget::Reservation memory,
                           environment_.budget->Reserve(
                               max_events * kBytesPerEvent,
                               absl::StrCat("a trace of ", steps, " steps of job ", spec_.name)));
  uint64_t last_step = 0;
  {
    MutexLock lock(mutex_);
    BALLAST_RETURN_IF_ERROR(CheckUsable());
    const uint64_t first_step = NextStepToBegin();
    last_step = first_step + steps - 1;
    BALLAST_RETURN_IF_ERROR(trace_.Start(first_step, steps, max_events));
  }
  std::optional<Clock::time_point> committed;
  while (still_wanted()) {
    MutexLock lock(mutex_);
    if (closed_ || committed_step_ > last_step) break;
    if (committed_step_ == last_step) {
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
