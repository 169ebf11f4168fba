// A training run whose optimizer is Ballast, with all its ranks: gradients by parameter go in,
// weights come out. Once against the engine, once through the client library and a service in this
// process, so that a case is written once.
#ifndef BALLAST_TESTS_UPSTREAM_OFFLOADED_RUN_H_
#define BALLAST_TESTS_UPSTREAM_OFFLOADED_RUN_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/job/job.h"
#include "tests/upstream/tensors.h"

namespace ballast {

enum class Through { kEngine, kClient };
// Summed in the service, or on the worker and sent as one contribution for all micro-steps.
enum class Accumulation { kInService, kOnWorker };

inline std::string Name(Through through) {
  return through == Through::kEngine ? "Engine" : "Client";
}
inline std::string Name(Accumulation where) {
  return where == Accumulation::kInService ? "InService" : "OnWorker";
}

// What backward left: by micro-step, by rank.
using Backwards = std::vector<std::vector<Tensors>>;

// A job of these parameters, fp32 both ways, a group per group number. The blocks of each flat
// space go round the ranks, so that small jobs too are spread over them; a chunk is one block.
JobSpec SpreadJob(const std::string& name, std::vector<ParameterSpec> parameters, int world_size);
// fp32 both ways in every group.
JobSpec InFloat32(JobSpec spec);

class OffloadedRun {
 public:
  static std::unique_ptr<OffloadedRun> Start(Through through, const JobSpec& spec,
                                             const Tensors& first_weights);
  virtual ~OffloadedRun() = default;

  // A whole step.
  absl::StatusOr<StepOutcome> Step(const Backwards& backwards, const StepSettings& settings = {},
                                   Accumulation where = Accumulation::kInService);

  // Its parts. A chunk that no rank's backward touched is sent as empty.
  virtual void Begin(const StepSettings& settings = {}) = 0;
  // Reduces the ranks' gradients and sends the chunks of `owner`.
  void Send(int owner, const std::vector<Tensors>& ranks, uint32_t micro_step_begin,
            uint32_t micro_step_end, bool final = false);
  virtual void EndMicroStep(int rank, uint32_t micro_step, const UsedParameters& used) = 0;
  // One rank's seal. Through the client it returns only when it is refused or decided.
  virtual absl::Status Seal(int rank, uint32_t micro_steps) = 0;
  // All ranks' seals; returns when the step is committed.
  virtual absl::StatusOr<StepOutcome> SealAll(uint32_t micro_steps) = 0;
  // What all ranks vote with their seals from now on.
  void SetMaxNorm(double max_norm) { vote_.clipping.max_norm = max_norm; }
  // Loads a checkpoint; all ranks join again.
  virtual void Load(const std::string& directory) = 0;

  virtual Job& job() = 0;
  // The trainable parameters as they came back to the ranks.
  Tensors Weights();
  // A plane of the trainable parameters, at the committed step.
  Tensors State(Plane plane);
  int64_t update_count(int parameter) {
    return job().TakeSnapshot({parameter})->update_count(parameter);
  }

 protected:
  const StepVote& vote() const { return vote_; }
  virtual void Contribute(const Contribution& contribution) = 0;
  // A chunk's weights in the return dtype.
  virtual std::vector<std::byte> Returned(int chunk) = 0;

 private:
  StepVote vote_;
};

// The parameters that received a gradient.
UsedParameters UsedIn(const Tensors& gradients);

}  // namespace ballast

#endif  // BALLAST_TESTS_UPSTREAM_OFFLOADED_RUN_H_
