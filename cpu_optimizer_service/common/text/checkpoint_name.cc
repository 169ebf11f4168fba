#include "cpu_optimizer_service/common/text/checkpoint_name.h"

#include <algorithm>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/job_spec.h"

namespace ballast {
namespace {

// 2^64 - 1, the largest number of a step or generation, has so many digits.
constexpr size_t kMostDigits = 20;

}  // namespace

std::string VersionName(uint64_t step, uint64_t generation, int number) {
  std::string name = absl::StrCat("step-", step, ".", generation);
  if (number > 1) absl::StrAppend(&name, ".", number);
  return name;
}

bool IsVersionName(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, "step-")) return false;
  const std::vector<absl::string_view> numbers = absl::StrSplit(name, '.');
  return (numbers.size() == 2 || numbers.size() == 3) &&
         std::all_of(numbers.begin(), numbers.end(), [](absl::string_view number) {
           return !number.empty() && number.size() <= kMostDigits &&
                  std::all_of(number.begin(), number.end(), absl::ascii_isdigit);
         });
}

std::optional<uint64_t> StepNamed(absl::string_view name) {
  uint64_t step = 0;
  // SimpleAtoi alone would also take blanks and a sign, so the digits are checked first. It still
  // refuses what is above 2^64 - 1.
  if (!absl::ConsumePrefix(&name, "step-") || name.empty() ||
      !std::all_of(name.begin(), name.end(), absl::ascii_isdigit) ||
      !absl::SimpleAtoi(name, &step)) {
    return std::nullopt;
  }
  return step;
}

bool IsCheckpointName(absl::string_view name) {
  // The name becomes a path under --checkpoint-dir, also one that a remote caller sent. Neither
  // part can be ".." or hold another '/', so it never leads out of that directory.
  const size_t slash = name.find('/');
  return IsJobName(name.substr(0, slash)) &&
         (slash == name.npos || IsVersionName(name.substr(slash + 1)) ||
          StepNamed(name.substr(slash + 1)).has_value());
}

absl::Status CheckCheckpointDirectory(absl::string_view directory) {
  // A relative path would be misunderstood: a service's current directory is not the user's.
  if (absl::StartsWith(directory, "/") || IsCheckpointName(directory)) return absl::OkStatus();
  // What a caller sent stands in the answer and may stand in the log: a part of it, printable.
  const std::string shown = absl::Utf8SafeCEscape(directory.substr(0, 128));
  // A name with this part in it was meant as a checkpoint, and is mistyped.
  if (const size_t step = shown.find("/step-"); step != std::string::npos) {
    const std::string name = shown.substr(0, step);
    return absl::InvalidArgumentError(absl::StrCat(
        "'", shown, "' is no checkpoint; expected ", name, " or ", name, "/step-STEP or ", name,
        "/step-STEP.GENERATION; `ballast checkpoints ", name, "` lists them"));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "'", shown, "' is neither a name under the service's --checkpoint-dir (1 to 128 letters, ",
      "digits, '.', '_' or '-', beginning without '.') nor an absolute path on its host"));
}

}  // namespace ballast
