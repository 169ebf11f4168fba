#include "server/train/step_message.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
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

}  // namespace

absl::StatusOr<StepSettings> FromMessage(const v1::BeginStep& message) {
  StepSettings settings;
  settings.trainer_state = message.trainer_state();
  // On the wire 0, which is also a field that is not there, means 1 (ballast.proto).
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

absl::StatusOr<std::optional<StepVote>> VoteOf(const v1::Seal& message) {
  if (!message.has_vote()) return std::nullopt;
  BALLAST_ASSIGN_OR_RETURN(StepVote vote, FromMessage(message.vote()));
  return vote;
}

}  // namespace ballast::server
