// A sum of squares of fp32 values without any rounding, as a number of 2^-298.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_GRADIENTS_EXACT_SUM_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_GRADIENTS_EXACT_SUM_H_

#include <array>
#include <cmath>
#include <cstdint>

namespace ballast {

class ExactSum {
 public:
  void AddSquare(float value) {
    int exponent = 0;
    const auto mantissa =
        static_cast<uint64_t>(std::ldexp(std::frexp(std::abs(value), &exponent), 24));
    if (mantissa == 0) return;
    // A denormal's mantissa has zeros below 2^-149.
    AddShifted(mantissa * mantissa, 2 * (exponent - 24) + kLowest);
  }

  // |sum - this| <= 2^-bits of this.
  bool IsNear(double sum, int bits) const {
    ExactSum other;
    if (sum != 0) {
      int exponent = 0;
      const auto mantissa = static_cast<uint64_t>(std::ldexp(std::frexp(sum, &exponent), 53));
      other.AddShifted(mantissa, exponent - 53 + kLowest);
    }
    const bool less = other.IsLess(*this);
    ExactSum scaled;  // The difference times 2^bits.
    const ExactSum difference = less ? Minus(*this, other) : Minus(other, *this);
    for (int i = 0; i < kLimbs; ++i) scaled.AddShifted(difference.limbs_[i], 32 * i + bits);
    return !IsLess(scaled);
  }

 private:
  static constexpr int kLowest = 298;
  static constexpr int kLimbs = 32;  // Of 32 bits, the lowest first: room for any sum times 2^60.

  void AddShifted(uint64_t value, int shift) {
    if (shift < 0) {  // Of zeros.
      value >>= -shift;
      shift = 0;
    }
    unsigned __int128 carry = static_cast<unsigned __int128>(value) << (shift % 32);
    for (int i = shift / 32; carry != 0; ++i) {
      carry += limbs_.at(i);
      limbs_.at(i) = static_cast<uint32_t>(carry);
      carry >>= 32;
    }
  }
  bool IsLess(const ExactSum& other) const {
    for (int i = kLimbs - 1; i >= 0; --i) {
      if (limbs_[i] != other.limbs_[i]) return limbs_[i] < other.limbs_[i];
    }
    return false;
  }
  static ExactSum Minus(const ExactSum& larger, const ExactSum& smaller) {
    ExactSum difference;
    int64_t borrow = 0;
    for (int i = 0; i < kLimbs; ++i) {
      const int64_t limb = int64_t{larger.limbs_[i]} - int64_t{smaller.limbs_[i]} - borrow;
      borrow = limb < 0 ? 1 : 0;
      difference.limbs_[i] = static_cast<uint32_t>(limb + (borrow << 32));
    }
    return difference;
  }

  std::array<uint32_t, kLimbs> limbs_ = {};
};

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_GRADIENTS_EXACT_SUM_H_
