// OrthogonalizeReference (common/rules/newton_schulz.h) on several threads, with the same bits.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_NEWTON_SCHULZ_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_NEWTON_SCHULZ_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"

namespace ballast {

// body(0) ... body(count - 1), in any order, on any threads.
struct Loop {
  int64_t count = 0;
  std::function<void(int64_t)> body;
};

// One matrix. Its work is a list of loops, for the caller to run one after the other: so no thread
// waits for another. An index takes about a millisecond.
class NewtonSchulz {
 public:
  // rows, columns >= 1. `scratch`: at least NewtonSchulzScratch, aligned to 64 bytes, with any
  // contents; it outlives the object.
  NewtonSchulz(int64_t rows, int64_t columns, const HyperParameters& values,
               absl::Span<float> scratch);

  // rows x columns values in bf16, row-major: the direction, before the loops; O, after them.
  absl::Span<uint16_t> direction() const { return AsGiven(two_); }
  absl::Span<const uint16_t> orthogonal() const { return AsGiven(last_); }
  // They use this object.
  const std::vector<Loop>& loops() const { return loops_; }

 private:
  struct Buffer {
    float* data = nullptr;
    int64_t stride = 0;
    float* row(int64_t i) const { return data + i * stride; }
  };
  Buffer Wide(float* data) const { return {data, wide_stride_}; }      // X: m x n.
  Buffer Narrow(float* data) const { return {data, narrow_stride_}; }  // Others, with m columns.
  absl::Span<uint16_t> AsGiven(float* data) const {
    return absl::MakeSpan(reinterpret_cast<uint16_t*>(data), rows_ * columns_);
  }

  // Each appends loops. `x`: where X is before, and after.
  void Load(float*& x);
  void Normalize(float* x, float eps);
  void Iterate(float*& x, const HyperParameters& values);
  void Store(float* x);
  float* Other(const float* x) const { return x == one_ ? two_ : one_; }

  void AddRows(int64_t rows, std::function<void(int64_t begin, int64_t end)> body);
  // to[i][j] = from[j][i], for `rows` rows of `to`.
  void AddTranspose(Buffer from, Buffer to, int64_t rows, int64_t columns);
  // out = scale * addend + factor * (a * b), of m rows; the addend may be null.
  void AddProduct(Buffer a, Buffer b, int64_t inner, const float* addend, Buffer out, float scale,
                  float factor);

  const int64_t rows_;
  const int64_t columns_;
  const int64_t m_;
  const int64_t n_;
  const int64_t wide_stride_;
  const int64_t narrow_stride_;
  // Two as large as X or its transpose: X, and the next X, the transpose, or values as they are given.
  float* const one_;
  float* const two_;
  float* const a_;
  float* const b_;
  float* last_ = nullptr;
  std::vector<double> sums_;  // By row.
  float divisor_ = 1;
  std::vector<Loop> loops_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_NEWTON_SCHULZ_H_
