// Names of checkpoints: step-STEP.GENERATION in the job's folder. A further number follows if
// another job used the same numbers.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_CHECKPOINT_NAME_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_CHECKPOINT_NAME_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ballast {

// "step-1000.2"; with `number` above 1, "step-1000.2.NUMBER".
std::string VersionName(uint64_t step, uint64_t generation, int number = 1);
bool IsVersionName(absl::string_view name);
// "step-1000" means the newest checkpoint of that step. nullopt: another form.
std::optional<uint64_t> StepNamed(absl::string_view name);

// A name of checkpoints under a service's --checkpoint-dir: "gpt" for the newest,
// "gpt/step-1000.2", or "gpt/step-1000" for the newest of that step.
bool IsCheckpointName(absl::string_view name);
// INVALID_ARGUMENT unless it is such a name, or an absolute path.
absl::Status CheckCheckpointDirectory(absl::string_view directory);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_CHECKPOINT_NAME_H_
