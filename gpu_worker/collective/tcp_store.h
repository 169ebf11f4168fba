// A small key-value store over TCP through which ranks find each other: rank 0 serves it on
// MASTER_PORT, the others connect. Keys are written once; a Get waits for its key.
//
// Bounded: one connection and one thread for each other rank, keys and values of at most 64 KiB,
// at most kMaxKeysPerRank keys a rank. A rank of another world size, or a rank number that is taken
// or out of range, is refused with the reason, at both ends. Who waits long for a rank says so on
// stderr, once.
//
// Threads: one call at a time on each rank.
#ifndef BALLAST_GPU_WORKER_COLLECTIVE_TCP_STORE_H_
#define BALLAST_GPU_WORKER_COLLECTIVE_TCP_STORE_H_

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ballast::worker {

struct TcpStoreOptions {
  int rank = 0;
  int world_size = 1;
  std::string host = "127.0.0.1";            // Rank 0 listens there: MASTER_ADDR.
  int port = 0;                              // MASTER_PORT; rank 0 takes a free one if it is 0.
  std::chrono::milliseconds timeout{60000};  // Of connecting and of each call.
};

class TcpStore {
 public:
  // Serves the store on rank 0, connects to it on other ranks.
  static absl::StatusOr<std::unique_ptr<TcpStore>> Open(const TcpStoreOptions& options);
  // On rank 0, ends the service for all.
  virtual ~TcpStore() = default;

  virtual absl::Status Set(const std::string& key, const std::string& value) = 0;
  // DEADLINE_EXCEEDED if nobody sets the key in time; UNAVAILABLE if a rank ends meanwhile.
  virtual absl::StatusOr<std::string> Get(const std::string& key) = 0;
  virtual int port() const = 0;
  // The address under which the other ranks reach this one: that of its connection to rank 0. On
  // rank 0, waits for all ranks; the error names those that did not come and those that were
  // refused. Others call it too, or rank 0's answer is not there for the ranks of its host.
  virtual absl::StatusOr<std::string> OwnHost() = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_COLLECTIVE_TCP_STORE_H_
