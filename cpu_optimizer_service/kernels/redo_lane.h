// What a change in place leaves behind so that a later process can finish it: redo, not undo. The
// change is an update of a chunk, or the addition of a gradient to its sum.
//
// A turn stores its new values in a ring of turns that stays in the first cache; then `word`, which
// says how far the chunk is; and only then the planes, or the sum.
// Whatever the instant of the process's death, the turn that `word` names is whole in the ring, all
// turns before it are in place, and nothing of a later one is: so that turn is copied once more,
// and the change goes on behind it, with the same bits. The order is one thread's, kept by the
// compiler: what a process stored before it died is there, in memory that outlives it.
//
// The weights that an update sends out are not in the ring: they are read from the master weights
// again. Where they replace the gradient, no element's gradient is lost before its turn is in the
// ring.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_REDO_LANE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_REDO_LANE_H_

#include <cstddef>
#include <cstdint>

#include "cpu_optimizer_service/common/system/checked_word.h"
#include "cpu_optimizer_service/common/system/ordered_stores.h"

namespace ballast {

inline constexpr int64_t kUpdateTurnElements = 32;  // At most.
inline constexpr int64_t kSumTurnElements = 4 * kUpdateTurnElements;
inline constexpr int kRedoTurns = 4;  // 2 KiB: less is slower, and so is more.

// The new values of one turn: of an addition to a sum in a row, of an update plane by plane.
struct RedoTurn {
  float* plane(int plane) { return values + plane * kUpdateTurnElements; }

  alignas(64) float values[kSumTurnElements];
};

// In memory that outlives the process; all zeros is a lane that is free. One thread at a time.
struct RedoLane {
  uint64_t word = 0;  // RedoWord; 0: nothing is being changed.
  uint64_t tag = 0;   // A checked word: an update's step, or which contribution is added.
  alignas(64) RedoTurn turns[kRedoTurns];
};

// What a lane's word says: of `chunk` elements [0, done) are new, the last `count` of them in the
// ring at `turn`. Its check bits are not those of a checked word, whose CRC makes the update a fifth
// longer: one multiplication finds every flipped bit, and 255 of 256 other changes.
struct RedoWord {
  uint32_t chunk = 0;
  int64_t done = 0;
  int64_t count = 0;
  int turn = 0;

  static constexpr int kDoneBits = 20;
  static constexpr int kCountBits = 8;
  static constexpr int kTurnBits = 2;
  static constexpr int kChunkShift = kDoneBits + kCountBits + kTurnBits;

  // The highest byte of the product is the check. No eight bits beside each other in the factor are
  // equal, so whichever bit of the value is flipped, that byte changes.
  static constexpr uint64_t Checked(uint64_t value) {
    return value | (value * 0x5ab46c9d35d6936bu & ~kCheckedValueMask);
  }
  // Whether the word is as it was stored. 0, of a lane that is free, is.
  static constexpr bool IsWhole(uint64_t word) { return Checked(word & kCheckedValueMask) == word; }
  // Never 0.
  uint64_t Pack() const {
    return Checked((uint64_t{chunk} + 1) << kChunkShift |
                   static_cast<uint64_t>(done) << (kCountBits + kTurnBits) |
                   static_cast<uint64_t>(count) << kTurnBits | static_cast<uint64_t>(turn));
  }
  // `word` is not 0.
  static RedoWord Unpack(uint64_t word) {
    word &= kCheckedValueMask;
    return {.chunk = static_cast<uint32_t>((word >> kChunkShift) - 1),
            .done = static_cast<int64_t>(word >> (kCountBits + kTurnBits) &
                                         ((uint64_t{1} << kDoneBits) - 1)),
            .count = static_cast<int64_t>(word >> kTurnBits & ((uint64_t{1} << kCountBits) - 1)),
            .turn = static_cast<int>(word & ((uint64_t{1} << kTurnBits) - 1))};
  }
};

// Records the turns of one change of consecutive elements of a chunk, in place.
class RedoWriter {
 public:
  // The first element is element `begin` of `chunk`, and all before it is new. The lane's word says
  // so already, or is of an earlier run of the chunk.
  RedoWriter(RedoLane& lane, uint32_t chunk, int64_t begin)
      : lane_(&lane),
        chunk_(chunk),
        done_(begin),
        turn_(lane.word == 0 ? 0 : (RedoWord::Unpack(lane.word).turn + 1) % kRedoTurns) {}

  // Where the next turn's values go; nothing that is still needed lies there.
  RedoTurn& next() { return lane_->turns[turn_]; }
  // They are there. From here on the turn counts as done.
  void Record(int64_t elements) {
    done_ += elements;
    const RedoWord word = {.chunk = chunk_, .done = done_, .count = elements, .turn = turn_};
    StoreWord(lane_->word, word.Pack());
    turn_ = (turn_ + 1) % kRedoTurns;
  }

 private:
  RedoLane* lane_;
  uint32_t chunk_;
  int64_t done_;
  int turn_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_REDO_LANE_H_
