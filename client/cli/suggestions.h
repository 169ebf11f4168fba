// Guesses what somebody meant by a name that is not there.
#ifndef BALLAST_CLIENT_CLI_SUGGESTIONS_H_
#define BALLAST_CLIENT_CLI_SUGGESTIONS_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"

namespace ballast::client::cli {

// Insertions, deletions and replacements of single bytes that make `b` of `a`.
int EditDistance(std::string_view a, std::string_view b);

// At most three of `names`, nearest first: those a few edits away, or that contain `wanted`.
std::vector<std::string> Suggestions(std::string_view wanted, absl::Span<const std::string> names);

// "; did you mean a or b?", or what there is if that is little, or empty.
std::string Suggestion(std::string_view wanted, absl::Span<const std::string> names);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_SUGGESTIONS_H_
