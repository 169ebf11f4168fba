// Dynamic loss scaling for fp16 gradients, with the options and the arithmetic of DeepSpeed's
// (runtime/fp16/loss_scaler.py). The scale doubles and halves. If halving would bring it below
// min_scale, it becomes min_scale. So it is a power of two as long as min_scale is.
//
//   auto scaler = client::DynamicLossScaler::Create({}).value();
//   if (!session->trainer_state().empty()) {  // A restart: the state before that step's outcome.
//     scaler = client::DynamicLossScaler::Deserialize(session->trainer_state(), {}).value();
//     scaler.Update(/*overflow=*/!session->last_step_applied());
//   }
//   for (;;) {
//     session->BeginStep({.scale = {.loss_scale = scaler.scale()},
//                         .trainer_state = scaler.Serialize()});
//     ... backward of loss * scaler.scale() ...
//     scaler.Update(!session->Seal(micro_steps, vote)->applied);
//   }
//
// All ranks see the same decisions, so their scalers agree without communication.
// Thread-compatible.
#ifndef BALLAST_CLIENT_LOSS_SCALER_H_
#define BALLAST_CLIENT_LOSS_SCALER_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast::client {

struct LossScalerOptions {
  int initial_scale_power = 16;  // The first scale is 2 to this power.
  // Steps without overflow before the scale doubles. They count from the second step after the
  // start or after an overflow. So the first doubling comes with step window + 1, then every
  // `window`.
  int64_t window = 1000;
  // The number of overflows that halve the scale. The first hysteresis - 1 overflows only use up
  // this allowance; after that every overflow halves. A doubling restores the allowance.
  int hysteresis = 2;
  // Every step without overflow restores it too, so only consecutive overflows count.
  bool consecutive_hysteresis = false;
  // The minimum; the scale stays there (DeepSpeed ends the run).
  float min_scale = 1;
};

class DynamicLossScaler {
 public:
  // The maximum. 2^64 leaves an fp32 multiplier for every divisor that a job can have.
  static constexpr float kMaxScale = 18446744073709551616.0F;

  // INVALID_ARGUMENT names an option that cannot work.
  static absl::StatusOr<DynamicLossScaler> Create(const LossScalerOptions& options);
  // A state that `Serialize` returned, with these options. INVALID_ARGUMENT for any other text.
  static absl::StatusOr<DynamicLossScaler> Deserialize(absl::string_view state,
                                                       const LossScalerOptions& options);
  std::string Serialize() const;

  float scale() const { return scale_; }
  // Call once for every decided step. `overflow`: the step was skipped.
  void Update(bool overflow);

 private:
  explicit DynamicLossScaler(const LossScalerOptions& options);

  LossScalerOptions options_;
  float scale_;
  int hysteresis_left_;
  int64_t steps_since_overflow_ = 0;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_LOSS_SCALER_H_
