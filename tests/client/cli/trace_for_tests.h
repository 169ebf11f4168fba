// Events of a trace, as a service sends them.
#ifndef BALLAST_TESTS_CLIENT_CLI_TRACE_FOR_TESTS_H_
#define BALLAST_TESTS_CLIENT_CLI_TRACE_FOR_TESTS_H_

#include <cstdint>

#include "ballast/v1/diagnostics.pb.h"

namespace ballast::client::cli {

inline v1::TraceEvent ChunkEvent(v1::TraceEventKind kind, uint64_t step, int chunk,
                                 int64_t begin_ns, int64_t end_ns, uint32_t thread) {
  v1::TraceEvent event;
  event.set_kind(kind);
  event.set_step(step);
  event.set_chunk(chunk);
  event.set_begin_ns(begin_ns);
  event.set_end_ns(end_ns);
  event.set_thread(thread);
  return event;
}

inline v1::TraceEvent StepEvent(v1::TraceEventKind kind, uint64_t step, int64_t begin_ns,
                                int64_t end_ns) {
  return ChunkEvent(kind, step, -1, begin_ns, end_ns, 0);
}

}  // namespace ballast::client::cli

#endif  // BALLAST_TESTS_CLIENT_CLI_TRACE_FOR_TESTS_H_
