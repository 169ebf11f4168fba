// An engine's calls for checkpoints on its host: list, verify, delete.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_CHECKPOINT_CALLS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_CHECKPOINT_CALLS_H_

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/job/core/job_core.h"

namespace ballast {

class CheckpointCalls {
 public:
  // It outlives the calls.
  explicit CheckpointCalls(const JobEnvironment& environment) : environment_(environment) {}

  // As in Engine. `jobs` lists those that may be saving.
  Pending Look(Engine::LookRequest request, Done<std::vector<FoundCheckpoint>> done);
  Pending Delete(Engine::DeleteRequest request,
                 std::function<std::vector<std::shared_ptr<Job>>()> jobs,
                 Done<std::vector<FoundCheckpoint>> done);

 private:
  using FoundOrNot = absl::StatusOr<std::vector<FoundCheckpoint>>;
  FoundOrNot LookNow(const Engine::LookRequest& request) const;
  // Without checkpoints that were deleted meanwhile.
  FoundOrNot Verify(std::vector<FoundCheckpoint> found, const std::function<bool()>& wanted);
  FoundOrNot DeleteNow(const Engine::DeleteRequest& request,
                       absl::Span<const std::shared_ptr<Job>> jobs);
  // Runs `work` on a disk thread, unless all are busy. `work` can ask whether it is still `wanted`.
  Pending OnDisk(std::function<FoundOrNot(const std::function<bool()>& wanted)> work,
                 Done<std::vector<FoundCheckpoint>> done);

  const JobEnvironment& environment_;
  std::atomic<int> looks_ = 0;  // In progress.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_CHECKPOINT_CALLS_H_
