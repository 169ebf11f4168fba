// Text without control characters for terminals and logs.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_PRINTABLE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_PRINTABLE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace ballast {

// Every control character, including C1 and bytes that are not UTF-8, becomes \xHH. Newlines too,
// unless they are kept.
enum class Newlines : uint8_t { kEscape, kKeep };
std::string Printable(absl::string_view text, Newlines newlines = Newlines::kEscape);

// One printable line. Beyond about `most_bytes` it is truncated and ends with "...". The time
// depends on `most_bytes`, not on the text.
std::string OneLine(absl::string_view text, size_t most_bytes);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_PRINTABLE_H_
