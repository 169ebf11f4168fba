// A gradient element that is not finite, or will not be in its wire format.
#ifndef BALLAST_GPU_WORKER_BUCKETS_NON_FINITE_H_
#define BALLAST_GPU_WORKER_BUCKETS_NON_FINITE_H_

#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/types/span.h"
#include "client/session.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/layout.h"

namespace ballast::worker {

using NonFinite = UsedParameters::NonFinite;

struct NonFiniteElement {
  int64_t index = 0;
  float value = 0;  // In the wire format.
};

// The value in `dtype`.
inline float Rounded(float value, DType dtype) {
  float travels = 0;
  StoreElement(&travels, dtype, 0, value);
  return LoadElement(&travels, dtype, 0);
}

// The first element of `values` that is not finite once rounded to `dtype`.
inline std::optional<NonFiniteElement> FirstNonFinite(absl::Span<const float> values, DType dtype) {
  for (size_t i = 0; i < values.size(); ++i) {
    const float value = Rounded(values[i], dtype);
    if (!std::isfinite(value)) return NonFiniteElement{static_cast<int64_t>(i), value};
  }
  return std::nullopt;
}

// Whether an element comes before the first known one, by parameter and element. The reported
// element must not depend on the order in which buckets are searched.
inline bool ComesFirst(int parameter, int64_t element, const std::optional<NonFinite>& first) {
  return !first.has_value() ||
         std::pair(parameter, element) < std::pair(first->parameter, first->element);
}

// Warns of a non-finite element that --check-gradients found in a micro-step of this rank.
void LogNonFinite(const Layout& layout, int rank, uint64_t step, uint32_t micro_step,
                  const std::optional<NonFinite>& found);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BUCKETS_NON_FINITE_H_
