// Matrix products by BLAS, row-major, on the calling thread alone. The layers cut parallel work
// into fixed tiles, so that results do not depend on the number of threads.
#ifndef BALLAST_GPU_WORKER_CPU_GEMM_H_
#define BALLAST_GPU_WORKER_CPU_GEMM_H_

namespace ballast::worker::cpu {

enum class Transpose { kNo, kYes };

// A matrix in memory: element (i, j) is data[i * stride + j].
template <typename T>
struct Matrix {
  T* data;
  int stride;
};

// c = alpha * op(a) * op(b) + beta * c, where op(a) is rows x inner, op(b) inner x columns.
template <typename T>
struct Product {
  int rows;
  int columns;
  int inner;
  T alpha = 1;
  T beta = 0;
  Transpose transpose_a = Transpose::kNo;
  Transpose transpose_b = Transpose::kNo;
};

void Gemm(const Product<float>& product, Matrix<const float> a, Matrix<const float> b,
          Matrix<float> c);
void Gemm(const Product<double>& product, Matrix<const double> a, Matrix<const double> b,
          Matrix<double> c);

}  // namespace ballast::worker::cpu

#endif  // BALLAST_GPU_WORKER_CPU_GEMM_H_
