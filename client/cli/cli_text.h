// Text for people: aligned tables, sizes with units, shapes, histograms.
#ifndef BALLAST_CLIENT_CLI_CLI_TEXT_H_
#define BALLAST_CLIENT_CLI_CLI_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/text/amounts.h"  // FormatBytes, Counted.

namespace ballast::client::cli {

// Columns are as wide as their widest cell and two spaces apart. Numbers are aligned right.
class Table {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void Add(std::vector<std::string> cells);  // As many as there are columns.
  // Each line ends with a newline and without spaces.
  std::string ToString() const;

 private:
  const std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};
inline constexpr Table::Align kRight = Table::Align::kRight;

std::string FormatField(const std::string& name, const std::string& value);  // "name     value\n"
std::string FormatCount(int64_t count);                    // "1234567" as "1,234,567"
std::string FormatNumber(double value);                    // At most six digits; "inf", "nan".
std::string FormatShape(absl::Span<const int64_t> shape);  // "[768, 3072]"; "[]" is a scalar.

// "title: a, b, c", broken after commas so that no line exceeds kTextWidth, except for a single
// longer name. Lines after the first are indented.
inline constexpr size_t kTextWidth = 100;
std::string FormatNames(const std::string& title, absl::Span<const std::string> names);

// One line for each decade from the first to the last non-empty one; empty if all are empty.
// `counts`: PlaneSummary.magnitude_histogram in state.proto.
std::string FormatMagnitudes(absl::Span<const int64_t> counts);
// Decade `bucket` is [10^MagnitudeExponent(bucket), 10^(MagnitudeExponent(bucket) + 1)).
int MagnitudeExponent(size_t bucket);

// Ascending ranks: "0-3, 8".
std::string RankRanges(const std::vector<int>& ranks);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_CLI_TEXT_H_
