// Sums of squares, the global norm, clipping, and the multiplier that a decision applies.
//
// A sum does not depend on threads, arrival, or how parameters are cut into chunks, shards and
// hosts:
//   block     = kBlockElements (256) consecutive elements of a parameter, in row-major order, the
//               first of them a multiple of 256; the last block of a parameter may be short
//   block sum = its sum of squares, in double and in one written order
//   group sum = ExactSum of the block sums of its trainable parameters, rounded once
// norm_blocks.h says where they lie. A block's sum is finite exactly when all its elements are: 256
// squares of fp32 values cannot overflow a double. All else is in double.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_GRADIENT_NORM_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_GRADIENT_NORM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/layout.h"

namespace ballast {

// Sum of squares of a block: the `elements` elements at `gradient` as received (scaled, summed over
// ranks). Order: lane l of 16 adds the squares of elements l, l+16, l+32, ... in that order. Then
// lanes are added pairwise: l and l+8 for l < 8, then l and l+4, l and l+2, l and l+1. Zeros after
// the last element of a short block would not change a bit. Denormal elements count as they are:
// their squares are normal doubles.
double BlockSumOfSquaresReference(const void* gradient, DType dtype,
                                  int64_t elements = kBlockElements);

// How to read the workers' gradients, from begin_step.
struct GradientScale {
  double loss_scale = 1.0;  // Gradients are multiplied by this, in all groups.
  // One per group: number of samples or tokens summed over. Empty: all 1.
  std::vector<double> divisors;
};

// How a step's unscaled, divided gradient is clipped: by its global norm, or by the trainer's
// multipliers from the groups' norms.
struct Clipping {
  double max_norm = 0;  // As torch.nn.utils.clip_grad_norm_; 0: no clipping by the norm.
  std::vector<double> multipliers;  // One per group. Empty: all 1.

  bool operator==(const Clipping&) const = default;
};
// INVALID_ARGUMENT: a non-finite or negative max_norm, a non-finite or non-positive multiplier, not
// one multiplier for each group, or both at once.
absl::Status Validate(const Clipping& clipping, int group_count);
// Empty if both are equal; else "max_norm 2 where others have 1", `b` first.
std::string FirstDifference(const Clipping& a, const Clipping& b);

struct Decision {
  bool apply = false;  // false: skip, nothing changes.
  double norm = 0;     // Of the unscaled, divided gradient over all groups; may be inf or NaN.
  // min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; 1 without it.
  double clip_coefficient = 1;
  // One per group: clip_coefficient * clipping.multiplier / (loss_scale * divisor).
  std::vector<float> multipliers;

  bool operator==(const Decision&) const = default;
};

// The norms of the unscaled, divided gradient, from the groups' sums of squares:
//   S_g    = group_sums[g]
//   u_g    = 1 / (loss_scale * divisor_g)
//   norm   = sqrt(sum over groups, in order, of u_g * u_g * S_g)
//   norm_g = sqrt(u_g * u_g * S_g)
double GlobalNorm(absl::Span<const double> group_sums, const GradientScale& scale);
std::vector<double> GroupNorms(absl::Span<const double> group_sums, const GradientScale& scale);

// Skips, without multipliers, if the norm is not finite, or if a multiplier is not a normal fp32
// value: that would turn gradients into zeros or infinities.
Decision Decide(absl::Span<const double> group_sums, const GradientScale& scale,
                const Clipping& clipping);

// A group's multiplier, bit for bit, in a decision with a norm of at most max_norm: provisional
// updates use it. Not a normal fp32 value if such a decision would skip.
float MultiplierWithinNorm(const GradientScale& scale, const Clipping& clipping, int group);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_GRADIENT_NORM_H_
