// Whether all ranks were started alike. Ranks whose messages differ in size cannot be stopped with
// an error later: Gloo aborts in a thread of its own.
#ifndef BALLAST_GPU_WORKER_COLLECTIVE_AGREEMENT_H_
#define BALLAST_GPU_WORKER_COLLECTIVE_AGREEMENT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gpu_worker/collective/collective.h"

namespace ballast::worker {

struct AgreedSetting {
  std::string name;  // For the error: the flag.
  std::string value;
};

// At most so many settings: a message has one size in every version.
inline constexpr int kMaxAgreedSettings = 32;

// FAILED_PRECONDITION, on every rank, naming the first rank and the first setting that differ from
// rank 0's. Compares hashes, so a value may be long.
absl::Status CheckAgreement(const std::vector<AgreedSetting>& settings, Collective& collective);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_COLLECTIVE_AGREEMENT_H_
