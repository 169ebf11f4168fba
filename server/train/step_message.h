// Converts between a step's messages and the engine's types.
#ifndef BALLAST_SERVER_TRAIN_STEP_MESSAGE_H_
#define BALLAST_SERVER_TRAIN_STEP_MESSAGE_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/v1/train.pb.h"
#include "cpu_optimizer_service/job/job.h"

namespace ballast::server {

// INVALID_ARGUMENT, with the group's name, if overrides change a fixed value.
absl::StatusOr<StepSettings> FromMessage(const v1::BeginStep& message);

// Borrows the payload.
Contribution FromMessage(const v1::GradientHeader& header,
                         absl::Span<const absl::Span<const std::byte>> payload);

UsedParameters FromMessage(const v1::EndMicroStep& message);

// INVALID_ARGUMENT as for BeginStep.
absl::StatusOr<StepVote> FromMessage(const v1::Vote& message);
// Nullopt: a seal without a vote.
absl::StatusOr<std::optional<StepVote>> VoteOf(const v1::Seal& message);
// As RankStream::Seal and Vote take it.
uint32_t RefusalsHeard(const v1::Vote& vote);

// `first_of_rank`: Layout::first_of_rank of the rank.
v1::TrainResponse ToMessage(const RankPosition& position, int first_of_rank);
v1::TrainResponse ToMessage(uint64_t step, const SealRefusal& refusal);
v1::TrainResponse ToMessage(const StepNorm& norm);
v1::TrainResponse ToMessage(StepAttempt at, const absl::Status& votes_refused);
// Chunks are numbered as in the job.
v1::TrainResponse ToMessage(const StepOutcome& outcome, absl::Span<const int> dropped_chunks);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRAIN_STEP_MESSAGE_H_
