// The optimizer in this process: the ledger, the decision and the order of a step, which the
// service must equal bit for bit. local_arithmetic.h has state and arithmetic. As in the service, a
// step that would make state non-finite is a skip. It has no checkpoints.
#ifndef BALLAST_GPU_WORKER_TRAINING_LOCAL_OPTIMIZER_H_
#define BALLAST_GPU_WORKER_TRAINING_LOCAL_OPTIMIZER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/norm/exact_sum.h"
#include "cpu_optimizer_service/common/norm/norm_blocks.h"
#include "cpu_optimizer_service/common/state_bounds.h"
#include "gpu_worker/collective/collective.h"
#include "gpu_worker/training/local_arithmetic.h"
#include "gpu_worker/training/optimizer.h"

namespace ballast::worker {

class LocalOptimizer final : public StepOptimizer {
 public:
  // `layout` and `collective` are borrowed until destruction. All groups have the rule
  // adam, without amsgrad: the trainer's jobs have no other.
  LocalOptimizer(const JobSpec& job, const Layout& layout, Collective& collective,
                 std::unique_ptr<LocalArithmetic> arithmetic);

  absl::Status Join(const FillChunk& first_weights) override;
  Generation generation() const override { return {}; }
  uint64_t committed_step() const override { return committed_step_; }
  std::string trainer_state() const override { return ""; }
  bool last_step_applied() const override { return true; }

  absl::Status BeginStep(const StepSettings& settings) override;
  absl::Status Push(client::GradientPush push) override;
  absl::Status PushAll(std::vector<client::GradientPush> pushes) override;
  absl::Status EndMicroStep(uint32_t micro_step, const UsedParameters& used) override;
  // FAILED_PRECONDITION if a chunk lacks a micro-step, or no rank used some parameter and the job's
  // policy is kError. INVALID_ARGUMENT: invalid clipping, or a vote with overrides, which the
  // trainer's votes do not have.
  absl::StatusOr<client::StepDecision> Seal(uint32_t micro_steps, const StepVote& vote) override;
  absl::Status ReceiveWeights() override;
  double update_seconds() const override { return update_seconds_; }
  absl::StatusOr<client::JobCounts> ReadCounts() override;
  absl::Status SaveCheckpoint(const std::string& directory) override;

 private:
  struct Entry {
    uint32_t next_micro_step = 0;
    bool has_gradient = false;
  };

  absl::Status CheckComplete(uint32_t micro_steps) const;
  // The parameters that no rank used in any micro-step, by index.
  absl::StatusOr<std::vector<int>> FindUnused();
  // Blocks of the norm inside a rank's chunks, where these are adjacent.
  struct WholeBlocks {
    BlocksInChunks place;
    int64_t first_block = 0;
  };
  std::vector<WholeBlocks> FindWholeBlocks(int rank) const;
  // Adds all whole blocks, and all others, from all ranks. `sums`: by group.
  absl::Status AddWholeBlocks(std::vector<ExactSum>& sums);
  absl::Status AddOtherBlocks(std::vector<ExactSum>& sums);
  // The sums of squares of the groups.
  absl::StatusOr<std::vector<double>> GatherGroupSums();
  // The bounds of the state after the decided update; or why it is a skip.
  absl::StatusOr<std::string> CheckUpdate(absl::Span<const double> group_sums);
  // The update of the groups with non-finite bounds, without a trace. Sets those bounds, or returns
  // why the step is a skip; the same on all ranks.
  absl::StatusOr<std::string> TryUpdate(absl::Span<StateBounds> bounds);
  // Of one rank.
  struct Trial;
  absl::Status TryChunk(int chunk, Trial& trial);
  // Nullopt: the step does not change the parameter. `count`: its number of updates, including this
  // one.
  std::optional<AdamScalars> ScalarsOf(int group, int parameter, int64_t count) const;
  absl::Status Update();
  absl::Span<const int> my_chunks() const { return layout_.chunks_of_rank(collective_.rank()); }

  const Layout& layout_;
  Collective& collective_;
  const std::unique_ptr<LocalArithmetic> arithmetic_;
  const UnusedPolicy unused_policy_;
  std::vector<GroupSpec> groups_;  // Hyper-parameters as the last step's overrides left them.
  std::vector<Entry> ledger_;      // By chunk; only this rank's are used.
  const NormBlocks blocks_;
  std::vector<BlocksInChunks> my_whole_blocks_;
  std::vector<double> my_block_sums_;  // Kept, because they are large for a large model.
  std::vector<int64_t> other_blocks_;
  GradientScale scale_;       // In the open step, like the next two.
  std::vector<double> used_;  // By parameter: the number of micro-steps that used it.
  Decision decision_;
  uint64_t committed_step_ = 0;
  std::vector<int64_t> update_counts_;  // By parameter.
  std::vector<StateBounds> bounds_;     // By group, of all ranks' state.
  double update_seconds_ = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_TRAINING_LOCAL_OPTIMIZER_H_
