// Products of matrices. Included once per instruction set.
//
// No fused multiply-add, which not every instruction set has: each sum adds rounded products in the
// order of k. Columns are what a vector holds, so its width does not show.
#if defined(BALLAST_CPU_OPTIMIZER_SERVICE_MATRIX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_CPU_OPTIMIZER_SERVICE_MATRIX_INL_H_
#undef BALLAST_CPU_OPTIMIZER_SERVICE_MATRIX_INL_H_
#else
#define BALLAST_CPU_OPTIMIZER_SERVICE_MATRIX_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu_optimizer_service/kernels/kernels.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 512 bits, so that a strip of kVectors divides kMatrixColumns.
using MatrixTag = hn::CappedTag<float, 16>;
using MatrixVec = hn::Vec<MatrixTag>;
// So that the sums of four rows stay in registers.
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3
constexpr int kVectors = 2;
#else
constexpr int kVectors = 4;
#endif
constexpr int64_t kInnerStrip = 256;  // Of b, a strip of so many rows stays in the second cache.

// The sums of a strip of columns, of kRows rows, go on over `inner` more products. `strip`: of b, its
// rows one behind the other.
template <int kRows>
HWY_INLINE void AddStrip(const MatrixProduct& p, int64_t row, int64_t k, int64_t column,
                         int64_t inner, const float* HWY_RESTRICT strip, bool is_first) {
  const MatrixTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  MatrixVec sums[kRows][kVectors];
  float* out[kRows];
  const float* a[kRows];
  for (int r = 0; r < kRows; ++r) {
    out[r] = p.out + (row + r) * p.out_stride + column;
    a[r] = p.a + (row + r) * p.a_stride + k;
    for (int v = 0; v < kVectors; ++v)
      sums[r][v] = is_first ? hn::Zero(d) : hn::LoadU(d, out[r] + v * lanes);
  }
  for (int64_t i = 0; i < inner; ++i, strip += kVectors * lanes) {
    MatrixVec b[kVectors];
    for (int v = 0; v < kVectors; ++v) b[v] = hn::LoadU(d, strip + v * lanes);
    for (int r = 0; r < kRows; ++r) {
      const MatrixVec factor = hn::Set(d, a[r][i]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Add(sums[r][v], hn::Mul(factor, b[v]));
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], d, out[r] + v * lanes);
  }
}

HWY_NOINLINE void Multiply(const MatrixProduct& p) {
  const MatrixTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t width = kVectors * lanes;
  alignas(64) float strip[kInnerStrip * kMatrixColumns];
  for (int64_t column = 0; column < p.columns; column += width) {
    for (int64_t k = 0; k < p.inner; k += kInnerStrip) {
      const int64_t inner = std::min(kInnerStrip, p.inner - k);
      for (int64_t i = 0; i < inner; ++i) {
        std::memcpy(strip + i * width, p.b + (k + i) * p.b_stride + column, width * sizeof(float));
      }
      int64_t row = 0;
      for (; row + 4 <= p.rows; row += 4) AddStrip<4>(p, row, k, column, inner, strip, k == 0);
      for (; row < p.rows; ++row) AddStrip<1>(p, row, k, column, inner, strip, k == 0);
    }
  }
  if (p.addend == nullptr) return;
  const MatrixVec scale = hn::Set(d, p.scale);
  const MatrixVec factor = hn::Set(d, p.factor);
  for (int64_t row = 0; row < p.rows; ++row) {
    float* const out = p.out + row * p.out_stride;
    const float* const addend = p.addend + row * p.out_stride;
    for (int64_t column = 0; column < p.columns; column += lanes) {
      const MatrixVec sum = hn::Mul(factor, hn::LoadU(d, out + column));
      hn::StoreU(hn::Add(hn::Mul(scale, hn::LoadU(d, addend + column)), sum), d, out + column);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_MATRIX_INL_H_
