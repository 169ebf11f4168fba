// The gradients of the step in progress: per chunk what has arrived, summed, and its sums of
// squares.
//
// The first contribution is kept in the wire format as it came, or read where it lies; with one
// micro-step there is never an accumulator. The second makes an fp32 sum, to which later ones are
// added in micro-step order.
//
// Thread-compatible per chunk: the caller lets one thread at a time work on a chunk.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_GRADIENT_STORE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_GRADIENT_STORE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/gradients/square_sums.h"
#include "cpu_optimizer_service/gradients/weight_buffer.h"
#include "cpu_optimizer_service/host/arena.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/kernels/redo_lane.h"

namespace ballast {

class GradientStore {
 public:
  // `layout` outlives the store.
  // `arenas` outlives it, too. `named`: those, where what another process left is kept as it is
  // (Restore).
  static absl::StatusOr<std::unique_ptr<GradientStore>> Create(const JobSpec& spec,
                                                               const Layout& layout,
                                                               ArenaFactory& arenas,
                                                               NamedArenas* named = nullptr);

  // Before a payload that is not borrowed: there is a place for it that a later process finds.
  // UNAVAILABLE: its own is lent, and there is no memory for another.
  absl::Status MakePlace(int chunk);
  // Adds a payload of chunk.elements elements in the wire dtype, in pieces cut anywhere. The second
  // payload of a step needs an accumulator: the job's max_micro_steps is not 1. With `lane`,
  // nullable, for a payload whose Add changes what is there (changes_sum).
  void Add(int chunk, absl::Span<const absl::Span<const std::byte>> payload,
           RedoLane* lane = nullptr);
  // As Add, for the first contribution of a step: it is read at `payload`, which is aligned for its
  // dtype and stays until Clear.
  void Borrow(int chunk, const std::byte* payload);
  // Counts as zeros.
  void AddZeros(int chunk);
  // No gradient at all; what was there is forgotten.
  void Clear(int chunk);
  void ClearAll();

  // Where a chunk's gradient lies, for a later process; of named memory.
  enum class Kept : uint8_t {
    kNone,
    kZero,
    kPlace,      // As it came, in the chunk's place.
    kElsewhere,  // As it came, in memory of its own.
    kBorrowed,   // As it came, where the rank put it.
    kSum,        // In the accumulator.
    kLost,       // Nowhere that a later process finds.
  };
  Kept kept(int chunk) const;
  // The next Add changes what is there.
  bool changes_sum(int chunk) const { return chunks_[chunk].form == Form::kSum; }
  // It has a part of a contribution that an earlier process had begun to add, and nothing but the
  // rest of the same one may be added.
  bool half_added(int chunk) const { return chunks_[chunk].sum_done > 0; }
  // An earlier process had begun the next Add, and left it in the lane, which that Add will get.
  void Resume(const RedoLane& lane);
  // As an earlier process left it; `borrowed` is where of kBorrowed. DATA_LOSS: it is not there.
  absl::Status Restore(int chunk, Kept kept, const std::byte* borrowed);

  // Whether only zeros have been added since Clear.
  bool is_zero(int chunk) const { return chunks_[chunk].form == Form::kZero; }
  GradientView view(int chunk) const;

  // Room for the chunk's updated weights on their way out: the place where its gradient came. If
  // that is where view() lies, element i may be written once element i has been read, and the
  // place is lent only if the gradient `may_go`. Until the buffer is given back, the chunk's next
  // gradient is kept elsewhere. Null if the place is lent already, or does not have the size.
  WeightBuffer LendPlace(int chunk, int64_t size_bytes, bool may_go = true);

  // Whether an element of the piece, which may be padding, is not zero. `sums_current`: ComputeSums
  // has run for what the chunk holds.
  bool HasNonZero(const ChunkPiece& piece, bool sums_current) const;

  // Computes the sums of squares of what has been added to a chunk.
  void ComputeSums(int chunk);
  // About what they add to its group's.
  double SumInChunk(int chunk) const { return sums_.SumInChunk(chunk); }
  // The sums of squares, once ComputeSums has run for all chunks. Most of it is ComputeSums' work:
  // left are an addition for each chunk, and what chunks share.
  PartSums CombineSums(SquareSums::ForEach for_each);
  // The first element, in the order of groups and of declaration, that is not finite, as of
  // CombineSums; a piece of one element, or none.
  std::optional<ChunkPiece> FirstNonFinite() const;

  // Chunks whose gradient lies in an accumulator now.
  int64_t accumulators_in_use() const { return accumulators_in_use_.load(); }

 private:
  // kZero: zeros without memory. kWire: one contribution, as it came. kSum: fp32, in the
  // accumulator.
  enum class Form : uint8_t { kNone, kZero, kWire, kSum };
  struct ChunkGradient {
    Form form = Form::kNone;
    const std::byte* first = nullptr;  // kWire: where the contribution lies; `wire`, or borrowed.
    std::byte* wire = nullptr;         // Its place.
    // In place of `wire`, while that is lent: one of the two.
    std::unique_ptr<std::byte[]> elsewhere;
    std::unique_ptr<Arena> named_elsewhere;
    float* sum = nullptr;  // nullptr: the job has no accumulators.
    int64_t sum_done = 0;  // Elements of the next payload that are in it already.
  };

  GradientStore(const JobSpec& spec, const Layout& layout);
  std::optional<ChunkPiece> FirstNonFiniteOf(const NormBlocks::Place& place) const;

  const Layout& layout_;
  std::vector<DType> wire_dtypes_;  // By group.
  // The places, kept for as long as one is lent.
  struct Places {
    std::unique_ptr<Arena> arena;
    std::unique_ptr<std::atomic<bool>[]> lent;  // By chunk.
  };
  int64_t PlaceBytes(int chunk) const;
  // Where the chunk's first payload goes.
  std::byte* PlaceForPayload(int chunk);
  std::string ElsewhereLabel(int chunk) const;
  std::shared_ptr<Places> places_ = std::make_shared<Places>();
  std::unique_ptr<Arena> sum_arena_;
  std::string owner_;                    // "job gpt2".
  NamedArenas* named_arenas_ = nullptr;  // Null: they have no names.
  std::vector<ChunkGradient> chunks_;
  SquareSums sums_;
  std::atomic<int64_t> accumulators_in_use_ = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_GRADIENT_STORE_H_
