#include "server/jobs/trace_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "server/find_job.h"

namespace ballast::server {
namespace {

constexpr uint32_t kMostTracedSteps = 1000;

// When a trace must end for its answer to arrive in the caller's time.
std::chrono::steady_clock::time_point TraceEnd(std::chrono::system_clock::time_point deadline) {
  // A call without a deadline has the end of time for one.
  const auto given = std::min<std::chrono::system_clock::duration>(
      deadline - std::chrono::system_clock::now(), std::chrono::hours(1));
  return std::chrono::steady_clock::now() + given - given / 10;
}

}  // namespace

TraceCall::TraceCall(const Engine& engine, CallPools& pools, grpc::CallbackServerContext& context,
                     const absl::StatusOr<Caller>& caller, const grpc::ByteBuffer& request)
    : StreamedAnswer(pools, context) {
  const absl::Status started =
      caller.ok() ? Start(engine, pools, *caller, request, context.deadline()) : caller.status();
  if (!started.ok()) End(started);
}

absl::Status TraceCall::Start(const Engine& engine, CallPools& pools, const Caller& caller,
                              const grpc::ByteBuffer& bytes,
                              std::chrono::system_clock::time_point deadline) {
  BALLAST_ASSIGN_OR_RETURN(const auto request, proto::ParseRequest<v1::TraceJobRequest>(bytes));
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, FindJob(engine, caller, request.name()));
  const uint32_t steps = request.steps();
  if (steps == 0 || steps > kMostTracedSteps) {
    return absl::InvalidArgumentError(
        absl::StrCat("a trace cannot have ", steps, " steps; ask for 1 to ", kMostTracedSteps));
  }
  // After all that can be refused at once: from here on the call takes a thread of few.
  BALLAST_ASSIGN_OR_RETURN(CallPool::Place place, pools.traces.Enter());
  Keep(std::move(place));
  EndsWith(engine, caller, *job);
  const Clock::time_point end = TraceEnd(deadline);
  pools.traces.Run([this, job, steps, end] { Trace(job, steps, end); });
  return absl::OkStatus();
}

// Runs on a thread of `traces`, which it blocks until the steps are committed or the caller is
// gone.
void TraceCall::Trace(const std::shared_ptr<Job>& job, uint32_t steps, Clock::time_point end) {
  absl::StatusOr<ballast::Trace> trace =
      job->TraceSteps(steps, [&] { return !pending()->cancelled() && Clock::now() < end; });
  if (!trace.ok()) return End(trace.status());
  messages_.emplace(job, *std::move(trace));
  Begin();
}

}  // namespace ballast::server
