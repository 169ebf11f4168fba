// An array with a guard before and behind it, at any alignment, for tests of code that writes to
// memory.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_KERNELS_GUARDED_ARRAY_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_KERNELS_GUARDED_ARRAY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "hwy/aligned_allocator.h"

namespace ballast {

class GuardedArray {
 public:
  // `shift` elements beyond a 128-byte boundary. Every byte starts as poison.
  GuardedArray(DType dtype, int64_t elements, int64_t shift)
      : dtype_(dtype),
        begin_(kGuardBytes + shift * SizeBytes(dtype)),
        end_(begin_ + elements * SizeBytes(dtype)),
        bytes_(hwy::AllocateAligned<unsigned char>(static_cast<size_t>(end_ + kGuardBytes))) {
    std::memset(bytes_.get(), kPoison, static_cast<size_t>(end_ + kGuardBytes));
  }

  unsigned char* data() { return bytes_.get() + begin_; }
  const unsigned char* data() const { return bytes_.get() + begin_; }
  float* floats() { return reinterpret_cast<float*>(data()); }
  int64_t elements() const { return (end_ - begin_) / SizeBytes(dtype_); }
  DType dtype() const { return dtype_; }

  float Get(int64_t i) const { return LoadElement(data(), dtype_, i); }
  void Set(int64_t i, float value) { StoreElement(data(), dtype_, i, value); }

  bool GuardsAreWhole() const {
    const auto is_poison = [](unsigned char byte) { return byte == kPoison; };
    return std::all_of(bytes_.get(), bytes_.get() + begin_, is_poison) &&
           std::all_of(bytes_.get() + end_, bytes_.get() + end_ + kGuardBytes, is_poison);
  }

 private:
  static constexpr int64_t kGuardBytes = 128;
  static constexpr unsigned char kPoison = 0xa5;

  DType dtype_;
  int64_t begin_;
  int64_t end_;
  hwy::AlignedFreeUniquePtr<unsigned char[]> bytes_;
};

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_KERNELS_GUARDED_ARRAY_H_
