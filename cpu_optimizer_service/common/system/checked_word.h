// Words of memory that outlives this process, each with check bits: a later process detects
// changes. Value and check bits are one word, because one store publishes it.
//
// The low 56 bits are the value. The high 8 are a CRC of the value and of the word's number, so
// that a misplaced word is detected, too. The polynomial is x^8 + x^5 + x^3 + x^2 + x + 1, which
// finds every change of up to three bits in 119 bits (P. Koopman and T. Chakravarty, "Cyclic
// redundancy code polynomial selection for embedded networks", 2004). Here there are 96.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_CHECKED_WORD_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_CHECKED_WORD_H_

#include <array>
#include <cstdint>
#include <optional>

namespace ballast {

inline constexpr int kCheckedValueBits = 56;
inline constexpr uint64_t kCheckedValueMask = (uint64_t{1} << kCheckedValueBits) - 1;

namespace checked_word {

// The CRC of a byte that so many bytes follow.
struct Tables {
  std::array<std::array<uint8_t, 256>, 11> at = {};
  constexpr Tables() {
    for (int byte = 0; byte < 256; ++byte) {
      auto crc = static_cast<uint8_t>(byte);
      for (auto& table : at) {
        for (int bit = 0; bit < 8; ++bit) {
          crc = static_cast<uint8_t>(crc << 1 ^ ((crc & 0x80) != 0 ? 0x2f : 0));
        }
        table[byte] = crc;
      }
    }
  }
};
inline constexpr Tables kTables;

// A CRC without a start value is linear: that of value and number is the XOR of their CRCs.
constexpr uint64_t CheckOf(uint64_t value) {
  uint8_t crc = 0;
  for (int i = 0; i < 7; ++i) crc ^= kTables.at[i][value >> (8 * i) & 0xff];
  return uint64_t{crc} << kCheckedValueBits;
}
constexpr uint64_t CheckOfNumber(uint32_t which) {
  uint8_t crc = 0;
  for (int i = 0; i < 4; ++i) crc ^= kTables.at[7 + i][which >> (8 * i) & 0xff];
  return uint64_t{crc} << kCheckedValueBits;
}

}  // namespace checked_word

// The word of a value below 2^56. With `which` 0 the word of value 0 is 0: zeroed memory.
constexpr uint64_t CheckedWord(uint64_t value, uint32_t which = 0) {
  return value | (checked_word::CheckOf(value) ^ checked_word::CheckOfNumber(which));
}
// nullopt: the word has changed.
constexpr std::optional<uint64_t> ValueOf(uint64_t word, uint32_t which = 0) {
  const uint64_t value = word & kCheckedValueMask;
  if (CheckedWord(value, which) != word) return std::nullopt;
  return value;
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_CHECKED_WORD_H_
