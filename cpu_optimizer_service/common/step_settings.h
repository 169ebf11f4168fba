// What a rank gives a step besides gradients: its settings and the parameters that it used. One
// definition for the engine, the client and the wire.
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

// A step, and the how manyth try at it. Each rank counts its attempts at a step from 0, and goes on
// to the next by discarding what it gave in this one.
struct StepAttempt {
  // Implicit: the first attempt is what a step is, where nothing is discarded.
  StepAttempt(uint64_t step, uint32_t attempt = 0) : step(step), attempt(attempt) {}
  uint64_t step = 0;
  uint32_t attempt = 0;
  auto operator<=>(const StepAttempt&) const = default;
};

// What begin_step says. All ranks say the same.
struct StepSettings {
  GradientScale scale;
  std::map<int, HyperParameterOverrides> overrides;  // By group; they stay in force.
  // What the trainer wants to find again after a restart: kept once the step is committed. At most
  // kMaxTrainerStateBytes.
  std::string trainer_state;
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
