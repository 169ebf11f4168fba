#include "cpu_optimizer_service/common/norm/exact_sum.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>

#include "cpu_optimizer_service/common/check.h"

namespace ballast {
namespace {

constexpr int kMantissaBits = 52;                // Of a double, without the leading one.
constexpr int kExponentOfBit = 1023 + 52 - 298;  // A double's exponent whose last bit is bit 0.
constexpr int kNonFiniteExponent = 2047;
constexpr int kLargestExponent = 1023 + 264;

}  // namespace

void ExactSum::Add(absl::Span<const double> values) {
  // Neighbours are of similar magnitude. So most of them are added in 128 bits: 2^34 mantissas of
  // 53 bits, shifted by up to kReach.
  constexpr int kReach = 40;
  unsigned __int128 window = 0;
  int begin = 0;  // The exponent of its lowest bit.
  for (const double value : values) {
    const auto bits = std::bit_cast<uint64_t>(value);
    // Without the sign, which a NaN may have.
    const auto exponent = static_cast<int>(bits >> kMantissaBits) & kNonFiniteExponent;
    if (exponent == 0) continue;  // Zero: no sum is denormal.
    if (exponent < begin || exponent > begin + kReach) {
      AddAt(begin - kExponentOfBit, window);
      window = 0;
      if (exponent == kNonFiniteExponent) {
        words_.back() |= std::isnan(value) ? kNan : kInfinity;
        continue;
      }
      Check(exponent <= kLargestExponent, "a sum of 256 squares is added");
      begin = exponent - kReach / 2;
    }
    const uint64_t mantissa =
        (bits & ((uint64_t{1} << kMantissaBits) - 1)) | (uint64_t{1} << kMantissaBits);
    window += static_cast<unsigned __int128>(mantissa) << (exponent - begin);
  }
  AddAt(begin - kExponentOfBit, window);
}

void ExactSum::AddAt(int bit, unsigned __int128 value) {
  if (value == 0) return;
  if (bit < 0) {  // What is below the lowest bit is zero.
    value >>= -bit;
    bit = 0;
  }
  const int shift = bit % 64;
  const unsigned __int128 low = value << shift;
  const std::array<uint64_t, 3> parts = {
      static_cast<uint64_t>(low), static_cast<uint64_t>(low >> 64),
      shift == 0 ? uint64_t{0} : static_cast<uint64_t>(value >> (128 - shift))};
  uint64_t carry = 0;
  const size_t first = bit / 64;
  for (size_t i = 0; i < parts.size() || carry != 0; ++i) {
    const unsigned __int128 sum = static_cast<unsigned __int128>(words_[first + i]) +
                                  (i < parts.size() ? parts[i] : 0) + carry;
    words_[first + i] = static_cast<uint64_t>(sum);
    carry = static_cast<uint64_t>(sum >> 64);
  }
}

void ExactSum::Add(const ExactSum& other) {
  const uint64_t not_finite = (words_.back() | other.words_.back()) & (kInfinity | kNan);
  unsigned __int128 sum = 0;
  for (size_t i = 0; i < words_.size(); ++i) {
    sum += words_[i];
    sum += other.words_[i];
    words_[i] = static_cast<uint64_t>(sum);
    sum >>= 64;
  }
  words_.back() = (words_.back() & ~(kInfinity | kNan)) | not_finite;
}

double ExactSum::Rounded() const {
  if ((words_.back() & kNan) != 0) return std::numeric_limits<double>::quiet_NaN();
  if ((words_.back() & kInfinity) != 0) return std::numeric_limits<double>::infinity();
  int top = static_cast<int>(words_.size()) - 1;
  while (top >= 0 && words_[top] == 0) --top;
  if (top < 0) return 0;
  // The highest 64 bits, and whether any below them is set.
  const int leading_zeros = std::countl_zero(words_[top]);
  uint64_t high = words_[top] << leading_zeros;
  bool is_more = false;
  if (top > 0) {
    if (leading_zeros > 0) high |= words_[top - 1] >> (64 - leading_zeros);
    is_more = (words_[top - 1] << leading_zeros) != 0;
    for (int i = 0; i < top - 1; ++i) is_more |= words_[i] != 0;
  }
  constexpr int kDropped = 64 - (kMantissaBits + 1);
  constexpr uint64_t kHalf = uint64_t{1} << (kDropped - 1);
  const uint64_t dropped = high & (2 * kHalf - 1);
  uint64_t mantissa = high >> kDropped;
  const bool is_odd = mantissa % 2 == 1;
  if (dropped > kHalf || (dropped == kHalf && (is_more || is_odd))) ++mantissa;
  // The leading one counts as one in the exponent, and so does a carry out of the mantissa.
  const uint64_t exponent = 64 * top + 63 - leading_zeros + kExponentOfBit - kMantissaBits - 1;
  return std::bit_cast<double>((exponent << kMantissaBits) + mantissa);
}

std::vector<double> Rounded(absl::Span<const ExactSum> sums) {
  std::vector<double> rounded;
  rounded.reserve(sums.size());
  for (const ExactSum& sum : sums) rounded.push_back(sum.Rounded());
  return rounded;
}

}  // namespace ballast
