#include "server/train/step_message.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::server {

namespace {

absl::StatusOr<std::map<int, HyperParameterOverrides>> FromMessage(
    const google::protobuf::Map<int32_t, v1::HyperParameters>& message) {
  std::map<int, HyperParameterOverrides> all;
  for (const auto& [group, changes] : message) {
    absl::StatusOr<HyperParameterOverrides> overrides = proto::OverridesFromProto(changes);
    if (!overrides.ok()) {
      return Annotate(overrides.status(), absl::StrCat("overrides of group ", group));
    }
    // Whether the job has such a group is for the job to say.
    all[group] = *overrides;
  }
  return all;
}

v1::ErrorReason ReasonMessage(const absl::Status& status) {
  v1::ErrorReason reason = v1::ERROR_REASON_UNSPECIFIED;
  (void)v1::ErrorReason_Parse(ReasonOf(status), &reason);
  return reason;
}

// Of StepNorm and StepDecision: the first names, and how many others there are.
template <typename Message>
void AddUnused(const std::vector<std::string>& unused, Message& message) {
  const size_t named = std::min(unused.size(), kRecordedNames);
  message.mutable_unused_parameters()->Add(unused.begin(), unused.begin() + named);
  message.set_more_unused_parameters(static_cast<int64_t>(unused.size() - named));
}

}  // namespace

absl::StatusOr<StepSettings> FromMessage(const v1::BeginStep& message) {
  StepSettings settings;
  settings.trainer_state = message.trainer_state();
  // On the wire 0, which is also a field that is not there, means 1 (train.proto).
  if (message.loss_scale() != 0) settings.scale.loss_scale = message.loss_scale();
  settings.scale.divisors.assign(message.divisors().begin(), message.divisors().end());
  settings.expected_clipping = proto::FromProto(message.expected_clipping());
  BALLAST_ASSIGN_OR_RETURN(settings.overrides, FromMessage(message.overrides()));
  return settings;
}

Contribution FromMessage(const v1::GradientHeader& header,
                         absl::Span<const absl::Span<const std::byte>> payload) {
  return {.step = header.step(),
          .attempt = header.attempt(),
          .chunk = header.chunk(),
          .micro_step_begin = header.micro_step_begin(),
          .micro_step_end = header.micro_step_end(),
          .final = header.final(),
          .may_guess = header.may_guess(),
          .empty = header.empty(),
          .payload = payload};
}

UsedParameters FromMessage(const v1::EndMicroStep& message) {
  UsedParameters used = {
      .all = message.all_used(),
      .parameters = {message.used_parameters().begin(), message.used_parameters().end()},
      .non_finite = {}};
  if (message.has_non_finite()) {
    used.non_finite = {.parameter = message.non_finite().parameter(),
                       .element = message.non_finite().element(),
                       .value = message.non_finite().value()};
  }
  return used;
}

absl::StatusOr<StepVote> FromMessage(const v1::Vote& message) {
  StepVote vote = {.apply = !message.abandon(),
                   .clipping = proto::FromProto(message.clipping()),
                   .overrides = {},
                   .trainer_state = std::nullopt};
  BALLAST_ASSIGN_OR_RETURN(vote.overrides, FromMessage(message.overrides()));
  // Without one, that of BeginStep stays.
  if (message.has_trainer_state()) vote.trainer_state = message.trainer_state();
  return vote;
}

uint32_t RefusalsHeard(const v1::Vote& vote) {
  return vote.has_refusals() ? vote.refusals() : RankStream::kAllRefusals;
}

absl::StatusOr<std::optional<StepVote>> VoteOf(const v1::Seal& message) {
  if (!message.has_vote()) return std::nullopt;
  BALLAST_ASSIGN_OR_RETURN(StepVote vote, FromMessage(message.vote()));
  return vote;
}

v1::TrainResponse ToMessage(const RankPosition& position, int first_of_rank) {
  v1::TrainResponse message;
  v1::Opened& opened = *message.mutable_opened();
  opened.set_committed_step(position.committed_step);
  opened.set_open_step(position.open_step);
  opened.set_awaits_orthogonal(position.awaits_orthogonal);
  opened.set_attempt(position.attempt);
  opened.set_micro_steps_ended(position.micro_steps_ended);
  for (const ChunkProgress& progress : position.delivered) {
    v1::ChunkCount& count = *opened.add_delivered();
    count.set_chunk(static_cast<uint32_t>(progress.chunk - first_of_rank));
    count.set_next_micro_step(progress.next_micro_step);
  }
  return message;
}

v1::TrainResponse ToMessage(uint64_t step, const SealRefusal& refusal) {
  v1::TrainResponse message;
  v1::SealRefused& refused = *message.mutable_seal_refused();
  refused.set_step(step);
  refused.set_attempt(refusal.attempt);
  refused.set_message(std::string(refusal.status.message()));
  refused.set_reason(ReasonMessage(refusal.status));
  for (const MissingContribution& missing : refusal.missing) {
    v1::Missing& to = *refused.add_missing();
    to.set_rank(missing.rank);
    to.set_micro_step(missing.micro_step);
    to.mutable_parameters()->Add(missing.parameters.begin(), missing.parameters.end());
    to.set_more_parameters(missing.more_parameters);
  }
  return message;
}

v1::TrainResponse ToMessage(const StepNorm& norm) {
  v1::TrainResponse message;
  v1::StepNorm& to = *message.mutable_norm();
  to.set_step(norm.step);
  to.set_attempt(norm.attempt);
  to.set_norm(norm.norm);
  to.mutable_group_norms()->Add(norm.group_norms.begin(), norm.group_norms.end());
  to.set_non_finite(norm.non_finite);
  AddUnused(norm.unused_parameters, to);
  return message;
}

v1::TrainResponse ToMessage(StepAttempt at, const absl::Status& votes_refused) {
  v1::TrainResponse message;
  v1::VoteRefused& refused = *message.mutable_vote_refused();
  refused.set_step(at.step);
  refused.set_attempt(at.attempt);
  refused.set_message(std::string(votes_refused.message()));
  refused.set_reason(ReasonMessage(votes_refused));
  return message;
}

v1::TrainResponse ToMessage(const StepOutcome& outcome, absl::Span<const int> dropped_chunks) {
  v1::TrainResponse message;
  v1::StepDecision& decision = *message.mutable_decision();
  decision.set_step(outcome.step);
  decision.set_applied(outcome.decision.apply);
  decision.set_norm(outcome.decision.norm);
  decision.set_clip_coefficient(outcome.decision.clip_coefficient);
  decision.set_skip_reason(outcome.skip_reason);
  AddUnused(outcome.unused_parameters, decision);
  decision.mutable_dropped_chunks()->Add(dropped_chunks.begin(), dropped_chunks.end());
  return message;
}

}  // namespace ballast::server
