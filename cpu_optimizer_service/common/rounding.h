// Whole units for a number of elements or bytes. For numbers of at least 0 and units of at least 1
// whose sum does not overflow.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_ROUNDING_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_ROUNDING_H_

#include <type_traits>

namespace ballast {

// value / unit, rounded up.
template <typename T>
constexpr T DivideUp(T value, std::type_identity_t<T> unit) {
  return (value + unit - 1) / unit;
}

// The least multiple of `unit` that is at least `value`.
template <typename T>
constexpr T RoundUp(T value, std::type_identity_t<T> unit) {
  return DivideUp(value, unit) * unit;
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_ROUNDING_H_
