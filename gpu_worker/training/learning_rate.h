// The learning rate as a function of the step: linear warmup, then half a cosine.
#ifndef BALLAST_GPU_WORKER_TRAINING_LEARNING_RATE_H_
#define BALLAST_GPU_WORKER_TRAINING_LEARNING_RATE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace ballast::worker {

struct LearningRateSchedule {
  double peak = 1e-3;
  uint64_t warmup_steps = 10;
  uint64_t decay_end = 80;  // The step at which the fall ends.
  double final_fraction = 0.1;
};

// Steps count from 1. Step warmup_steps has the peak, decay_end and later ones the final fraction
// of it.
inline double LearningRate(const LearningRateSchedule& schedule, uint64_t step) {
  if (step < schedule.warmup_steps) return schedule.peak * step / schedule.warmup_steps;
  const uint64_t decay_steps =
      schedule.decay_end > schedule.warmup_steps ? schedule.decay_end - schedule.warmup_steps : 1;
  const double progress =
      std::min(1.0, static_cast<double>(step - schedule.warmup_steps) / decay_steps);
  const double cosine = 0.5 * (1 + std::cos(std::numbers::pi * progress));
  return schedule.peak * (schedule.final_fraction + (1 - schedule.final_fraction) * cosine);
}

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_TRAINING_LEARNING_RATE_H_
