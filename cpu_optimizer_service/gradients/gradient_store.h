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
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/gradients/square_sums.h"
#include "cpu_optimizer_service/gradients/weight_buffer.h"
#include "cpu_optimizer_service/host/arena.h"

namespace ballast {

class GradientStore {
 public:
  static int64_t GradientBytes(const JobSpec& spec, const Layout& layout);
  static int64_t AccumulatorBytes(const JobSpec& spec, const Layout& layout);

  // `layout` outlives the store.
  static absl::StatusOr<std::unique_ptr<GradientStore>> Create(const JobSpec& spec,
                                                               const Layout& layout,
                                                               ArenaFactory& arenas);

  // Adds a payload of chunk.elements elements in the wire dtype, in pieces cut anywhere. The second
  // payload of a step needs an accumulator: the job's max_micro_steps is not 1.
  void Add(int chunk, absl::Span<const absl::Span<const std::byte>> payload);
  // As Add, for the first contribution of a step: it is read at `payload`, which is aligned for its
  // dtype and stays until Clear.
  void Borrow(int chunk, const std::byte* payload);
  // Counts as zeros.
  void AddZeros(int chunk);
  // No gradient at all; what was there is forgotten.
  void Clear(int chunk);

  // Whether only zeros have been added since Clear.
  bool is_zero(int chunk) const { return chunks_[chunk].form == Form::kZero; }
  GradientView view(int chunk) const;

  // Room for the chunk's updated weights on their way out: the place where its gradient came. If
  // that is where view() lies, element i may be written once element i has been read. Until the
  // buffer is given back, the chunk's next gradient is kept elsewhere. Null if the place is lent
  // already, or does not have the size.
  WeightBuffer LendPlace(int chunk, int64_t size_bytes);

  // Whether an element of the piece, which may be padding, is not zero. `sums_current`: ComputeSums
  // has run for what the chunk holds.
  bool HasNonZero(const ChunkPiece& piece, bool sums_current) const;

  // Computes the sums of squares of what has been added to a chunk.
  void ComputeSums(int chunk);
  // About what they add to its group's.
  double SumInChunk(int chunk) const { return sums_.SumInChunk(chunk); }
  // The sums of squares of the groups, once ComputeSums has run for all chunks. Most of it is
  // ComputeSums' work: left are an addition for each span, and what chunks share.
  std::vector<double> CombineSums(SquareSums::ForEach for_each);
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
    std::unique_ptr<std::byte[]> elsewhere;  // In place of `wire`, while that is lent.
    float* sum = nullptr;                    // nullptr: the job has no accumulators.
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
  std::shared_ptr<Places> places_ = std::make_shared<Places>();
  std::unique_ptr<Arena> sum_arena_;
  std::vector<ChunkGradient> chunks_;
  SquareSums sums_;
  std::atomic<int64_t> accumulators_in_use_ = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_GRADIENT_STORE_H_
