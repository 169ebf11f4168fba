// Amounts in the form that people read and write.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_AMOUNTS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_AMOUNTS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast {

std::string FormatBytes(int64_t bytes);  // "17 B", "1.50 GiB"
// A number with its unit: B, KiB, MiB, GiB or TiB. INVALID_ARGUMENT.
absl::StatusOr<int64_t> ParseBytes(absl::string_view text);

// Shortest digits that read back the same.
std::string FormatExactly(double value);

// "1 job", "2 jobs": for nouns that take an s.
std::string Counted(int64_t count, absl::string_view noun);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_AMOUNTS_H_
