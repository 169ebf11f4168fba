#include "gpu_worker/cpu/gelu.h"

#include "gpu_worker/cpu/exp.h"
#include "gpu_worker/cpu/parallel.h"

namespace ballast::worker::cpu {
namespace {

// That is 64 KiB of fp32 of each array.
constexpr int kTileElements = 16384;
constexpr double kScale = 0.7978845608028654;  // sqrt(2 / pi)
constexpr double kCubic = 0.044715;

}  // namespace

template <typename T>
void GeluForward(int elements, const T* in, T* out, T* tanh_u) {
  ForEachTile(elements, kTileElements, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const T x = in[i];
      const T u = T(kScale) * (x + T(kCubic) * x * x * x);
      const T t = 1 - 2 / (Exp(2 * u) + 1);  // tanh(u); Exp is finite at both ends.
      // It is kept so that backward needs no exponential.
      tanh_u[i] = t;
      out[i] = T(0.5) * x * (1 + t);
    }
  });
}

template <typename T>
void GeluBackward(int elements, const T* d_out, const T* in, const T* tanh_u, T* d_in) {
  ForEachTile(elements, kTileElements, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const T x = in[i];
      const T t = tanh_u[i];
      // This is u', the derivative of u by x.
      const T d_u = T(kScale) * (1 + 3 * T(kCubic) * x * x);
      d_in[i] = d_out[i] * (T(0.5) * (1 + t) + T(0.5) * x * (1 - t * t) * d_u);
    }
  });
}

template void GeluForward(int, const float*, float*, float*);
template void GeluForward(int, const double*, double*, double*);
template void GeluBackward(int, const float*, const float*, const float*, float*);
template void GeluBackward(int, const double*, const double*, const double*, double*);

}  // namespace ballast::worker::cpu
