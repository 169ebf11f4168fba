// The norm's blocks, from whole parameters.
#ifndef BALLAST_TESTS_SUPPORT_BLOCK_SUMS_H_
#define BALLAST_TESTS_SUPPORT_BLOCK_SUMS_H_

#include <algorithm>
#include <cstdint>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/norm/exact_sum.h"

namespace ballast {

// Adds the sums of squares of all blocks of the parameter.
inline void AddBlocks(absl::Span<const float> parameter, ExactSum& sum) {
  const auto elements = static_cast<int64_t>(parameter.size());
  for (int64_t at = 0; at < elements; at += kBlockElements) {
    sum.Add(BlockSumOfSquaresReference(parameter.data() + at, DType::kFloat32,
                                       std::min(kBlockElements, elements - at)));
  }
}

}  // namespace ballast

#endif  // BALLAST_TESTS_SUPPORT_BLOCK_SUMS_H_
