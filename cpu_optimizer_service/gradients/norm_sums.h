// How far the sums of squares of a step's gradients are, chunk by chunk.
//
// The sums of a chunk go none -> running -> current under the job's lock. The thread that makes
// them running computes them: a task, or, so that it never waits for what is only queued, the
// decision.
//
// Thread-compatible: the job's lock guards it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_NORM_SUMS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_NORM_SUMS_H_

#include <cstdint>
#include <vector>

namespace ballast {

class NormSums {
 public:
  explicit NormSums(int64_t chunks) : states_(chunks, State::kNone) {}

  bool current(int64_t chunk) const { return states_[chunk] == State::kCurrent; }
  // True: the chunk's sums were not begun, and are the caller's to compute.
  bool Claim(int64_t chunk) {
    if (states_[chunk] != State::kNone) return false;
    states_[chunk] = State::kRunning;
    return true;
  }
  // All that were not begun, for the caller to compute; by chunk.
  std::vector<bool> ClaimAll() {
    std::vector<bool> claimed(states_.size(), false);
    for (size_t chunk = 0; chunk < states_.size(); ++chunk) {
      claimed[chunk] = Claim(static_cast<int64_t>(chunk));
    }
    return claimed;
  }
  void Finish(int64_t chunk) { states_[chunk] = State::kCurrent; }
  void FinishAll() { states_.assign(states_.size(), State::kCurrent); }
  void Clear() { states_.assign(states_.size(), State::kNone); }
  void Clear(int64_t chunk) { states_[chunk] = State::kNone; }

 private:
  enum class State : uint8_t { kNone, kRunning, kCurrent };
  std::vector<State> states_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_NORM_SUMS_H_
