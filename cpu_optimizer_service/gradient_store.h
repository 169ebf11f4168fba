// The gradients of the step in progress: per chunk what has come, summed, and its sums of squares.
//
// The first contribution is kept in the wire format as it came; with one micro-step there is never
// an accumulator. The second makes an fp32 sum, to which later ones are added in micro-step order.
//
// Thread-compatible per chunk: the caller lets one thread at a time work on a chunk.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENT_STORE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENT_STORE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/arena.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"

namespace ballast {

// The gradient of a chunk, to read.
struct GradientView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
};

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
  // Counts as zeros.
  void AddZeros(int chunk);
  // No gradient at all; what was there is forgotten.
  void Clear(int chunk);

  // Whether only zeros have been added since Clear.
  bool is_zero(int chunk) const { return chunks_[chunk].form == Form::kZero; }
  GradientView view(int chunk) const;

  // Computes the block sums of a chunk unless they are current.
  void UpdateSums(int chunk);
  // Sums of squares of a group's blocks in flat-space order; current where UpdateSums ran.
  absl::Span<const double> block_sums(int group) const { return block_sums_[group]; }

  // Chunks whose gradient lies in an accumulator now.
  int64_t accumulators_in_use() const { return accumulators_in_use_.load(); }

 private:
  // kZero: zeros without memory. kWire: one contribution, as it came. kSum: fp32, in the
  // accumulator.
  enum class Form : uint8_t { kNone, kZero, kWire, kSum };
  struct ChunkGradient {
    Form form = Form::kNone;
    bool sums_current = false;
    std::byte* wire = nullptr;
    float* sum = nullptr;  // nullptr: the job has no accumulators.
  };

  GradientStore(const JobSpec& spec, const Layout& layout);

  const Layout& layout_;
  std::vector<DType> wire_dtypes_;  // By group.
  std::unique_ptr<Arena> wire_arena_;
  std::unique_ptr<Arena> sum_arena_;
  std::vector<ChunkGradient> chunks_;
  std::vector<std::vector<double>> block_sums_;  // By group.
  std::atomic<int64_t> accumulators_in_use_ = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENT_STORE_H_
