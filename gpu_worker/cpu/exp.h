// e^x, written so that compilers vectorise loops over it and every machine computes the same bits.
#ifndef BALLAST_GPU_WORKER_CPU_EXP_H_
#define BALLAST_GPU_WORKER_CPU_EXP_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace ballast::worker::cpu {

// Within 2e-7 of e^x, relative, for x in [-87, 88]; x beyond is taken as the nearer end. NaN is not
// promised to stay.
//
//   n = round(x / ln 2)
//   r = x - n ln 2                  in two parts, so that the first product is exact
//   e^x = 2^n e^r                   e^r by its Taylor series to r^7, |r| <= 0.35
inline float Exp(float x) {
  constexpr float kInverseLn2 = 1.44269504f;
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23: adding it drops the fraction.
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float n = (x * kInverseLn2 + kRoundToInteger) - kRoundToInteger;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float series = 1.0f / 5040;
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  const int32_t power = static_cast<int32_t>(n);
  return series * std::bit_cast<float>((power + 127) << 23);
}

inline double Exp(double x) { return std::exp(x); }

}  // namespace ballast::worker::cpu

#endif  // BALLAST_GPU_WORKER_CPU_EXP_H_
