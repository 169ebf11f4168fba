// What adding a gradient to a sum in place leaves behind so that a later process can finish it, as
// kernels/adam_redo.h does for an update: new sums of a turn first, then a word that says so, then
// the accumulator. A process that takes over copies the turn once more, and when the contribution
// comes again, which was not acknowledged, adds it from behind that turn on.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_SUM_LANE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_SUM_LANE_H_

#include <cstdint>

#include "cpu_optimizer_service/common/system/checked_word.h"

namespace ballast {

inline constexpr int64_t kSumTurnElements = 256;

// In memory that outlives the process; all zeros is a lane that is free. One thread at a time.
struct SumLane {
  uint64_t word = 0;  // SumWord; 0: nothing is being added.
  uint64_t tag = 0;   // Of the contribution; a checked word.
  alignas(64) float turns[2][kSumTurnElements];
};

// A checked word: of `chunk` elements [0, done) are added, the last `count` of them in turn `turn`.
struct SumWord {
  uint32_t chunk = 0;
  int64_t done = 0;
  int64_t count = 0;
  int turn = 0;

  static constexpr int kTurnBits = 1;
  static constexpr int kCountBits = 9;
  static constexpr int kDoneBits = 20;

  // Never 0.
  uint64_t Pack() const {
    return CheckedWord(
        (((uint64_t{chunk} + 1) << kDoneBits | static_cast<uint64_t>(done)) << kCountBits |
         static_cast<uint64_t>(count))
            << kTurnBits |
        static_cast<uint64_t>(turn));
  }
  // `word` is not 0.
  static SumWord Unpack(uint64_t word) {
    word &= kCheckedValueMask;
    SumWord unpacked;
    unpacked.turn = static_cast<int>(word & 1);
    word >>= kTurnBits;
    unpacked.count = static_cast<int64_t>(word & ((uint64_t{1} << kCountBits) - 1));
    word >>= kCountBits;
    unpacked.done = static_cast<int64_t>(word & ((uint64_t{1} << kDoneBits) - 1));
    unpacked.chunk = static_cast<uint32_t>((word >> kDoneBits) - 1);
    return unpacked;
  }
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_SUM_LANE_H_
