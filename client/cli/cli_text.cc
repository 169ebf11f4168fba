#include "client/cli/cli_text.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/text/printable.h"

namespace ballast::client::cli {

void Table::Add(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  // Escaped before widths are measured: it makes cells longer.
  for (std::string& cell : cells) cell = Printable(cell);
  rows_.push_back(std::move(cells));
}

std::string Table::ToString() const {
  std::vector<size_t> widths;
  for (size_t c = 0; c < columns_.size(); ++c) {
    size_t width = columns_[c].title.size();
    // Widths are in bytes, so columns are straight only where names are ASCII.
    for (const auto& row : rows_) width = std::max(width, row[c].size());
    widths.push_back(width);
  }
  std::string text;
  const auto add_line = [&](auto&& cell) {
    std::string line;
    for (size_t c = 0; c < columns_.size(); ++c) {
      const std::string& value = cell(c);
      const std::string space(widths[c] - value.size(), ' ');
      const bool right = columns_[c].align == Align::kRight;
      absl::StrAppend(&line, c == 0 ? "" : "  ", right ? space : "", value, right ? "" : space);
    }
    absl::StrAppend(&text, absl::StripTrailingAsciiWhitespace(line), "\n");
  };
  add_line([&](size_t c) -> const std::string& { return columns_[c].title; });
  for (const auto& row : rows_) {
    add_line([&](size_t c) -> const std::string& { return row[c]; });
  }
  return text;
}

std::string FormatField(const std::string& name, const std::string& value) {
  return absl::StrFormat("%-14s%s\n", name, Printable(value));
}

std::string FormatCount(int64_t count) {
  std::string digits = absl::StrCat(count);
  const size_t first = digits[0] == '-' ? 1 : 0;
  for (size_t at = digits.size(); at > first + 3; at -= 3) digits.insert(at - 3, 1, ',');
  return digits;
}

std::string FormatNumber(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return absl::StrFormat("%.6g", value);
}

std::string FormatNames(const std::string& title, absl::Span<const std::string> names) {
  std::string text;
  std::string line = absl::StrCat(title, ":");
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string word =
        absl::StrCat(" ", Printable(names[i]), i + 1 < names.size() ? "," : "");
    if (line.size() + word.size() > kTextWidth) {
      absl::StrAppend(&text, line, "\n");
      line = "   ";
    }
    line += word;
  }
  return absl::StrCat(text, line, "\n");
}

std::string FormatShape(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// The first bucket begins at 10^-12 (PlaneSummary in state.proto).
int MagnitudeExponent(size_t bucket) { return static_cast<int>(bucket) - 12; }

std::string FormatMagnitudes(absl::Span<const int64_t> counts) {
  constexpr int64_t kBarWidth = 40;
  size_t first = counts.size();
  size_t last = 0;
  int64_t most = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0) continue;
    first = std::min(first, i);
    last = i;
    most = std::max(most, counts[i]);
  }
  std::string text;
  for (size_t i = first; i <= last && i < counts.size(); ++i) {
    const int exponent = MagnitudeExponent(i);
    // The first and the last decade also count everything beyond them.
    const std::string from = i == 0 ? "0" : absl::StrFormat("1e%+03d", exponent);
    const std::string to =
        i + 1 == counts.size() ? "inf" : absl::StrFormat("1e%+03d", exponent + 1);
    // Rounded up: a decade with a single element still shows one.
    const auto bar = static_cast<int64_t>(
        std::ceil(static_cast<double>(counts[i]) / static_cast<double>(most) * kBarWidth));
    const std::string line = absl::StrFormat("    %5s .. %-5s %15s  %s", from, to,
                                             FormatCount(counts[i]), std::string(bar, '#'));
    absl::StrAppend(&text, absl::StripTrailingAsciiWhitespace(line), "\n");
  }
  return text;
}

std::string RankRanges(const std::vector<int>& ranks) {
  std::vector<std::string> ranges;
  // The range from i on ends before `next`.
  for (size_t i = 0, next; i < ranks.size(); i = next) {
    next = i + 1;
    while (next < ranks.size() && ranks[next] == ranks[next - 1] + 1) ++next;
    ranges.push_back(next == i + 1 ? absl::StrCat(ranks[i])
                                   : absl::StrCat(ranks[i], "-", ranks[next - 1]));
  }
  constexpr size_t kRanksNamed = 8;
  if (ranges.size() <= kRanksNamed) return absl::StrJoin(ranges, ", ");
  return absl::StrCat(absl::StrJoin(ranges.begin(), ranges.begin() + kRanksNamed, ", "), ", ...");
}

}  // namespace ballast::client::cli
