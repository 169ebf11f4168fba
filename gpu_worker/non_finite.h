// A gradient element that is not a finite number, or will not be one in the format it travels in.
#ifndef BALLAST_GPU_WORKER_NON_FINITE_H_
#define BALLAST_GPU_WORKER_NON_FINITE_H_

#include <cmath>
#include <cstdint>
#include <optional>

#include "absl/types/span.h"
#include "client/session.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/float_format.h"

namespace ballast::worker {

using NonFinite = client::UsedParameters::NonFinite;

struct NonFiniteElement {
  int64_t index = 0;
  float value = 0;  // As it travels.
};

// The first element of `values` that is not finite once rounded to `dtype`.
inline std::optional<NonFiniteElement> FirstNonFinite(absl::Span<const float> values, DType dtype) {
  for (size_t i = 0; i < values.size(); ++i) {
    float travels = 0;
    StoreElement(&travels, dtype, 0, values[i]);
    const float value = LoadElement(&travels, dtype, 0);
    if (!std::isfinite(value)) return NonFiniteElement{static_cast<int64_t>(i), value};
  }
  return std::nullopt;
}

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_NON_FINITE_H_
