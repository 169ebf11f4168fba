// The sums of squares of a member's part of a gradient, and from all members' the groups' sums
// (common/gradient_norm.h).
//
//   member 0   |-- whole blocks: ExactSum --|- run of block 7 -|
//   member 1                                                   |- run of block 7 -|-- ExactSum --|
//
// Block sums are added without rounding, so it makes no difference which member has which. Of a
// block that lies on several members, the elements are sent: sums of its parts are not enough.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_PART_SUMS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_PART_SUMS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/norm/exact_sum.h"

namespace ballast {

// Consecutive elements of one block of a parameter, whose other elements are elsewhere.
struct CutRun {
  int parameter = 0;
  int64_t begin = 0;  // The first one, in the parameter.
  std::vector<float> values;
};

struct PartSums {
  std::vector<ExactSum> groups;  // Of the blocks that are whole here.
  std::vector<CutRun> cut;       // In any order.

  bool finite() const;
};

// By group, rounded once. `layout`: for the parameters' sizes. INVALID_ARGUMENT: the runs are not
// all elements of their blocks, each once.
absl::StatusOr<std::vector<double>> GroupSums(const Layout& layout,
                                              absl::Span<const PartSums* const> parts);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_PART_SUMS_H_
