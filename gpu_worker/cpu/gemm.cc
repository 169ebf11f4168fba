#include "gpu_worker/cpu/gemm.h"

#include <cblas.h>

namespace ballast::worker::cpu {
namespace {

CBLAS_TRANSPOSE Convert(Transpose transpose) {
  return transpose == Transpose::kYes ? CblasTrans : CblasNoTrans;
}

// OpenBLAS would otherwise split large products by the number of cores.
void UseCallingThreadOnly() {
  // The static local is made once, whichever of the threads comes first. The setting is for the
  // whole process, which has no other user of BLAS.
  static const bool done = [] {
    openblas_set_num_threads(1);
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace

void Gemm(const Product<float>& product, Matrix<const float> a, Matrix<const float> b,
          Matrix<float> c) {
  UseCallingThreadOnly();
  cblas_sgemm(CblasRowMajor, Convert(product.transpose_a), Convert(product.transpose_b),
              product.rows, product.columns, product.inner, product.alpha, a.data, a.stride, b.data,
              b.stride, product.beta, c.data, c.stride);
}

void Gemm(const Product<double>& product, Matrix<const double> a, Matrix<const double> b,
          Matrix<double> c) {
  UseCallingThreadOnly();
  cblas_dgemm(CblasRowMajor, Convert(product.transpose_a), Convert(product.transpose_b),
              product.rows, product.columns, product.inner, product.alpha, a.data, a.stride, b.data,
              b.stride, product.beta, c.data, c.stride);
}

}  // namespace ballast::worker::cpu
