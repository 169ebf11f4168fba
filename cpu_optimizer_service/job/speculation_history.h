// Whether it is worth updating a chunk before the decision: the rule by which speculation pauses.
//
// A provisional update becomes the state if the step is applied without clipping and every
// parameter of the chunk is updated. One that does hides the chunk's update and its way back under
// backward; one that does not costs another pass over the chunk's state. Each chunk remembers of
// its last 16 decided steps whether a provisional update would have failed, made or not.
// Speculation pauses when 4 of them failed and resumes when at most 1 did, so that a run that clips
// now and then goes on speculating, and one that clips always, or a layer used every other step,
// soon stops paying.
//
// Thread-compatible. Only speed depends on it, never a bit.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_SPECULATION_HISTORY_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_SPECULATION_HISTORY_H_

#include <bit>
#include <cstdint>

namespace ballast {

class SpeculationHistory {
 public:
  static constexpr int kSteps = 16;
  static constexpr int kPauseAt = 4;
  static constexpr int kResumeAt = 1;

  void Record(bool held) {
    failed_ = static_cast<uint16_t>(failed_ << 1 | (held ? 0 : 1));
    const int failures = std::popcount(failed_);
    if (failures >= kPauseAt) paused_ = true;
    if (failures <= kResumeAt) paused_ = false;
  }
  bool paused() const { return paused_; }

 private:
  uint16_t failed_ = 0;  // Bit i: a provisional update failed, or would have, i decided steps ago.
  bool paused_ = false;
};
static_assert(SpeculationHistory::kSteps == 16);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_SPECULATION_HISTORY_H_
