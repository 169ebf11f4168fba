// A worker's messages in a step, as the engine's types.
#ifndef BALLAST_SERVER_TRAIN_STEP_MESSAGE_H_
#define BALLAST_SERVER_TRAIN_STEP_MESSAGE_H_

#include <cstddef>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/v1/ballast.pb.h"
#include "cpu_optimizer_service/job/job.h"

namespace ballast::server {

// INVALID_ARGUMENT, with the name of the group, if overrides change what cannot change.
absl::StatusOr<StepSettings> FromMessage(const v1::BeginStep& message);

// Borrows the payload.
Contribution FromMessage(const v1::GradientHeader& header,
                         absl::Span<const absl::Span<const std::byte>> payload);

UsedParameters FromMessage(const v1::EndMicroStep& message);

// INVALID_ARGUMENT as of BeginStep.
absl::StatusOr<StepVote> FromMessage(const v1::Vote& message);
// Nullopt: it brings none.
absl::StatusOr<std::optional<StepVote>> VoteOf(const v1::Seal& message);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRAIN_STEP_MESSAGE_H_
