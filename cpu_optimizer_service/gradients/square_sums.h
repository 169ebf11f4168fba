// The sums of squares of a job's gradients, block by block, and from them the groups'
// (common/gradient_norm.h).
//
// What lies whole in a chunk is summed with it, by the thread that has it in its cache. What the
// edges of chunks cut is left for Combine, when all gradients are there.
//
// Thread-compatible per chunk: the caller lets one thread at a time work on a chunk.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_SQUARE_SUMS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_SQUARE_SUMS_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/norm/exact_sum.h"
#include "cpu_optimizer_service/common/norm/norm_blocks.h"
#include "cpu_optimizer_service/gradients/part_sums.h"

namespace ballast {

// The gradient of a chunk, to read.
struct GradientView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
};

class SquareSums {
 public:
  // `layout` outlives it.
  explicit SquareSums(const Layout& layout);

  void SumChunk(int chunk, const GradientView& gradient);
  // As of a chunk that holds only zeros.
  void ZeroChunk(int chunk);
  // The sum of what lies whole in a chunk: most of what it adds to the group's.
  double SumInChunk(int chunk) const { return chunk_sums_[chunk].Rounded(); }

  using ViewOf = absl::FunctionRef<GradientView(int chunk)>;
  // Runs body(0) ... body(count - 1), in any order, on any threads, and waits for them.
  using ForEach = absl::FunctionRef<void(int64_t count, absl::FunctionRef<void(int64_t)> body)>;
  // Every chunk has been summed, and views are of the same gradients still.
  PartSums Combine(ViewOf view, ForEach for_each);

  const NormBlocks& blocks() const { return blocks_; }
  // As of when SumChunk ran for its chunk or, where it is cut, Combine. Of its elements here.
  double block_sum(int64_t block) const { return block_sums_[block]; }

 private:
  // False, with its elements here added to `runs`: others lie elsewhere.
  bool SumCutBlock(int64_t block, ViewOf view, std::vector<CutRun>& runs);

  const Layout& layout_;
  const NormBlocks blocks_;
  std::vector<double> block_sums_;
  std::vector<ExactSum> chunk_sums_;  // Of the blocks that lie whole in each.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_SQUARE_SUMS_H_
