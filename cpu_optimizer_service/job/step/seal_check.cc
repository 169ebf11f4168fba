#include "cpu_optimizer_service/job/step/seal_check.h"

#include <cfloat>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/job/step/step_report.h"

namespace ballast {
namespace {

void AddName(MissingContribution& to, const std::string& name) {
  if (to.parameters.size() < kMissingNames) {
    to.parameters.push_back(name);
  } else {
    ++to.more_parameters;
  }
}

std::string ListNames(const MissingContribution& missing) {
  std::string text = absl::StrJoin(missing.parameters, ", ");
  if (missing.more_parameters > 0) {
    absl::StrAppend(&text, " and ", missing.more_parameters, " more");
  }
  return text;
}

// A refusal, if it is one, with its reason.
std::optional<SealRefusal> Because(absl::string_view reason, std::optional<SealRefusal> refusal) {
  if (refusal.has_value()) refusal->status = WithReason(std::move(refusal->status), reason);
  return refusal;
}

std::optional<SealRefusal> CheckBackwardReached(const StepGiven& given, int rank) {
  const std::optional<uint32_t> micro_step = given.part.rank(rank).reached_nothing;
  // The other policies let a worker declare that it used none.
  if (!micro_step.has_value() || given.spec.unused_policy != UnusedPolicy::kError)
    return std::nullopt;
  MissingContribution missing = {.rank = rank, .micro_step = *micro_step, .parameters = {}};
  // A job of which no trainable parameter has elements has none that backward could reach.
  for (int p = 0; p < static_cast<int>(given.spec.layout.parameters.size()); ++p) {
    const ParameterSpec& parameter = given.spec.layout.parameters[p];
    if (!parameter.trainable || given.layout.place(p).elements == 0) continue;
    AddName(missing, parameter.name);
  }
  if (missing.parameters.empty()) return std::nullopt;
  const int64_t count = static_cast<int64_t>(missing.parameters.size()) + missing.more_parameters;
  const bool more = missing.more_parameters > 0;
  absl::Status status = absl::FailedPreconditionError(absl::StrCat(
      "step ", given.agreement.step(), ": rank ", rank, ", micro-step ", *micro_step,
      ": backward reached none of its ", count, " parameters (",
      absl::StrJoin(missing.parameters, ", "), more ? ", ..." : "",
      "); find out why its hooks did not fire, abort the step and redo it; if this is intended, "
      "create the job with unused_policy skip or zero"));
  return SealRefusal{std::move(status), {std::move(missing)}};
}

std::optional<SealRefusal> CheckRankIsWhole(const StepGiven& given, int rank,
                                            uint32_t micro_steps) {
  const uint64_t step = given.agreement.step();
  // By micro-step, because a refusal names the first ones. Parameters are a set: they may lie in
  // several chunks.
  std::map<uint32_t, std::set<int>> missing;  // Parameters by first missing micro-step.
  int closed = -1;                            // A chunk that can be sent no more.
  for (const int chunk : given.layout.chunks_of_rank(rank)) {
    const uint32_t next = given.part.ledger().next_micro_step(chunk);
    if (next > micro_steps) {
      return Because(
          reason::kSendAndSealAgain,
          SealRefusal{absl::FailedPreconditionError(absl::StrCat(
                          "rank ", rank, " seals ", micro_steps, " micro-steps of step ", step,
                          " but has sent chunk ", chunk, " up to micro-step ", next)),
                      {}});
    }
    if (next == micro_steps) continue;
    // A final contribution promised that nothing follows: what is missing cannot be sent any more.
    if (given.part.ledger().closed(chunk)) closed = chunk;
    auto& parameters = missing[next];
    given.layout.VisitParts(chunk, [&](const ChunkPart& part) {
      // What is missing is all of a chunk, and with it a part of each parameter in it.
      parameters.insert(part.parameter);
      return true;
    });
  }
  if (missing.empty()) return std::nullopt;
  SealRefusal refusal;
  for (const auto& [micro_step, parameters] : missing) {
    if (refusal.missing.size() == kMissingEntries) break;
    MissingContribution& entry = refusal.missing.emplace_back();
    entry.rank = rank;
    entry.micro_step = micro_step;
    for (const int parameter : parameters) {
      AddName(entry, given.spec.layout.parameters[parameter].name);
    }
  }
  const MissingContribution& first = refusal.missing.front();
  refusal.status = absl::FailedPreconditionError(
      absl::StrCat("step ", step, " is incomplete: rank ", rank, " has not sent micro-step ",
                   first.micro_step, " of ", ListNames(first),
                   closed == -1 ? "; send it and seal again"
                                : absl::StrCat("; chunk ", closed,
                                               " was closed by a final contribution, so "
                                               "abort the step and redo it")));
  return Because(closed == -1 ? reason::kSendAndSealAgain : reason::kAbortAndRedo,
                 std::move(refusal));
}

// A chunk that has a non-zero gradient of the parameter, or -1.
int ChunkWithGradient(const StepGiven& given, int parameter, HasGradient has_gradient) {
  int found = -1;
  given.layout.VisitRange(parameter, 0, given.layout.place(parameter).elements,
                          [&](const ChunkPiece& piece) {
                            // Further pieces are not looked at: a gradient may be large.
                            if (found == -1 && has_gradient(piece)) found = piece.chunk;
                          });
  return found;
}

// A chunk that came as empty for a micro-step in which one of its parameters was used.
std::optional<SealRefusal> CheckEmpties(const StepGiven& given) {
  std::optional<SealRefusal> refusal;
  for (const auto& of_chunk : given.part.empties()) {
    const int chunk = of_chunk.first;
    given.layout.VisitParts(chunk, [&](const ChunkPart& part) {
      // An empty contribution counts as zeros. Where a parameter was used, zeros would take the
      // place of its gradient.
      for (const auto& [begin, end] : of_chunk.second) {
        const std::optional<uint32_t> micro_step = given.uses.FirstUse(part.parameter, begin, end);
        if (!micro_step.has_value()) continue;
        const std::string& name = given.spec.layout.parameters[part.parameter].name;
        const int owner = given.layout.chunks()[chunk].rank;
        refusal = SealRefusal{absl::FailedPreconditionError(absl::StrCat(
                                  "step ", given.agreement.step(), ": parameter ", name,
                                  " received a gradient in micro-step ", *micro_step,
                                  ", but was sent as empty (chunk ", chunk, " from rank ", owner,
                                  "); abort the step and redo it")),
                              {{.rank = owner, .micro_step = *micro_step, .parameters = {name}}}};
        return false;
      }
      return true;
    });
    if (refusal.has_value()) break;
  }
  return refusal;
}

std::optional<SealRefusal> CheckParameters(const StepGiven& given, int last_rank,
                                           HasGradient has_gradient) {
  const uint64_t step = given.agreement.step();
  MissingContribution unused = {.rank = last_rank, .micro_step = 0, .parameters = {}};
  for (int p = 0; p < static_cast<int>(given.spec.layout.parameters.size()); ++p) {
    const ParameterSpec& parameter = given.spec.layout.parameters[p];
    if (!IsUnused(given.spec, given.layout, given.uses, p)) continue;
    AddName(unused, parameter.name);
    // Under every policy: a gradient that is there contradicts what all ranks have declared.
    // It reads the gradient itself, under the job's lock, so it is not asked of all parameters.
    const int chunk = ChunkWithGradient(given, p, has_gradient);
    if (chunk == -1) continue;
    const int owner = given.layout.chunks()[chunk].rank;
    return SealRefusal{absl::FailedPreconditionError(absl::StrCat(
                           "step ", step, ": parameter ", parameter.name,
                           " was declared unused by all ranks, but has a gradient (chunk ", chunk,
                           " from rank ", owner, "); abort the step and redo it")),
                       {{.rank = owner, .micro_step = 0, .parameters = {parameter.name}}}};
  }
  if (unused.parameters.empty() || given.spec.unused_policy != UnusedPolicy::kError)
    return std::nullopt;
  return SealRefusal{
      absl::FailedPreconditionError(absl::StrCat(
          "step ", step, ": no rank gave a gradient to ", ListNames(unused),
          " in any micro-step; abort the step; if this is intended, create the job with "
          "unused_policy skip or zero")),
      {std::move(unused)}};
}

}  // namespace

SealRefusal RefuseDiscarded(uint64_t step, int rank, uint32_t attempt, int by) {
  return {.status = WithReason(
              absl::FailedPreconditionError(absl::StrCat(
                  "step ", step, ": rank ", rank, " seals attempt ", attempt, ", which rank ", by,
                  " has discarded", by == rank ? "" : "; discard it too, and give the step again")),
              reason::kDiscardAndRedo),
          .missing = {},
          .attempt = attempt};
}

std::optional<SealRefusal> CheckRank(const StepGiven& given, int rank, uint32_t micro_steps) {
  if (!given.agreement.IsLive(rank)) {
    return RefuseDiscarded(given.agreement.step(), rank, given.agreement.ranks()[rank].attempt,
                           given.agreement.live_since());
  }
  if (auto refused = CheckBackwardReached(given, rank)) {
    return Because(reason::kAbortAndRedo, std::move(refused));
  }
  return CheckRankIsWhole(given, rank, micro_steps);
}

std::optional<SealRefusal> CheckPart(const StepGiven& given, int last_rank,
                                     HasGradient has_gradient) {
  const uint64_t step = given.agreement.step();
  // Before all others: what each rank gave is whole by the number that it sealed itself, and only
  // equal numbers make a step.
  if (const int other = given.agreement.RankThatDisagrees(last_rank); other != -1) {
    return Because(
        reason::kSendAndSealAgain,
        SealRefusal{
            absl::FailedPreconditionError(absl::StrCat(
                "step ", step, ": rank ", last_rank, " sealed ",
                *given.agreement.ranks()[last_rank].sealed, " micro-steps and rank ", other, " ",
                *given.agreement.ranks()[other].sealed, "; all ranks must seal the same number")),
            {}});
  }
  // Elements of the padding would count in no norm, and show that the ranks have another layout.
  for (const ChunkPiece& padding : given.layout.padding()) {
    if (!has_gradient(padding)) continue;
    const Chunk& chunk = given.layout.chunks()[padding.chunk];
    return Because(reason::kAbortAndRedo,
                   SealRefusal{absl::FailedPreconditionError(absl::StrCat(
                                   "step ", step, ": rank ", chunk.rank, " sent chunk ",
                                   padding.chunk, " with a gradient in the padding of group ",
                                   given.spec.groups[chunk.group].name,
                                   "; padding must be zero; abort the step and redo it")),
                               {}});
  }
  return std::nullopt;
}

std::optional<SealRefusal> CheckUses(const StepGiven& given, int last_rank,
                                     HasGradient has_gradient) {
  auto refused = CheckEmpties(given);
  if (!refused.has_value()) refused = CheckParameters(given, last_rank, has_gradient);
  return Because(reason::kAbortAndRedo, std::move(refused));
}

std::vector<std::string> NamesBehind(const JobSpec& spec, const Layout& layout,
                                     const Ledger& ledger, int rank, uint32_t micro_step) {
  std::vector<std::string> names;
  int last =
      -1;  // The rank's chunks have parameters in their order, so only this one may come again.
  for (const int index : layout.chunks_of_rank(rank)) {
    if (ledger.next_micro_step(index) == micro_step) continue;
    // No further than needed, since a chunk may hold a quarter of a million of them.
    layout.VisitParts(index, [&](const ChunkPart& part) {
      if (part.parameter != last) names.push_back(spec.layout.parameters[part.parameter].name);
      last = part.parameter;
      return names.size() < kMissingNames;
    });
    if (names.size() == kMissingNames) break;
  }
  return names;
}

absl::Status CheckScale(const GradientScale& scale, int group_count) {
  if (!std::isfinite(scale.loss_scale) || scale.loss_scale <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("loss_scale is ", scale.loss_scale, "; expected a finite, positive value"));
  }
  if (!scale.divisors.empty() && static_cast<int>(scale.divisors.size()) != group_count) {
    return absl::InvalidArgumentError(absl::StrCat("there are ", scale.divisors.size(),
                                                   " divisors, expected one for each of ",
                                                   group_count, " groups, or none"));
  }
  for (int group = 0; group < group_count; ++group) {
    const double divisor = scale.divisors.empty() ? 1.0 : scale.divisors[group];
    // Written so that NaN fails too: every comparison with it is false.
    // Below FLT_MIN it would be denormal in fp32, which the update takes for zero (common/rules/arithmetic.h).
    const double multiplier = 1.0 / (scale.loss_scale * divisor);
    if (!(divisor > 0) || !(multiplier >= FLT_MIN) || !(multiplier <= FLT_MAX)) {
      return absl::InvalidArgumentError(
          absl::StrCat("divisor ", divisor, " of group ", group,
                       " is not positive, or gives a multiplier outside fp32 with loss_scale ",
                       scale.loss_scale));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckUsed(const JobSpec& spec, const Layout& layout, int rank,
                       const UsedParameters& used) {
  const auto is_trainable = [&](int parameter) {
    return parameter >= 0 && parameter < static_cast<int>(spec.layout.parameters.size()) &&
           spec.layout.parameters[parameter].trainable;
  };
  for (const int parameter : used.parameters) {
    if (is_trainable(parameter)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " names parameter ", parameter,
                     " as used, which is not a trainable parameter of job ", spec.name));
  }
  if (!used.non_finite.has_value()) return absl::OkStatus();
  const auto [parameter, element, value] = *used.non_finite;
  const bool is_one = is_trainable(parameter) && element >= 0 &&
                      element < layout.place(parameter).elements && !std::isfinite(value);
  if (is_one) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "rank ", rank, " reports a non-finite gradient that is finite or out of range: ", value,
      " at element ", element, " of parameter ", parameter, " of job ", spec.name));
}

}  // namespace ballast
