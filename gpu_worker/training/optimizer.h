// The optimizer of a step: the service (service_optimizer.h), or this process (local_optimizer.h)
// with the same bits. The verbs, their order and their types are those of client::Session.
//
// ABORTED from any verb means that the optimizer has continued without this rank (an operator's
// abort or load, another process in some rank). Every verb returns it from then on, until Join.
//
// Threads: one call at a time; different threads may take turns (the backend pushes from its
// communication thread while the trainer's computes).
#ifndef BALLAST_GPU_WORKER_TRAINING_OPTIMIZER_H_
#define BALLAST_GPU_WORKER_TRAINING_OPTIMIZER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/session.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "gpu_worker/training/backend.h"

namespace ballast::worker {

// Writes the first fp32 values of a chunk, zeros in the padding.
using FillChunk = std::function<void(int chunk, absl::Span<float> values)>;
// Where the weights of a chunk of this rank go, in the group's return dtype.
using WeightsAt = std::function<absl::Span<std::byte>(int chunk)>;

class StepOptimizer : public GradientSink {
 public:
  // Joins the job, for the first time or again after ABORTED; an unfinished step is discarded.
  // Gives the optimizer the first weights, if it has none yet, and puts the current ones of this
  // rank's chunks in place. May return ABORTED itself: join again.
  virtual absl::Status Join(const FillChunk& first_weights) = 0;
  // All ranks of a step have the same.
  virtual Generation generation() const = 0;
  virtual uint64_t committed_step() const = 0;
  // As Join found them: what BeginStep gave for the last committed step, and whether it was
  // applied.
  virtual std::string trainer_state() const = 0;
  virtual bool last_step_applied() const = 0;

  // The best place for a chunk's gradient (client::Session::gradient_memory), until the next Join;
  // empty: anywhere.
  virtual absl::Span<std::byte> gradient_memory(int chunk) { return {}; }
  // Where the optimizer leaves the weights of a chunk of this rank, until the next Join
  // (client::Session::weights_memory); empty: it writes them to WeightsAt.
  virtual absl::Span<std::byte> weights_memory(int chunk) { return {}; }
  // How gradients and weights are transported, as text; may be empty.
  virtual std::string transport() const { return {}; }

  // Push and EndMicroStep are called between these two.
  virtual absl::Status BeginStep(const StepSettings& settings) = 0;
  // client::Session::Report; ignored without a service.
  virtual absl::Status Report(const RankReport& report) { return absl::OkStatus(); }
  virtual absl::StatusOr<client::StepDecision> Seal(uint32_t micro_steps, const StepVote& vote) = 0;
  // In a job whose workers make Newton-Schulz: as in client::Session. Not 0 after Join: Join has not
  // put weights in place, because the ranks have to end that step's second round first, and
  // ReceiveWeights brings them.
  virtual uint64_t directions_step() const { return 0; }
  virtual absl::StatusOr<std::vector<HyperParameters>> ReadDirections(
      const std::function<void(int chunk, absl::Span<const std::byte> direction)>& place) {
    return std::vector<HyperParameters>();
  }
  virtual absl::Status GiveOrthogonal(
      const std::function<void(int chunk, absl::Span<std::byte> out)>& fill) {
    return absl::OkStatus();
  }
  virtual absl::Status ReceiveWeights() = 0;
  // Duration of the last step's update: from the decision to the last chunk updated.
  virtual double update_seconds() const = 0;

  // UNIMPLEMENTED without a service.
  virtual absl::StatusOr<client::JobCounts> ReadCounts() = 0;
  virtual absl::Status SaveCheckpoint(const std::string& directory) = 0;
  // Closes the job for all ranks and deletes its state.
  virtual absl::Status CloseJob() { return absl::UnimplementedError("there is no job to close"); }
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_TRAINING_OPTIMIZER_H_
