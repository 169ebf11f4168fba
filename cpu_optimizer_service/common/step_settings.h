// What a rank gives a step besides gradients: its settings, the parameters that it used, its vote.
// One definition for the engine, the client and the wire.
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
// The most different sets of used parameters that a step keeps, each of a bit for every parameter.
// Micro-steps that are alike share one.
inline constexpr size_t kMaxUsedSets = 512;

// Which of a job's starts a message belongs to. Compared as a pair. The count rises within an epoch,
// when a step starts over; the epoch belongs to the owner of the job's name, so far the service that
// has created the job, which never changes it.
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

// A step, and the how manyth try at it. Each rank counts its attempts at a step from 0, and goes on
// to the next by discarding what it gave in this one.
struct StepAttempt {
  // Implicit: the first attempt is what a step is, where nothing is discarded.
  StepAttempt(uint64_t step, uint32_t attempt = 0) : step(step), attempt(attempt) {}
  uint64_t step = 0;
  uint32_t attempt = 0;
  auto operator<=>(const StepAttempt&) const = default;
};

// What begin_step says. All ranks say the same. Of these, provisional updates use the
// overrides and the clipping, and the vote may say other ones.
struct StepSettings {
  GradientScale scale;
  std::map<int, HyperParameterOverrides> overrides;  // By group; they stay in force.
  // What the trainer wants to find again after a restart: kept once the step is committed. At most
  // kMaxTrainerStateBytes.
  std::string trainer_state;
  // What the vote will say of it, as far as that is known. Only provisional updates depend on it.
  Clipping expected_clipping;
};

// What becomes of a step that all ranks have sealed, as a rank wants it. All ranks want the same,
// or the step stays open. {}: it is applied with what it began with, and not clipped.
struct StepVote {
  bool apply = true;  // false: the step is abandoned, which is a skip.
  Clipping clipping;
  // By group, over the hyper-parameters that the step began with; they stay in force.
  std::map<int, HyperParameterOverrides> overrides;
  std::optional<std::string> trainer_state;  // In place of what the step began with.

  bool operator==(const StepVote&) const = default;
};

// Which parameters received a gradient on a rank in a micro-step.
struct UsedParameters {
  bool all = true;  // All trainable ones; the list is then empty.
  std::vector<int> parameters;
  // Of workers that check before reducing: the first element that was not finite.
  struct NonFinite {
    int parameter = 0;
    int64_t element = 0;
    float value = 0;
  };
  std::optional<NonFinite> non_finite;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STEP_SETTINGS_H_
