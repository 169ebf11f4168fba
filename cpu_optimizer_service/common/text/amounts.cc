#include "cpu_optimizer_service/common/text/amounts.h"

#include <charconv>
#include <cstdio>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace ballast {

std::string FormatBytes(int64_t bytes) {
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes);
  int unit = -1;
  while (value >= 1024 && unit < 5) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f %s", value, kUnits[unit]);
  return text;
}

absl::StatusOr<int64_t> ParseBytes(absl::string_view text) {
  // "B" ends the others too, so it comes last.
  constexpr struct {
    const char* suffix;
    double bytes;
  } kUnits[] = {{"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}, {"B", 1}};
  for (const auto& unit : kUnits) {
    absl::string_view number = text;
    if (!absl::ConsumeSuffix(&number, unit.suffix)) continue;
    double value = 0;
    // Written so that NaN is refused. Sums of a few sizes below 2^60 fit into an int64_t.
    if (!absl::SimpleAtod(number, &value) || !(value * unit.bytes >= 1) ||
        !(value * unit.bytes < 0x1p60)) {
      break;
    }
    return static_cast<int64_t>(value * unit.bytes);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("bad value '", text, "'; give a number with its unit, such as 20GiB"));
}

std::string FormatExactly(double value) {
  // The longest double has 24 characters, such as -2.2250738585072014e-308.
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, end);
}

std::string Counted(int64_t count, absl::string_view noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

}  // namespace ballast
