// What checkpoints are called: step-STEP.GENERATION in the folder of their job, with a number behind
// it where another job had these numbers.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_CHECKPOINT_NAME_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_CHECKPOINT_NAME_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace ballast {

// "step-1000.2"; of `number` above 1, "step-1000.2.NUMBER".
std::string VersionName(uint64_t step, uint64_t generation, int number = 1);
bool IsVersionName(absl::string_view name);
// "step-1000": the newest checkpoint of that step is meant. nullopt: another form.
std::optional<uint64_t> StepNamed(absl::string_view name);

// What names checkpoints under a service's --checkpoint-dir: "gpt", of which the newest is meant, or
// "gpt/step-1000.2", or "gpt/step-1000", the newest of that step.
bool IsCheckpointName(absl::string_view name);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_CHECKPOINT_NAME_H_
