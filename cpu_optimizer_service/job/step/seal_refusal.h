// The refusal of a rank's seal.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_SEAL_REFUSAL_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_SEAL_REFUSAL_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ballast {

inline constexpr size_t kMissingNames = 16;    // Parameters that one entry names.
inline constexpr size_t kMissingEntries = 16;  // Entries of a refusal: the first micro-steps.

struct MissingContribution {
  int rank = 0;
  uint32_t micro_step = 0;
  std::vector<std::string> parameters;  // The first kMissingNames,
  int64_t more_parameters = 0;          // The number of others.
};

// Why a seal was refused. status is FAILED_PRECONDITION, and its message names the first of
// `missing`.
struct SealRefusal {
  absl::Status status;
  std::vector<MissingContribution> missing;  // At most kMissingEntries.
  uint32_t attempt = 0;                      // Whose seal it was.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_SEAL_REFUSAL_H_
