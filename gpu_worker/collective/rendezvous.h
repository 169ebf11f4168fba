// How the ranks of a run find each other: rank 0 serves a rendezvous at MASTER_ADDR:MASTER_PORT,
// the others connect to it, and all ranks exchange small values in rounds.
//
//   auto rendezvous = Rendezvous::Open({.rank = rank, .world_size = 4, ...}).value();
//   std::string host = rendezvous->OwnHost().value();                        // A round.
//   std::vector<std::string> all = rendezvous->Exchange(mine).value();       // A round.
//
// It is a service on gRPC, because none of Gloo's stores fits: FileStore needs a shared file
// system, HashStore serves one process, and RedisStore needs a Redis.
//
// Rank 0 refuses a rank of another world size, and a rank number that is taken or out of range; the
// error appears at both ends. A rank that waits for long names the missing ranks on stderr, once.
// Bounded: a thread for each rank, kMaxRounds rounds, values of 1 MiB. No authentication: any host
// that reaches the port may join.
//
// Threads: one call at a time on each rank.
#ifndef BALLAST_GPU_WORKER_COLLECTIVE_RENDEZVOUS_H_
#define BALLAST_GPU_WORKER_COLLECTIVE_RENDEZVOUS_H_

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ballast::worker {

struct RendezvousOptions {
  int rank = 0;
  int world_size = 2;
  std::string host = "127.0.0.1";  // Rank 0 listens there: MASTER_ADDR.
  int port = 0;                    // MASTER_PORT; rank 0 takes a free one if it is 0.
  // For connecting. Of rank 0: from its start to the end of the last round, for all ranks.
  std::chrono::milliseconds timeout{60000};
};

class Rendezvous {
 public:
  static constexpr int kMaxRounds = 16;

  // Serves the rendezvous on rank 0, connects to it on other ranks.
  static absl::StatusOr<std::unique_ptr<Rendezvous>> Open(const RendezvousOptions& options);
  // On rank 0, ends the service for all.
  virtual ~Rendezvous() = default;

  // Every rank's value of this round, by rank, once all ranks have given theirs. DEADLINE_EXCEEDED,
  // with the late ranks and the refused ones; UNAVAILABLE if a rank ends meanwhile.
  virtual absl::StatusOr<std::vector<std::string>> Exchange(const std::string& value) = 0;
  // The address at which the other ranks reach this one. A round: all ranks call it.
  absl::StatusOr<std::string> OwnHost();
  virtual int port() const = 0;

 protected:
  std::string connected_to_;    // Rank 0's address; empty on rank 0.
  std::string connected_from_;  // The address that rank 0 saw; empty on rank 0.
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_COLLECTIVE_RENDEZVOUS_H_
