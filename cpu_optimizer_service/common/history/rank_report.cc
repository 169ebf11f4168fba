#include "cpu_optimizer_service/common/history/rank_report.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/printable.h"

namespace ballast {

absl::Status CheckNumberName(absl::string_view name) {
  const bool good = std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '/' ||
           c == '-';
  });
  if (good && !name.empty() && name.size() <= kMostNumberNameBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "a number of a step has the invalid name '", Printable(name.substr(0, 80)),
      "'; expected 1 to ", kMostNumberNameBytes, " letters, digits, '.', '_', '/' and '-'"));
}

absl::Status CheckReport(const RankReport& report) {
  if (report.numbers.size() > kMostNumbers) {
    return absl::InvalidArgumentError(absl::StrCat("a step has ", report.numbers.size(),
                                                   " numbers; expected at most ", kMostNumbers));
  }
  for (const auto& [name, value] : report.numbers) {
    BALLAST_RETURN_IF_ERROR(CheckNumberName(name));
  }
  return absl::OkStatus();
}

}  // namespace ballast
