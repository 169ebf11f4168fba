// Why a step is skipped that would leave state that is not finite: the service and a worker's own
// optimizer say it in the same words.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_OVERFLOW_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_OVERFLOW_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ballast {

// A value that an update would leave, which is not finite.
struct Overflow {
  absl::string_view plane;
  absl::string_view parameter;
  int64_t element = 0;  // Of the parameter.
  float value = 0;
  int rank = 0;  // That gave the gradient.
  float gradient = 0;
  float multiplier = 1;
};

inline std::string ToString(const Overflow& overflow) {
  return absl::StrCat("the update would leave ", overflow.plane, " of ", overflow.parameter, " ",
                      overflow.value, " at element ", overflow.element,
                      ", where the gradient from rank ", overflow.rank, " is ", overflow.gradient,
                      " times ", overflow.multiplier, "; see to the divisor, the clipping and lr");
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_OVERFLOW_H_
