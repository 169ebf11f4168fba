// A trace as messages.
#ifndef BALLAST_SERVER_JOBS_TRACE_MESSAGE_H_
#define BALLAST_SERVER_JOBS_TRACE_MESSAGE_H_

#include <cstddef>
#include <memory>
#include <utility>

#include "ballast/v1/diagnostics.pb.h"
#include "cpu_optimizer_service/job/job.h"

namespace ballast::server {

inline constexpr size_t kTraceEventsPerMessage = 4096;  // Well below a message's limit.

// The messages of a trace, in order, at least one.
class TraceMessages {
 public:
  TraceMessages(std::shared_ptr<const Job> job, Trace trace)
      : job_(std::move(job)), trace_(std::move(trace)) {}

  // Fills an empty message; false if all have been made.
  bool Next(v1::TraceJobResponse& message);

 private:
  std::shared_ptr<const Job> job_;
  Trace trace_;
  size_t sent_events_ = 0;
  bool ended_ = false;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_TRACE_MESSAGE_H_
