#include "gpu_worker/cpu/layer_norm.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gpu_worker/cpu/parallel.h"

namespace ballast::worker::cpu {
template <typename T>
void LayerNormForward(const LayerNormShape& shape, const T* in, const T* weight, const T* bias,
                      T* out, T* mean, T* rstd) {
  const int width = shape.width;
  ForEachTile(shape.rows, kTileRows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      const T* x = in + static_cast<int64_t>(row) * width;
      T* y = out + static_cast<int64_t>(row) * width;
      T sum = 0;
      for (int i = 0; i < width; ++i) sum += x[i];
      mean[row] = sum / width;
      // The variance takes a second pass: mean(x^2) - mean(x)^2 in one pass would lose its digits
      // where the mean is large against the deviation.
      T squares = 0;
      for (int i = 0; i < width; ++i) squares += (x[i] - mean[row]) * (x[i] - mean[row]);
      rstd[row] = 1 / std::sqrt(squares / width + T(1e-5));
      for (int i = 0; i < width; ++i) y[i] = (x[i] - mean[row]) * rstd[row] * weight[i] + bias[i];
    }
  });
}

template <typename T>
void LayerNormBackward(const LayerNormShape& shape, const T* d_out, const T* in, const T* weight,
                       const T* mean, const T* rstd, T* d_in, T* d_weight, T* d_bias) {
  const int width = shape.width;
  // Sums over rows are made by tiles of columns, each of which goes through all rows in order.
  // Tiles of rows would write the same elements.
  ForEachTile(width, kTileColumns, [&](int begin, int end) {
    std::fill(d_weight + begin, d_weight + end, T{0});
    std::fill(d_bias + begin, d_bias + end, T{0});
    for (int row = 0; row < shape.rows; ++row) {
      const T* x = in + static_cast<int64_t>(row) * width;
      const T* g = d_out + static_cast<int64_t>(row) * width;
      for (int i = begin; i < end; ++i) {
        d_weight[i] += g[i] * ((x[i] - mean[row]) * rstd[row]);
        d_bias[i] += g[i];
      }
    }
  });
  // Sums over columns are made by tiles of rows, so they need a second loop: no tile may write what
  // another does.
  ForEachTile(shape.rows, kTileRows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      const T* x = in + static_cast<int64_t>(row) * width;
      const T* g = d_out + static_cast<int64_t>(row) * width;
      T* d_x = d_in + static_cast<int64_t>(row) * width;
      // mean(g) and mean(g * n) of the row come first; each element of d_in depends on both.
      T sum = 0;
      T sum_normal = 0;
      for (int i = 0; i < width; ++i) {
        const T scaled = g[i] * weight[i];
        sum += scaled;
        sum_normal += scaled * ((x[i] - mean[row]) * rstd[row]);
      }
      const T mean_scaled = sum / width;
      const T mean_normal = sum_normal / width;
      for (int i = 0; i < width; ++i) {
        const T normal = (x[i] - mean[row]) * rstd[row];
        d_x[i] += rstd[row] * (g[i] * weight[i] - mean_scaled - normal * mean_normal);
      }
    }
  });
}

template void LayerNormForward(const LayerNormShape&, const float*, const float*, const float*,
                               float*, float*, float*);
template void LayerNormForward(const LayerNormShape&, const double*, const double*, const double*,
                               double*, double*, double*);
template void LayerNormBackward(const LayerNormShape&, const float*, const float*, const float*,
                                const float*, const float*, float*, float*, float*);
template void LayerNormBackward(const LayerNormShape&, const double*, const double*, const double*,
                                const double*, const double*, double*, double*, double*);

}  // namespace ballast::worker::cpu
