#include "cpu_optimizer_service/common/rules/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/floating_point_mode.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/rules/arithmetic.h"

namespace ballast {
namespace {

struct Matrix {
  Matrix(int64_t rows, int64_t columns)
      : rows(rows), columns(columns), values(static_cast<size_t>(rows * columns)) {}
  float& at(int64_t i, int64_t j) { return values[i * columns + j]; }

  int64_t rows;
  int64_t columns;
  std::vector<float> values;
};

Matrix Product(Matrix& a, Matrix& b, bool is_b_transposed) {
  Matrix product(a.rows, is_b_transposed ? b.rows : b.columns);
  for (int64_t i = 0; i < product.rows; ++i) {
    for (int64_t j = 0; j < product.columns; ++j) {
      float sum = 0;
      for (int64_t k = 0; k < a.columns; ++k) {
        const float term = a.at(i, k) * (is_b_transposed ? b.at(j, k) : b.at(k, j));
        sum = sum + term;
      }
      product.at(i, j) = sum;
    }
  }
  return product;
}

void Normalize(Matrix& x, float eps) {
  double sum = 0;
  for (int64_t i = 0; i < x.rows; ++i) {
    double of_row = 0;
    for (int64_t j = 0; j < x.columns; ++j) of_row += double{x.at(i, j)} * x.at(i, j);
    sum += of_row;
  }
  const float divisor = std::max(static_cast<float>(std::sqrt(sum)), eps);
  for (float& value : x.values) value = value / divisor;
}

void Iterate(Matrix& x, const HyperParameters& values) {
  Matrix a = Product(x, x, /*is_b_transposed=*/true);
  Matrix b = Product(a, a, false);
  for (size_t i = 0; i < b.values.size(); ++i) {
    b.values[i] = ToScalar(values.ns_b) * a.values[i] + ToScalar(values.ns_c) * b.values[i];
  }
  const Matrix more = Product(b, x, false);
  for (size_t i = 0; i < x.values.size(); ++i) {
    x.values[i] = ToScalar(values.ns_a) * x.values[i] + more.values[i];
  }
}

}  // namespace

int64_t NewtonSchulzScratch(int64_t rows, int64_t columns) {
  const int64_t m = std::min(rows, columns);
  const int64_t n = std::max(rows, columns);
  const int64_t padded_m = RoundUp(m, kMatrixColumns);
  // Twice X, or its transpose, then A and B.
  return 2 * std::max(m * RoundUp(n, kMatrixColumns), n * padded_m) + 2 * m * padded_m;
}

void OrthogonalizeReference(absl::Span<uint16_t> matrix, int64_t rows, int64_t columns,
                            const HyperParameters& values) {
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  const bool is_tall = rows > columns;
  Matrix x(std::min(rows, columns), std::max(rows, columns));
  const auto place = [&](int64_t i, int64_t j) {
    return is_tall ? j * columns + i : i * columns + j;
  };
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t j = 0; j < x.columns; ++j) {
      x.at(i, j) = LoadElement(matrix.data(), DType::kBFloat16, place(i, j));
    }
  }
  Normalize(x, ToScalar(values.eps));
  for (int step = 0; step < values.ns_steps; ++step) Iterate(x, values);
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t j = 0; j < x.columns; ++j) {
      StoreElement(matrix.data(), DType::kBFloat16, place(i, j), x.at(i, j));
    }
  }
}

}  // namespace ballast
