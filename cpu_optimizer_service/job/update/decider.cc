#include "cpu_optimizer_service/job/update/decider.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/text/overflow.h"

namespace ballast {

StepFacts Decider::Facts(const std::string& non_finite) const {
  return {.spec = core_.spec(),
          .layout = core_.layout,
          .lead = *machine_.lead(),
          .part = machine_.part(),
          .update_counts = core_.record.update_counts,
          .non_finite = non_finite};
}

StepNorm Decider::Norm() const { return NormOf(Facts(FirstNonFinite())); }

void Decider::Try(Draft& draft) const {
  const auto chunks = static_cast<int64_t>(core_.layout.chunks().size());
  std::vector<TrialUpdate> trials(chunks);
  core_.environment.tasks->ForEach(chunks, [&](int64_t index) {
    const int chunk = static_cast<int>(index);
    if (draft.bounds[core_.layout.chunks()[chunk].group].finite()) return;
    trials[chunk] =
        TryUpdateChunk(executor_.UpdateOf(draft.update, chunk, memory_.store->Published(chunk)),
                       [&](int parameter) { return draft.update.update_counts[parameter]; });
  });
  for (StateBounds& bounds : draft.bounds) {
    // What is tried is measured, so these bounds begin at zero and become the largest magnitudes.
    if (!bounds.finite()) bounds = {.master = 0, .exp_avg = 0, .exp_avg_sq = 0};
  }
  // The first in the order of groups and of declaration, whichever chunk has it.
  std::optional<ChunkPiece> first;
  const auto place = [&](const ChunkPiece& piece) {
    return std::tuple(core_.layout.chunks()[piece.chunk].group, piece.parameter,
                      piece.parameter_offset);
  };
  for (int chunk = 0; chunk < static_cast<int>(chunks); ++chunk) {
    const TrialUpdate& trial = trials[chunk];
    if (trial.non_finite.has_value()) {
      const ChunkPiece found = core_.layout.PieceAt(chunk, trial.non_finite->element);
      if (!first.has_value() || place(found) < place(*first)) first = found;
      continue;
    }
    if (!trial.largest.finite()) continue;  // It was not tried.
    StateBounds& bounds = draft.bounds[core_.layout.chunks()[chunk].group];
    bounds.master = std::max(bounds.master, trial.largest.master);
    bounds.exp_avg = std::max(bounds.exp_avg, trial.largest.exp_avg);
    bounds.exp_avg_sq = std::max(bounds.exp_avg_sq, trial.largest.exp_avg_sq);
  }
  if (!first.has_value()) return;
  draft.outcome.skip_reason = DescribeOverflow(draft, *first, *trials[first->chunk].non_finite);
  draft.outcome.skip_cause = SkipCause::kState;
  draft.outcome.decision.apply = false;
  draft.outcome.decision.multipliers.clear();
}

std::string Decider::DescribeOverflow(const Draft& draft, const ChunkPiece& piece,
                                      const TrialUpdate::NonFinite& found) const {
  const Chunk& chunk = core_.layout.chunks()[piece.chunk];
  const GradientView gradient = memory_.gradients->view(piece.chunk);
  return ToString(Overflow{.plane = Name(found.plane),
                           .parameter = core_.spec().layout.parameters[piece.parameter].name,
                           .element = piece.parameter_offset,
                           .value = found.value,
                           .rank = chunk.rank,
                           .gradient = LoadElement(gradient.data, gradient.dtype, found.element),
                           .multiplier = draft.update.multipliers[chunk.group]});
}

Draft Decider::MakeDraft() const {
  const absl::Span<const double> group_sums = *machine_.lead()->group_sums();
  Draft draft = DecideStep(Facts(FirstNonFinite()));
  if (!draft.outcome.decision.apply) return draft;
  for (int group = 0; group < core_.layout.group_count(); ++group) {
    draft.bounds.push_back(BoundsAfter(core_.bounds.empty() ? StateBounds() : core_.bounds[group],
                                       draft.update.hyper_parameters[group], group_sums[group],
                                       draft.update.multipliers[group]));
  }
  return draft;
}

std::string Decider::FirstNonFinite() const {
  const std::vector<double>& sums = *machine_.lead()->group_sums();
  const auto is_finite = [](double sum) { return std::isfinite(sum); };
  if (std::all_of(sums.begin(), sums.end(), is_finite)) return "";
  // It may find none: a rank can still write to memory that it shares after the sums were computed.
  const std::optional<ChunkPiece> found = memory_.gradients->FirstNonFinite();
  if (!found.has_value()) return "";
  // Nearer to the cause than what has been summed over ranks.
  if (const std::optional<NonFiniteReport>& report = machine_.part().non_finite();
      report.has_value()) {
    return absl::StrCat(
        "gradient of ", core_.spec().layout.parameters[report->found.parameter].name, " is ",
        report->found.value, " at element ", report->found.element, ", found on rank ",
        report->rank, " in micro-step ", report->micro_step, " before reducing");
  }
  const GradientView gradient = memory_.gradients->view(found->chunk);
  return absl::StrCat("gradient of ", core_.spec().layout.parameters[found->parameter].name, " is ",
                      LoadElement(gradient.data, gradient.dtype, found->chunk_offset),
                      " at element ", found->parameter_offset, ", from rank ",
                      core_.layout.chunks()[found->chunk].rank);
}

}  // namespace ballast
