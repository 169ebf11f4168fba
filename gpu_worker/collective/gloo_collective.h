// Collectives over Gloo's TCP transport. Every pair of ranks has a connection, every rank sends
// each piece directly to its destination, and sums are taken locally in order of rank.
#ifndef BALLAST_GPU_WORKER_COLLECTIVE_GLOO_COLLECTIVE_H_
#define BALLAST_GPU_WORKER_COLLECTIVE_GLOO_COLLECTIVE_H_

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "gpu_worker/collective/collective.h"

namespace gloo::rendezvous {
class Store;
}

namespace ballast::worker {

struct GlooOptions {
  int rank = 0;
  int world_size = 1;
  std::string host = "127.0.0.1";  // This rank's own address, which the other ranks can reach.
  std::chrono::milliseconds connect_timeout{60000};  // For connecting to all ranks.
  std::chrono::milliseconds timeout{60000};          // For each operation.
};

// Connects to all other ranks, which must do the same with the same store. When it returns, no rank
// needs the store.
absl::StatusOr<std::unique_ptr<Collective>> ConnectGloo(const GlooOptions& options,
                                                        gloo::rendezvous::Store& store);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_COLLECTIVE_GLOO_COLLECTIVE_H_
