// A rank's input to a step besides gradients: its settings, its used parameters, its vote. For the
// engine, the client and the protocol.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STEP_SETTINGS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STEP_SETTINGS_H_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"

namespace ballast {

inline constexpr size_t kMaxTrainerStateBytes = 4096;
// The maximal number of different sets of used parameters of a step, each with a bit for every
// parameter. Equal micro-steps share one.
inline constexpr size_t kMaxUsedSets = 512;

// The start of a job that a message belongs to. Compared as a pair. The count rises within an epoch
// when a step starts over. The epoch belongs to the owner of the job's name: so far the service
// that created the job, which never changes it.
struct Generation {
  // Implicit: within the first epoch a generation is its count. 0: none.
  Generation(uint64_t count = 0, uint64_t epoch = 1) : epoch(epoch), count(count) {}
  uint64_t epoch = 1;
  uint64_t count = 0;

  Generation Next() const { return {count + 1, epoch}; }
  auto operator<=>(const Generation&) const = default;
};
// "1.17".
inline std::string ToString(const Generation& generation) {
  return std::to_string(generation.epoch) + "." + std::to_string(generation.count);
}

// A step, and the number of the attempt at it. Each rank counts its attempts at a step from 0, and
// begins the next by discarding what it gave in this one.
struct StepAttempt {
  // Implicit: without a discard a step means its first attempt.
  StepAttempt(uint64_t step, uint32_t attempt = 0) : step(step), attempt(attempt) {}
  uint64_t step = 0;
  uint32_t attempt = 0;
  auto operator<=>(const StepAttempt&) const = default;
};

// How many refusals of votes went over one stream, of the newest attempt with any: both ends count.
class VoteRefusals {
 public:
  void Add(StepAttempt at) {
    if (at < at_) return;  // Late.
    count_ = at_ == at ? count_ + 1 : 1;
    at_ = at;
  }
  uint32_t Of(StepAttempt at) const { return at == at_ ? count_ : 0; }

 private:
  StepAttempt at_ = 0;
  uint32_t count_ = 0;
};

// The settings of begin_step, the same on all ranks. Provisional updates use the overrides and the
// clipping; the vote may differ.
struct StepSettings {
  GradientScale scale;
  std::map<int, HyperParameterOverrides> overrides;  // By group; permanent.
  // The trainer's state for a restart: kept once the step is committed. At most
  // kMaxTrainerStateBytes.
  std::string trainer_state;
  // The expected clipping of the vote, as far as known. Only provisional updates depend on it.
  Clipping expected_clipping;
};

// A rank's decision about a step that all ranks have sealed. All ranks must decide the same;
// otherwise the step stays open. {}: apply it with its settings, unclipped.
struct StepVote {
  bool apply = true;  // false: the step is abandoned: a skip.
  Clipping clipping;
  // By group, over the step's hyper-parameters; permanent.
  std::map<int, HyperParameterOverrides> overrides;
  std::optional<std::string> trainer_state;  // In place of the step's.

  bool operator==(const StepVote&) const = default;
};

// The parameters with a gradient on a rank in a micro-step.
struct UsedParameters {
  bool all = true;  // All trainable ones; then the list is empty.
  std::vector<int> parameters;
  // If workers check before reducing: the first non-finite element.
  struct NonFinite {
    int parameter = 0;
    int64_t element = 0;
    float value = 0;
  };
  std::optional<NonFinite> non_finite;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STEP_SETTINGS_H_
