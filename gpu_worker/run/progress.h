// The progress line on standard output: rewritten in place on a terminal, a line a step otherwise.
// At the end a line of the whole run.
#ifndef BALLAST_GPU_WORKER_RUN_PROGRESS_H_
#define BALLAST_GPU_WORKER_RUN_PROGRESS_H_

#include <cstdint>
#include <string>

#include "gpu_worker/training/trainer.h"

namespace ballast::worker {

// "step 12/80  loss 3.214  norm 1.23  ...", without a newline.
std::string FormatProgress(const StepReport& report, uint64_t steps);

// Sums over the steps that were shown, in seconds.
struct RunTotals {
  uint64_t steps = 0;
  double seconds = 0;
  double exposed = 0;  // StepTimes::exposed.
};

// "80 steps in 30.2 s, 1.51 s of them exposed (5.0%)", without a newline.
std::string FormatSummary(const RunTotals& totals);

class Progress {
 public:
  explicit Progress(uint64_t steps);
  ~Progress();  // Ends a line that is still being rewritten, and sums up if there was a step.

  void Show(const StepReport& report);

 private:
  const uint64_t steps_;
  const bool terminal_;
  bool line_open_ = false;
  RunTotals totals_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_RUN_PROGRESS_H_
