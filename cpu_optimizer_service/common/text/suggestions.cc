#include "cpu_optimizer_service/common/text/suggestions.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ballast {

int EditDistance(std::string_view a, std::string_view b) {
  // Levenshtein's distance, row by row: row[j] is the distance from a's first i bytes to b's first
  // j.
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i) + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      // `diagonal` is what row[j] was in the row before; this row has overwritten it.
      const int replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, diagonal + 1, row[j] + 1});
    }
  }
  return row[b.size()];
}

std::vector<std::string> Suggestions(std::string_view wanted, absl::Span<const std::string> names) {
  // A third of the letters may be wrong, and two in a short name.
  const int most_edits = std::max<int>(2, static_cast<int>(wanted.size()) / 3);
  std::vector<std::pair<int, std::string>> near;
  for (const std::string& name : names) {
    const int edits = EditDistance(wanted, name);
    // A name that contains what was typed is near, however long it is: it ranks as one edit away.
    const bool contains = !wanted.empty() && name.find(wanted) != std::string::npos;
    if (edits <= most_edits || contains) near.emplace_back(contains ? 1 : edits, name);
  }
  std::sort(near.begin(), near.end());
  std::vector<std::string> nearest;
  for (size_t i = 0; i < near.size() && i < 3; ++i) nearest.push_back(near[i].second);
  return nearest;
}

std::string Suggestion(std::string_view wanted, absl::Span<const std::string> names) {
  const std::vector<std::string> near = Suggestions(wanted, names);
  if (!near.empty()) return absl::StrCat("; did you mean ", absl::StrJoin(near, " or "), "?");
  if (names.empty()) return "; there are none";
  // About eight names fit into a line. Of more, one shows what names look like here.
  if (names.size() <= 8) return absl::StrCat("; there are ", absl::StrJoin(names, ", "));
  return absl::StrCat("; there are ", names.size(), ", such as ", names.front());
}

}  // namespace ballast
