// Fixes the calling thread's floating-point mode for the life of an object: round to nearest, no
// traps, denormals kept or flushed. So modes left by a caller or library do not affect results.
//
// Arithmetic runs in the chosen mode if its operands come from memory after the constructor and its
// results go to memory before the destructor. The compiler may move other arithmetic out. So put
// the work into a function that is not inlined.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_FLOATING_POINT_MODE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_FLOATING_POINT_MODE_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#error "Say here how this architecture sets rounding and flushing."
#endif

namespace ballast {

enum class Denormals : uint8_t {
  kKeep,
  kFlush,  // Read and written as zero (FTZ and DAZ on x86, FZ on Arm).
};

class ScopedFloatingPointMode {
 public:
  explicit ScopedFloatingPointMode(Denormals denormals) : saved_(Read()) { Write(Bits(denormals)); }
  ~ScopedFloatingPointMode() { Write(saved_); }
  ScopedFloatingPointMode(const ScopedFloatingPointMode&) = delete;
  ScopedFloatingPointMode& operator=(const ScopedFloatingPointMode&) = delete;

 private:
#if defined(__x86_64__)
  using Register = uint32_t;
  static Register Bits(Denormals denormals) {
    constexpr Register kExceptionsMasked = 0x1f80;
    constexpr Register kFlushToZero = 0x8000;
    constexpr Register kDenormalsAreZero = 0x0040;
    return kExceptionsMasked |
           (denormals == Denormals::kFlush ? kFlushToZero | kDenormalsAreZero : 0);
  }
  static Register Read() { return _mm_getcsr(); }
  static void Write(Register bits) {
    asm volatile("" ::: "memory");
    _mm_setcsr(bits);
    asm volatile("" ::: "memory");
  }
#else
  using Register = uint64_t;
  static Register Bits(Denormals denormals) {
    constexpr Register kFlushToZero = uint64_t{1} << 24;
    return denormals == Denormals::kFlush ? kFlushToZero : 0;
  }
  static Register Read() {
    Register bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
  }
  static void Write(Register bits) { asm volatile("msr fpcr, %0" ::"r"(bits) : "memory"); }
#endif

  const Register saved_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_FLOATING_POINT_MODE_H_
