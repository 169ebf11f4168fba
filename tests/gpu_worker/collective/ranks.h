// Runs every rank of a world as a thread of the test, with the collectives of real workers.
#ifndef BALLAST_TESTS_GPU_WORKER_COLLECTIVE_RANKS_H_
#define BALLAST_TESTS_GPU_WORKER_COLLECTIVE_RANKS_H_

#include <gloo/rendezvous/hash_store.h>
#include <signal.h>

#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "gpu_worker/collective/collective.h"
#include "gpu_worker/collective/gloo_collective.h"
#include "gpu_worker/collective/single_collective.h"

namespace ballast::worker {

enum class Backend { kSingle, kGloo };

// Calls body(collective) on `world_size` threads and waits for all. `timeout` is of each operation,
// not of connecting, which a busy machine may delay.
inline void RunRanks(Backend backend, int world_size, std::chrono::milliseconds timeout,
                     const std::function<void(Collective&)>& body) {
  if (backend == Backend::kSingle) {
    SingleCollective collective;
    body(collective);
    return;
  }
  signal(SIGPIPE, SIG_IGN);  // As ballast-worker does: a lost peer is an error.
  gloo::rendezvous::HashStore store;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.emplace_back([&, rank] {
      const std::unique_ptr<Collective> collective =
          ConnectGloo({.rank = rank, .world_size = world_size, .timeout = timeout}, store).value();
      body(*collective);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

inline void RunRanks(int world_size, const std::function<void(Collective&)>& body) {
  RunRanks(world_size == 1 ? Backend::kSingle : Backend::kGloo, world_size,
           std::chrono::seconds(60), body);
}

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_WORKER_COLLECTIVE_RANKS_H_
