// The progress line on standard output: rewritten in place on a terminal, a line a step otherwise.
#ifndef BALLAST_GPU_WORKER_PROGRESS_H_
#define BALLAST_GPU_WORKER_PROGRESS_H_

#include <cstdint>
#include <string>

#include "gpu_worker/trainer.h"

namespace ballast::worker {

// "step 12/80  loss 3.214  norm 1.23  ...", without a newline.
std::string FormatProgress(const StepReport& report, uint64_t steps);

class Progress {
 public:
  explicit Progress(uint64_t steps);
  ~Progress();  // Ends a line that is still being rewritten.

  void Show(const StepReport& report);

 private:
  const uint64_t steps_;
  const bool terminal_;
  bool line_open_ = false;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PROGRESS_H_
