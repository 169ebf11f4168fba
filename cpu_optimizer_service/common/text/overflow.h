// Why a step is skipped that would make state non-finite. The service and a worker's own optimizer
// use the same text.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_OVERFLOW_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_OVERFLOW_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ballast {

// The non-finite value that an update would leave.
struct Overflow {
  absl::string_view plane;
  absl::string_view parameter;
  int64_t element = 0;  // Of the parameter.
  float value = 0;
  int rank = 0;  // The rank that gave the gradient.
  float gradient = 0;
  float multiplier = 1;
};

inline std::string ToString(const Overflow& overflow) {
  return absl::StrCat("the update would make ", overflow.plane, " of ", overflow.parameter, " ",
                      overflow.value, " at element ", overflow.element,
                      ", where the gradient from rank ", overflow.rank, " is ", overflow.gradient,
                      " times ", overflow.multiplier, "; check the divisor, the clipping and lr");
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_OVERFLOW_H_
