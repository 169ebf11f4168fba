// A trace on its way to whoever asked for it.
#ifndef BALLAST_SERVER_JOBS_TRACE_MESSAGE_H_
#define BALLAST_SERVER_JOBS_TRACE_MESSAGE_H_

#include <cstddef>

#include "absl/functional/function_ref.h"
#include "ballast/v1/ballast.pb.h"
#include "cpu_optimizer_service/job/job.h"

namespace ballast::server {

inline constexpr size_t kTraceEventsPerMessage = 4096;  // Well below a message's limit.

// The messages of a trace, in order, at least one. Stops, with false, when `send` returns false.
bool ForEachMessage(const Job& job, const Trace& trace,
                    absl::FunctionRef<bool(const v1::TraceJobResponse&)> send);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_TRACE_MESSAGE_H_
