// A sum of sums of squares without rounding, as an integer in fixed point. So it has no order:
// however the values are split, and whoever adds which, the result has the same bits.
//
//   value = words * 2^-298, the lowest word first
//
// 2^-298 is the square of the smallest fp32 value. 640 bits hold 2^34 sums of 256 squares.
// The method: U. Kulisch, "Computer Arithmetic and Validity", complete accumulators.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_NORM_EXACT_SUM_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_NORM_EXACT_SUM_H_

#include <array>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace ballast {

class ExactSum {
 public:
  // Each is 0 or more, and a multiple of 2^-298 below 2^265, such as
  // BlockSumOfSquaresReference; or not finite.
  void Add(absl::Span<const double> values);
  void Add(double value) { Add(absl::MakeConstSpan(&value, 1)); }
  void Add(const ExactSum& other);
  bool finite() const { return (words_.back() & (kInfinity | kNan)) == 0; }
  // To nearest, ties to even. NaN if a value was; otherwise infinity if a value was.
  double Rounded() const;

  // All of it, to send.
  using Words = std::array<uint64_t, 10>;
  static ExactSum FromWords(const Words& words) {
    ExactSum sum;
    sum.words_ = words;
    return sum;
  }
  const Words& words() const { return words_; }

 private:
  // Above the bits of any sum of finite values.
  static constexpr uint64_t kInfinity = uint64_t{1} << 62;
  static constexpr uint64_t kNan = uint64_t{1} << 63;

  void AddAt(int bit, unsigned __int128 value);

  Words words_ = {};
};

std::vector<double> Rounded(absl::Span<const ExactSum> sums);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_NORM_EXACT_SUM_H_
