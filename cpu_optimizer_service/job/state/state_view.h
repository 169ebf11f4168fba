// A job's committed state for readers. A reader in place prevents changes meanwhile
// (Gate::StartReading); a snapshot pins it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_STATE_VIEW_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_STATE_VIEW_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/job/core/job_core.h"
#include "cpu_optimizer_service/job/core/job_memory.h"
#include "cpu_optimizer_service/job/core/job_record.h"
#include "cpu_optimizer_service/state/checkpoint_index.h"
#include "cpu_optimizer_service/state/snapshot.h"

namespace ballast {

class StateView {
 public:
  // All outlive it.
  StateView(const JobCore& core, const JobMemory& memory) : core_(core), memory_(memory) {}

  // FAILED_PRECONDITION: the job has no weights yet.
  absl::Status CheckThere() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // A snapshot of the chunks, with the parameters' counts. It keeps `keep_alive`.
  // RESOURCE_EXHAUSTED: no room for their second versions, which may come from `room`.
  absl::StatusOr<Snapshot> SnapshotOf(absl::Span<const int> parameters,
                                      absl::Span<const int> chunks,
                                      std::shared_ptr<const Job> keep_alive,
                                      ChunkStore::Room* room = nullptr) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // `record`: the job's, or a copy of it.
  CheckpointIndex MakeIndex(const JobRecord& record) const;
  // Elements of a parameter, row-major from `offset` on.
  void Read(int parameter, Plane plane, int64_t offset, absl::Span<float> out) const;
  // The weights of a chunk, in its group's return dtype.
  void ReadWeights(int chunk, std::byte* out) const;
  // As Snapshot::ReadStored.
  void ReadStored(int parameter, Plane stored, int64_t first, absl::Span<std::byte> out) const;
  // SHA-256 over everything in the index: the same for any sharding.
  std::string Hash(const CheckpointIndex& index) const;

 private:
  const JobCore& core_;
  const JobMemory& memory_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_STATE_VIEW_H_
