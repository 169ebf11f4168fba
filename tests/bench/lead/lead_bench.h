// ballast-bench lead: what a step of a job with several members costs its lead, from made reports.
//
// Measured are the CPU time of the lead's thread and the bytes on its links: words are read, a step
// is decided by the product's own functions, and the decision is written for each member. Not
// measured: gRPC, the lead's record, and its own part of the job.
#ifndef BALLAST_TESTS_BENCH_LEAD_LEAD_BENCH_H_
#define BALLAST_TESTS_BENCH_LEAD_LEAD_BENCH_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "tests/bench/figures.h"

namespace ballast::bench {

struct LeadCase {
  int members = 0;
  int parameters = 0;  // Tensors of the model.
  int cut_blocks = 0;  // Blocks of 256 elements that each member shares with another.
  uint32_t micro_steps = 1;
};

// Figures: "step_seconds", "bytes_in", "bytes_out", of `steps` steps.
absl::StatusOr<Figures> MeasureLead(const LeadCase& measured, int steps);

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_LEAD_LEAD_BENCH_H_
