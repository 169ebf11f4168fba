// The initial state of a job: from its ranks, first weights with or without moments; from another
// job, or a checkpoint, for their common parameters.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_STATE_ORIGIN_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_STATE_ORIGIN_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/job/core/job_core.h"
#include "cpu_optimizer_service/job/core/job_memory.h"
#include "cpu_optimizer_service/job/core/membership.h"
#include "cpu_optimizer_service/job/kept/journal.h"
#include "cpu_optimizer_service/job/state/saver.h"
#include "cpu_optimizer_service/state/checkpoint_index.h"

namespace ballast {

class StateOrigin {
 public:
  using Uploader = Job::Uploader;

  // All outlive it.
  StateOrigin(JobCore& core, JobMemory& memory, Membership& members, Journal& journal, Saver& saver)
      : core_(core), memory_(memory), members_(members), journal_(journal), saver_(saver) {}

  // ---- As Job's calls for first weights.
  absl::StatusOr<Uploader> Begin(const RankHolder& holder, FirstState state);
  // True: these were the last.
  absl::StatusOr<bool> Write(int64_t chunk, absl::Span<const absl::Span<const std::byte>> payload,
                             const std::optional<Uploader>& uploader);
  // The rank's weights have to be sent again.
  void Forget(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Complete() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Updates the shown progress, after weights have arrived or were dropped.
  void Show() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // ---- Before any other code knows the job.
  using ReadPlane = std::function<absl::Status(const std::string& parameter, Plane plane,
                                               int64_t offset, absl::Span<float> out)>;
  absl::Status Inherit(const CheckpointIndex& index, const ReadPlane& read);
  bool is_derived() const { return !inherited_.empty(); }
  // By parameter: it has its state from the origin. Empty: the job is not derived.
  const std::vector<bool>& inherited() const { return inherited_; }

 private:
  // Checks that all of an arrived chunk's plane may be first weights.
  absl::Status CheckFirst(int index, Plane plane, absl::Span<const float> values) const;
  absl::Status ChooseInherited(const CheckpointIndex& index);
  absl::Status InheritChunk(int chunk, const ReadPlane& read);
  // A plane of an arrived chunk, except inherited elements.
  void WriteFirst(int chunk, Plane plane, absl::Span<const float> values);

  JobCore& core_;
  JobMemory& memory_;
  Membership& members_;
  Journal& journal_;
  Saver& saver_;
  std::vector<bool> inherited_;                                   // Constant once allocated.
  std::shared_ptr<Progress> progress_ ABSL_GUARDED_BY(job_lock);  // Nullable.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_STATE_ORIGIN_H_
