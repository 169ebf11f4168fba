// How the ranks reach the same committed step, at the beginning and after a step that was lost.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/base/log.h"
#include "gpu_worker/collective/share.h"
#include "gpu_worker/training/trainer.h"

namespace ballast::worker {

// An ABORTED marks the step as lost and is no error: this rank goes on with the collectives alone.
absl::Status Trainer::UnlessLost(const absl::Status& status) {
  if (!absl::IsAborted(status)) return status;
  Lose(status.message());
  return absl::OkStatus();
}

void Trainer::Lose(absl::string_view because) {
  // That another rank has lost the step does not hide what this one was told.
  if (!lost_.has_value() || !because.empty()) lost_ = std::string(because);
}

absl::Status Trainer::JoinAgain() {
  const uint64_t step = attempt_.report.step;
  const std::string why = lost_->empty() ? "another rank was notified" : *lost_;
  // A step that is done sets the count back. All ranks count the same attempts, so they end
  // together.
  if (++attempts_in_a_row_ >= kMaxAttempts) {
    return absl::AbortedError(absl::StrCat(
        "step ", step, " was aborted ", attempts_in_a_row_, " times in a row, last because: ", why,
        "; find out who aborts it, and start the workers again"));
  }
  BALLAST_RETURN_IF_ERROR(Annotate(Join(), absl::StrCat("after step ", step, " was aborted")));
  Log().info("step {} was aborted ({}); going on from committed step {}", step, why,
             optimizer_.committed_step());
  return absl::OkStatus();
}

// A rank that joins may end the sessions of those that joined before it, and a load between two
// joins may leave them at different steps: all join until they are at the same one.
absl::Status Trainer::Join() {
  // A forward pass that was begun ahead is void: GatherWeights below brings other weights.
  forward_ahead_ = false;
  absl::Status status;
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    BALLAST_RETURN_IF_ERROR(LeaveOptimizersMemory());
    status = optimizer_.Join([this](int chunk, absl::Span<float> values) {
      FillInitialValues(initial_values_, job_.layout, chunk, values);
    });
    if (!status.ok() && !absl::IsAborted(status)) return status;
    // After an ABORTED a rank takes part, too: the others are in this collective and need its
    // answer.
    BALLAST_ASSIGN_OR_RETURN(bool together, JoinedTogether(status.ok()));
    if (together && optimizer_.directions_step() != 0) {
      status = EndSecondRound();
      if (!status.ok() && !absl::IsAborted(status)) return status;
      BALLAST_ASSIGN_OR_RETURN(together, JoinedTogether(status.ok()));
    }
    if (!together) continue;
    // All ranks have the same step now, so none is left alone in what follows.
    if (optimizer_.committed_step() > options_.steps) return PastTheLastStep();
    LogTransportIfNew();
    // The memory is used only now: it is that of the session that stays.
    BALLAST_RETURN_IF_ERROR(UseOptimizersMemory());
    BALLAST_RETURN_IF_ERROR(RestoreScaler());
    // Join has brought the weights of this rank; the passes need those of all.
    return backend_.GatherWeights();
  }
  return absl::AbortedError(
      absl::StrCat("job ", job_.spec.name, ": the ranks joined ", kMaxAttempts,
                   " times and were never at the same step (", status.message(),
                   "); find out who takes a rank or loads checkpoints all the time"));
}

// Of a step that the ranks before these have sealed.
absl::Status Trainer::EndSecondRound() {
  BALLAST_RETURN_IF_ERROR(Orthogonalize(optimizer_.directions_step()));
  return optimizer_.ReceiveWeights();
}

absl::Status Trainer::UseOptimizersMemory() {
  BALLAST_RETURN_IF_ERROR(
      backend_.UseGradientMemory([this](int chunk) { return optimizer_.gradient_memory(chunk); }));
  return backend_.UseWeightsMemory([this](int chunk) { return optimizer_.weights_memory(chunk); });
}

// It ends with the optimizer's session, and the backend may have pinned it.
absl::Status Trainer::LeaveOptimizersMemory() {
  const auto none = [](int) { return absl::Span<std::byte>(); };
  const absl::Status gradients = backend_.UseGradientMemory(none);
  BALLAST_RETURN_IF_ERROR(backend_.UseWeightsMemory(none));
  return gradients;
}

void Trainer::LogTransportIfNew() {
  const std::string transport = optimizer_.transport();
  if (transport == transport_) return;
  Log().info("rank {}: gradients and weights travel through {}{}", collective_.rank(), transport,
             transport_.empty() ? "" : absl::StrCat(", no longer through ", transport_));
  transport_ = transport;
}

absl::Status Trainer::PastTheLastStep() const {
  return absl::FailedPreconditionError(
      absl::StrCat("job ", job_.spec.name, " is already at step ", optimizer_.committed_step(),
                   "; raise --steps, or start another job with --job"));
}

absl::StatusOr<bool> Trainer::JoinedTogether(bool joined) {
  // It has words of 8 bytes and so no padding, which would be sent as it is.
  struct Place {
    uint64_t joined = 0;
    uint64_t epoch = 0;
    uint64_t generation = 0;
    uint64_t committed_step = 0;
    uint64_t directions_step = 0;
    bool operator==(const Place&) const = default;
  };
  Place mine;
  if (joined) {
    const Generation generation = optimizer_.generation();
    mine = {1, generation.epoch, generation.count, optimizer_.committed_step(),
            optimizer_.directions_step()};
  }
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Place> places, Share(mine, collective_));
  // The step alone is not enough: a session of an older generation has ended, and its rank would
  // notice that only in the next step.
  return places[0].joined == 1 &&
         std::all_of(places.begin(), places.end(),
                     [&](const Place& place) { return place == places[0]; });
}

// A step's begin leaves the scaler's state as it was before that step's outcome.
absl::Status Trainer::RestoreScaler() {
  if (!options_.loss_scaler.has_value()) return absl::OkStatus();
  const std::string state = optimizer_.trainer_state();
  // No step is committed yet, or none that had a scaler.
  if (state.empty()) {
    BALLAST_ASSIGN_OR_RETURN(scaler_, client::DynamicLossScaler::Create(*options_.loss_scaler));
    return absl::OkStatus();
  }
  BALLAST_ASSIGN_OR_RETURN(scaler_,
                           client::DynamicLossScaler::Deserialize(state, *options_.loss_scaler));
  scaler_->Update(/*overflow=*/!optimizer_.last_step_applied());
  return absl::OkStatus();
}

}  // namespace ballast::worker
