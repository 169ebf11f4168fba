#include "cpu_optimizer_service/job/update/decider.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"

namespace ballast {

GradientElement Decider::ElementAt(const ChunkPiece& piece) const {
  const GradientView gradient = memory_.gradients->view(piece.chunk);
  return {.parameter = piece.parameter,
          .element = piece.parameter_offset,
          .value = LoadElement(gradient.data, gradient.dtype, piece.chunk_offset),
          .rank = core_.layout.chunks()[piece.chunk].rank};
}

StepReport Decider::MakeReport(PartSums sums) const {
  StepReport report = {.micro_steps = machine_.agreement()->micro_steps(),
                       .sums = std::move(sums),
                       .uses = machine_.part().uses(),
                       .has_empties = !machine_.part().empties().empty(),
                       .non_finite = std::nullopt,
                       .before_reducing = machine_.part().non_finite()};
  if (report.sums.finite()) return report;
  // It may find none: a rank can still write to memory that it shares after the sums were computed.
  if (const auto found = memory_.gradients->FirstNonFinite(); found.has_value()) {
    report.non_finite = ElementAt(*found);
  }
  return report;
}

StateTrial Decider::Try(const Draft& draft) const {
  const auto chunks = static_cast<int64_t>(core_.layout.chunks().size());
  std::vector<TrialUpdate> trials(chunks);
  const auto is_tried = [&](int chunk) {
    return !draft.bounds[core_.layout.chunks()[chunk].group].finite();
  };
  core_.environment.tasks->ForEach(chunks, [&](int64_t index) {
    const int chunk = static_cast<int>(index);
    if (!is_tried(chunk)) return;
    trials[chunk] =
        TryUpdateChunk(executor_.UpdateOf(draft.update, chunk, memory_.store->Published(chunk)),
                       [&](int parameter) { return draft.update.update_counts[parameter]; });
  });
  StateTrial trial(core_.layout.group_count());
  for (int chunk = 0; chunk < static_cast<int>(chunks); ++chunk) {
    if (!is_tried(chunk)) continue;
    if (const auto& found = trials[chunk].non_finite; found.has_value()) {
      trial.Add(core_.spec(), {.plane = found->plane,
                               .value = found->value,
                               .gradient = ElementAt(core_.layout.PieceAt(chunk, found->element))});
    } else {
      trial.Add(core_.layout.chunks()[chunk].group, trials[chunk].largest);
    }
  }
  return trial;
}

StepFacts Decider::Facts() const {
  return {.spec = core_.spec(),
          .layout = core_.layout,
          .terms = machine_.agreement()->terms(),
          .attempt = machine_.agreement()->attempt(),
          .summary = *lead_.summary(),
          .update_counts = core_.record.update_counts};
}

StepNorm Decider::Norm() const { return NormOf(Facts()); }

Draft Decider::MakeDraft() const {
  const std::vector<double>& group_sums = lead_.summary()->group_sums;
  Draft draft = DecideStep(Facts(), lead_.vote());
  if (!draft.outcome.decision.apply) return draft;
  for (int group = 0; group < core_.layout.group_count(); ++group) {
    const StateBounds after = BoundsAfter(
        core_.bounds.empty() ? StateBounds() : core_.bounds[group],
        draft.update.hyper_parameters[group], group_sums[group], draft.update.multipliers[group]);
    draft.bounds.push_back(BoundsStored(after, core_.spec().layout.state(group).format));
  }
  return draft;
}

}  // namespace ballast
