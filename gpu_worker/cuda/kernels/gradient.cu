#include "gpu_worker/cuda/kernels/gradient.h"
#include "gpu_worker/cuda/numeric.cuh"

namespace ballast::worker::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kPack = 4;

// Calls body.operator()<kCount>(begin) for this thread's elements: all at once, or one by one at
// the end of the array, or all along it if it does not lie so that packs can be loaded.
template <typename Body>
__device__ __forceinline__ void ForMyElements(int64_t elements, bool packs, const Body& body) {
  const int64_t begin = ThreadOfGrid() * kPack;
  if (packs && begin + kPack <= elements) {
    body.template operator()<kPack>(begin);
    return;
  }
  for (int64_t i = begin; i < begin + kPack && i < elements; ++i) {
    body.template operator()<1>(i);
  }
}

struct Round {
  const float* from;
  void* to;
  DType dtype;

  template <int kCount>
  __device__ __forceinline__ void operator()(int64_t begin) const {
    StoreWire<kCount>(to, dtype, begin, LoadFloats<kCount>(from + begin));
  }
};

// All ones in the exponent, once rounded.
__device__ __forceinline__ bool IsNonFinite(float value, DType dtype) {
  constexpr uint32_t kExponent = 0x7f800000u;
  if (dtype == DType::kFloat16) return (ToFloat16(value) & 0x7c00u) == 0x7c00u;
  if (dtype == DType::kBFloat16) value = FromBFloat16(ToBFloat16(value));
  return (__float_as_uint(value) & kExponent) == kExponent;
}

struct Find {
  const float* gradient;
  DType dtype;
  uint64_t offset;
  uint64_t* first;

  template <int kCount>
  __device__ __forceinline__ void operator()(int64_t begin) const {
    const auto values = LoadFloats<kCount>(gradient + begin);
    int found = kCount;
#pragma unroll
    for (int i = kCount - 1; i >= 0; --i) {
      if (IsNonFinite(values.x[i], dtype)) found = i;
    }
    if (found == kCount) return;
    static_assert(sizeof(uint64_t) == sizeof(unsigned long long));
    atomicMin(reinterpret_cast<unsigned long long*>(first),
              static_cast<unsigned long long>(offset + begin + found));
  }
};

template <typename Body>
__global__ void __launch_bounds__(kThreads)
    ElementsKernel(int64_t elements, bool packs, Body body) {
  ForMyElements(elements, packs, body);
}

template <typename Body>
absl::Status Run(DeviceStream& stream, absl::string_view name, int64_t elements, bool packs,
                 const Body& body) {
  return Launch(stream, name, GridFor((elements + kPack - 1) / kPack, kThreads),
                &ElementsKernel<Body>, elements, packs, body);
}

}  // namespace

absl::Status RoundGradient(DeviceStream& stream, int64_t elements, const float* from, DType dtype,
                           std::byte* to) {
  const bool packs = HoldsPacks(from, kPack, 4) && HoldsPacks(to, kPack, SizeBytes(dtype));
  return Run(stream, "round gradient", elements, packs, Round{from, to, dtype});
}

absl::Status FindNonFinite(DeviceStream& stream, int64_t elements, const float* gradient,
                           DType dtype, uint64_t offset, uint64_t* first) {
  return Run(stream, "find non-finite", elements, HoldsPacks(gradient, kPack, 4),
             Find{gradient, dtype, offset, first});
}

}  // namespace ballast::worker::cuda
