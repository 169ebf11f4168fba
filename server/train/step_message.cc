#include "server/train/step_message.h"

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::server {

absl::StatusOr<StepSettings> FromMessage(const v1::BeginStep& message) {
  StepSettings settings;
  settings.trainer_state = message.trainer_state();
  if (message.loss_scale() != 0) settings.scale.loss_scale = message.loss_scale();
  settings.scale.divisors.assign(message.divisors().begin(), message.divisors().end());
  for (const auto& [group, changes] : message.overrides()) {
    absl::StatusOr<HyperParameterOverrides> overrides = proto::OverridesFromProto(changes);
    if (!overrides.ok()) {
      return Annotate(overrides.status(), absl::StrCat("overrides of group ", group));
    }
    settings.overrides[group] = *overrides;
  }
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

}  // namespace ballast::server
