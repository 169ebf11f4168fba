#include "cpu_optimizer_service/kernels/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu_optimizer_service/common/floating_point_mode.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/rules/arithmetic.h"
#include "cpu_optimizer_service/common/rules/newton_schulz.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {
namespace {

// What an index of a loop works on. A product reads a strip of b once for all of its rows.
constexpr int64_t kRowsTogether = 16;
constexpr int64_t kColumnsTogether = 4 * kMatrixColumns;

// Functions of their own, for the floating-point mode.
__attribute__((noinline)) double SumOfSquares(const float* values, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += double{values[i]} * values[i];
  return sum;
}
__attribute__((noinline)) void Divide(float* values, int64_t count, float divisor) {
  for (int64_t i = 0; i < count; ++i) values[i] = values[i] / divisor;
}
__attribute__((noinline)) float DivisorOf(const std::vector<double>& sums, float eps) {
  double sum = 0;
  for (const double of_row : sums) sum += of_row;
  return std::max(static_cast<float>(std::sqrt(sum)), eps);
}

}  // namespace

NewtonSchulz::NewtonSchulz(int64_t rows, int64_t columns, const HyperParameters& values,
                           absl::Span<float> scratch)
    : rows_(rows),
      columns_(columns),
      m_(std::min(rows, columns)),
      n_(std::max(rows, columns)),
      wide_stride_(RoundUp(n_, kMatrixColumns)),
      narrow_stride_(RoundUp(m_, kMatrixColumns)),
      one_(scratch.data()),
      two_(one_ + std::max(m_ * wide_stride_, n_ * narrow_stride_)),
      a_(two_ + (two_ - one_)),
      b_(a_ + m_ * narrow_stride_),
      sums_(m_) {
  float* x = one_;
  Load(x);
  Normalize(x, ToScalar(values.eps));
  for (int step = 0; step < values.ns_steps; ++step) Iterate(x, values);
  Store(x);
}

void NewtonSchulz::AddRows(int64_t rows, std::function<void(int64_t begin, int64_t end)> body) {
  loops_.push_back({.count = DivideUp(rows, kRowsTogether),
                    .body = [rows, body = std::move(body)](int64_t index) {
                      const int64_t begin = index * kRowsTogether;
                      body(begin, std::min(rows, begin + kRowsTogether));
                    }});
}

void NewtonSchulz::AddTranspose(Buffer from, Buffer to, int64_t rows, int64_t columns) {
  AddRows(rows, [=](int64_t begin, int64_t end) {
    for (int64_t j = 0; j < columns; ++j) {
      const float* const values = from.row(j);
      for (int64_t i = begin; i < end; ++i) to.row(i)[j] = values[i];
    }
  });
}

void NewtonSchulz::AddProduct(Buffer a, Buffer b, int64_t inner, const float* addend, Buffer out,
                              float scale, float factor) {
  const int64_t rows = m_;
  const int64_t row_blocks = DivideUp(rows, kRowsTogether);
  // All columns, padding included: what pads a row is made of what pads others, and shows nowhere.
  loops_.push_back(
      {.count = row_blocks * DivideUp(out.stride, kColumnsTogether), .body = [=](int64_t index) {
         const int64_t row = index % row_blocks * kRowsTogether;
         const int64_t column = index / row_blocks * kColumnsTogether;
         const int64_t place = row * out.stride + column;
         MultiplyMatrices({.rows = std::min(kRowsTogether, rows - row),
                           .inner = inner,
                           .columns = std::min(kColumnsTogether, out.stride - column),
                           .a = a.row(row),
                           .a_stride = a.stride,
                           .b = b.data + column,
                           .b_stride = b.stride,
                           .addend = addend == nullptr ? nullptr : addend + place,
                           .out = out.data + place,
                           .out_stride = out.stride,
                           .scale = scale,
                           .factor = factor});
       }});
}

void NewtonSchulz::Load(float*& x) {
  const bool is_tall = rows_ > columns_;
  const Buffer to = is_tall ? Narrow(x) : Wide(x);
  AddRows(rows_, [this, to](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      ConvertToFloat(direction().data() + row * columns_, DType::kBFloat16, to.row(row), columns_);
    }
  });
  if (!is_tall) return;
  AddTranspose(to, Wide(Other(x)), m_, n_);
  x = Other(x);
}

void NewtonSchulz::Normalize(float* x, float eps) {
  const Buffer wide = Wide(x);
  AddRows(m_, [this, wide](int64_t begin, int64_t end) {
    const ScopedFloatingPointMode mode(Denormals::kKeep);
    for (int64_t i = begin; i < end; ++i) sums_[i] = SumOfSquares(wide.row(i), n_);
  });
  loops_.push_back({.count = 1, .body = [this, eps](int64_t) {
                      const ScopedFloatingPointMode mode(Denormals::kKeep);
                      divisor_ = DivisorOf(sums_, eps);
                    }});
  AddRows(m_, [this, wide](int64_t begin, int64_t end) {
    const ScopedFloatingPointMode mode(Denormals::kKeep);
    for (int64_t i = begin; i < end; ++i) Divide(wide.row(i), n_, divisor_);
  });
}

void NewtonSchulz::Iterate(float*& x, const HyperParameters& values) {
  float* const other = Other(x);
  AddTranspose(Wide(x), Narrow(other), n_, m_);
  AddProduct(Wide(x), Narrow(other), n_, nullptr, Narrow(a_), 1, 1);
  AddProduct(Narrow(a_), Narrow(a_), m_, a_, Narrow(b_), ToScalar(values.ns_b),
             ToScalar(values.ns_c));
  AddProduct(Narrow(b_), Wide(x), m_, x, Wide(other), ToScalar(values.ns_a), 1);
  x = other;
}

void NewtonSchulz::Store(float* x) {
  const bool is_tall = rows_ > columns_;
  if (is_tall) {
    AddTranspose(Wide(x), Narrow(Other(x)), n_, m_);
    x = Other(x);
  }
  const Buffer from = is_tall ? Narrow(x) : Wide(x);
  last_ = Other(x);
  AddRows(rows_, [this, from](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      ConvertFromFloat(from.row(row), AsGiven(last_).data() + row * columns_, DType::kBFloat16,
                       columns_);
    }
  });
}

}  // namespace ballast
