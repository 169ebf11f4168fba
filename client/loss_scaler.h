// Dynamic loss scaling for fp16 gradients, with the knobs and the arithmetic of DeepSpeed's
// (runtime/fp16/loss_scaler.py), in doubled and halved powers.
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
//     scaler.Update(!session->Seal(micro_steps)->applied);
//   }
//
// All ranks see the same decisions, so their scalers agree without a word. Thread-compatible.
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
  // Steps without overflow before the scale doubles: counted from the second step after the start
  // or after an overflow, so the first doubling comes with step window + 1, then every `window`.
  int64_t window = 1000;
  // Overflows that it takes to halve the scale. Each of the first hysteresis - 1 only uses one up;
  // when they are used up, every overflow halves. A doubling gives them back.
  int hysteresis = 2;
  // Every step without overflow gives them back too, so that only overflows in a row count.
  bool consecutive_hysteresis = false;
  // The scale is never halved below this; there it stays (DeepSpeed ends the run).
  float min_scale = 1;
};

class DynamicLossScaler {
 public:
  // No scale is larger, however long nothing overflows: 2^64 leaves an fp32 multiplier for any
  // divisor that a job can have.
  static constexpr float kMaxScale = 18446744073709551616.0F;

  // INVALID_ARGUMENT names the option that cannot work.
  static absl::StatusOr<DynamicLossScaler> Create(const LossScalerOptions& options);
  // As `Serialize` left it, under these options. INVALID_ARGUMENT for anything else.
  static absl::StatusOr<DynamicLossScaler> Deserialize(absl::string_view state,
                                                       const LossScalerOptions& options);
  std::string Serialize() const;

  float scale() const { return scale_; }
  // Once for every step that was decided; `overflow`: it was skipped.
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
