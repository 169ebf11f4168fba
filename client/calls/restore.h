// After the loss of a host: lets a job's name go on from a checkpoint, in a new job.
#ifndef BALLAST_CLIENT_CALLS_RESTORE_H_
#define BALLAST_CLIENT_CALLS_RESTORE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/v1/state.pb.h"
#include "client/calls/service.h"

namespace ballast::client {

struct Restored {
  uint64_t epoch = 0;                // Of the name. The next job has a higher one.
  v1::SavedCheckpoint checkpoint;    // From which the next job continues.
  std::vector<std::string> ended;    // Services on which the old job can decide nothing any more.
  std::vector<std::string> unknown;  // Those that do not answer, with the reason.
};

// `service` is of a cluster. Ends the recorded job of this name: of those of its services that answer
// each closes its part, and since every decision needs every part, one is enough. Then the name is
// free in a higher epoch: the largest of etcd's revision, the record's epoch and the checkpoints',
// plus one. A part that did not answer learns of it when it reaches etcd, and serves nothing more.
//
// FAILED_PRECONDITION, and nothing changes: the job is whole; it has no checkpoint; or no part
// answers, so the old job may go on deciding. With `force` the caller vouches that those hosts are
// dead. NOT_FOUND: the name has no record. ABORTED: it has changed meanwhile.
absl::StatusOr<Restored> Restore(Service& service, const std::string& job, bool force);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_CALLS_RESTORE_H_
