#include "gpu_worker/cpu/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gpu_worker/cpu/exp.h"
#include "gpu_worker/cpu/parallel.h"

namespace ballast::worker::cpu {
namespace {

// The row itself becomes the softmax: a second array of rows * classes would be large with the
// vocabulary of GPT-2.
template <typename T>
double RowLoss(int classes, int target, T* row) {
  // As in attention, the largest logit is subtracted, so that the sum cannot overflow.
  const T largest = *std::max_element(row, row + classes);
  // It is read now, because the loop below writes over the logits.
  const double target_logit = row[target] - largest;
  for (int i = 0; i < classes; ++i) row[i] = Exp(row[i] - largest);
  T sum = 0;
  for (int i = 0; i < classes; ++i) sum += row[i];
  const T inverse = 1 / sum;
  for (int i = 0; i < classes; ++i) row[i] *= inverse;
  row[target] -= 1;
  return std::log(static_cast<double>(sum)) - target_logit;
}

}  // namespace

template <typename T>
double CrossEntropy(const CrossEntropyShape& shape, const int32_t* targets, T* logits,
                    double* row_losses) {
  ForEachTile(shape.rows, kTileRows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      row_losses[row] =
          RowLoss(shape.classes, targets[row], logits + static_cast<int64_t>(row) * shape.classes);
    }
  });
  // One thread adds the rows in their order, so the sum has the same bits for any number of
  // threads.
  double sum = 0;
  for (int row = 0; row < shape.rows; ++row) sum += row_losses[row];
  return sum;
}

template double CrossEntropy(const CrossEntropyShape&, const int32_t*, float*, double*);
template double CrossEntropy(const CrossEntropyShape&, const int32_t*, double*, double*);

}  // namespace ballast::worker::cpu
