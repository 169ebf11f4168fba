// Whether all ranks were started with the same settings. If message sizes differ between ranks, no
// error can stop them later: Gloo aborts in its own thread.
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

// The maximal number of settings: a message has the same size in every version.
inline constexpr int kMaxAgreedSettings = 32;

// FAILED_PRECONDITION, on every rank, with the first rank and the first setting that differ from
// rank 0's. Compares hashes, so a value may be long.
absl::Status CheckAgreement(const std::vector<AgreedSetting>& settings, Collective& collective);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_COLLECTIVE_AGREEMENT_H_
