// Suggests known names for an unknown one.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_SUGGESTIONS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_SUGGESTIONS_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"

namespace ballast {

// The number of insertions, deletions and replacements of single bytes that turn `a` into `b`.
int EditDistance(std::string_view a, std::string_view b);

// At most three of `names`, nearest first: those a few edits away, and those that contain `wanted`.
std::vector<std::string> Suggestions(std::string_view wanted, absl::Span<const std::string> names);

// "; did you mean a or b?". If no name is near: all names if they are few, otherwise their number.
std::string Suggestion(std::string_view wanted, absl::Span<const std::string> names);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_SUGGESTIONS_H_
