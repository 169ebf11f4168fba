#include "server/jobs/trace_message.h"

#include "absl/types/span.h"
#include "proto/convert.h"

namespace ballast::server {
namespace {

static_assert(v1::BEGUN == static_cast<int>(TraceEventKind::kBegun) + 1);

void FillEvent(const Job& job, const TraceEvent& event, v1::TraceEvent& to) {
  to.set_kind(proto::EnumToProto<v1::TraceEventKind>(event.kind));
  to.set_step(event.step);
  to.set_chunk(event.chunk);
  // An event of the whole step has no chunk, and so no rank.
  to.set_rank(event.chunk == -1 ? -1 : job.layout().chunks()[event.chunk].rank);
  to.set_thread(event.thread);
  to.set_begin_ns(event.begin_ns);
  to.set_end_ns(event.end_ns);
}

}  // namespace

bool TraceMessages::Next(v1::TraceJobResponse& message) {
  if (ended_) return false;
  const absl::Span<const TraceEvent> left =
      absl::MakeConstSpan(trace_.events).subspan(sent_events_, kTraceEventsPerMessage);
  for (const TraceEvent& event : left) FillEvent(*job_, event, *message.add_events());
  sent_events_ += left.size();
  // Looked at after a message, so that an empty trace has one, too.
  ended_ = sent_events_ == trace_.events.size();
  if (ended_) message.set_dropped_events(trace_.dropped_events);
  return true;
}

}  // namespace ballast::server
