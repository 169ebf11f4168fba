#include "gpu_worker/cpu/matmul.h"

#include <algorithm>
#include <cstdint>

#include "gpu_worker/cpu/gemm.h"
#include "gpu_worker/cpu/parallel.h"

namespace ballast::worker::cpu {
namespace {

constexpr int kMatmulRows = 128;  // Large enough for BLAS to reach its speed.

}  // namespace

template <typename T>
void MatmulForward(const MatmulShape& shape, const T* in, const T* weight, const T* bias, T* out) {
  ForEachTile(shape.rows, kMatmulRows, [&](int begin, int end) {
    T* tile = out + static_cast<int64_t>(begin) * shape.out;
    // The bias is put into the result first, and BLAS adds the product to it (beta = 1). Without a
    // bias beta is 0, and BLAS does not read what is there.
    if (bias != nullptr) {
      for (int row = 0; row < end - begin; ++row) {
        std::copy(bias, bias + shape.out, tile + static_cast<int64_t>(row) * shape.out);
      }
    }
    Gemm(Product<T>{.rows = end - begin,
                    .columns = shape.out,
                    .inner = shape.in,
                    .beta = bias != nullptr ? T{1} : T{0},
                    .transpose_b = Transpose::kYes},
         {in + static_cast<int64_t>(begin) * shape.in, shape.in}, {weight, shape.in},
         {tile, shape.out});
  });
}

template <typename T>
void MatmulBackward(const MatmulShape& shape, const T* d_out, const T* in, const T* weight, T* d_in,
                    T* d_weight, T* d_bias) {
  // d_in is cut into tiles of rows; below, d_weight and d_bias into tiles of outputs. In both a
  // tile has the whole of the inner sum, so the tiles cut no sum.
  ForEachTile(shape.rows, kMatmulRows, [&](int begin, int end) {
    Gemm(Product<T>{.rows = end - begin, .columns = shape.in, .inner = shape.out},
         {d_out + static_cast<int64_t>(begin) * shape.out, shape.out}, {weight, shape.in},
         {d_in + static_cast<int64_t>(begin) * shape.in, shape.in});
  });
  ForEachTile(shape.out, kMatmulRows, [&](int begin, int end) {
    Gemm(Product<T>{.rows = end - begin,
                    .columns = shape.in,
                    .inner = shape.rows,
                    .transpose_a = Transpose::kYes},
         {d_out + begin, shape.out}, {in, shape.in},
         {d_weight + static_cast<int64_t>(begin) * shape.in, shape.in});
    if (d_bias == nullptr) return;
    std::fill(d_bias + begin, d_bias + end, T{0});
    // The loop goes through the rows in order, so the sum of a column has one order.
    for (int row = 0; row < shape.rows; ++row) {
      const T* gradient = d_out + static_cast<int64_t>(row) * shape.out;
      for (int o = begin; o < end; ++o) d_bias[o] += gradient[o];
    }
  });
}

template void MatmulForward(const MatmulShape&, const float*, const float*, const float*, float*);
template void MatmulForward(const MatmulShape&, const double*, const double*, const double*,
                            double*);
template void MatmulBackward(const MatmulShape&, const float*, const float*, const float*, float*,
                             float*, float*);
template void MatmulBackward(const MatmulShape&, const double*, const double*, const double*,
                             double*, double*, double*);

}  // namespace ballast::worker::cpu
