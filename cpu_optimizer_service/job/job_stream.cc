// What a rank says in a step, up to the last seal.
#include "cpu_optimizer_service/job/job_stream.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <map>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/job_impl.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {
namespace {

// Names are listed up to this many; the rest is counted.
constexpr size_t kMaxNames = 16;

std::string ListNames(const std::vector<std::string>& names) {
  const size_t shown = std::min(names.size(), kMaxNames);
  std::string text = absl::StrJoin(names.begin(), names.begin() + shown, ", ");
  if (shown < names.size()) absl::StrAppend(&text, " and ", names.size() - shown, " more");
  return text;
}

absl::Status CheckScale(const GradientScale& scale, int group_count) {
  if (!std::isfinite(scale.loss_scale) || scale.loss_scale <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("loss_scale is ", scale.loss_scale, ", must be finite and positive"));
  }
  if (!scale.divisors.empty() && static_cast<int>(scale.divisors.size()) != group_count) {
    return absl::InvalidArgumentError(absl::StrCat("there are ", scale.divisors.size(),
                                                   " divisors, expected one for each of ",
                                                   group_count, " groups, or none"));
  }
  for (int group = 0; group < group_count; ++group) {
    const double divisor = scale.divisors.empty() ? 1.0 : scale.divisors[group];
    const double multiplier = 1.0 / (scale.loss_scale * divisor);
    if (!(divisor > 0) || !(multiplier >= FLT_MIN) || !(multiplier <= FLT_MAX)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "divisor ", divisor, " of group ", group,
          " is not positive, or leaves no fp32 multiplier with loss_scale ", scale.loss_scale));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<OpenStep*> JobImpl::FindOpenStep(uint64_t step) {
  auto* open = std::get_if<OpenStep>(&step_);
  if (open == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", step, " of job ", spec_.name, " is not open; the job stands at step ",
        committed_step_, step == committed_step_ + 1 ? "; it has not begun, or is sealed" : ""));
  }
  if (open->terms().step != step) {
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", step, " of job ", spec_.name, " is not open; step ", open->terms().step, " is"));
  }
  return open;
}

absl::StatusOr<StepTerms> JobImpl::MakeTerms(uint64_t step, const StepSettings& settings) const {
  StepTerms terms = {.step = step, .settings = settings, .hyper_parameters = hyper_parameters_};
  BALLAST_RETURN_IF_ERROR(CheckScale(settings.scale, layout_.group_count()));
  for (const auto& [group, overrides] : settings.overrides) {
    if (group < 0 || group >= layout_.group_count()) {
      return absl::InvalidArgumentError(
          absl::StrCat("overrides name group ", group, " of ", layout_.group_count()));
    }
    terms.hyper_parameters[group] = Apply(terms.hyper_parameters[group], overrides);
    BALLAST_RETURN_IF_ERROR(Annotate(Validate(terms.hyper_parameters[group]),
                                     absl::StrCat("group ", spec_.groups[group].name)));
  }
  return terms;
}

absl::Status JobImpl::BeginStep(const StreamKey& key, uint64_t step, const StepSettings& settings) {
  MutexLock lock(mutex_);
  while (clearing_) changed_.Wait(mutex_);
  BALLAST_RETURN_IF_ERROR(CheckCurrent(key));
  if (settings.trainer_state.size() > kMaxTrainerStateBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", key.rank, " begins step ", step, " with a trainer_state of ",
        settings.trainer_state.size(), " bytes, of ", kMaxTrainerStateBytes, " at most"));
  }
  if (weights_missing_ > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", spec_.name, " has no weights yet: ", weights_missing_, " of ",
                     layout_.chunks().size(), " chunks have not been uploaded"));
  }
  if (step != committed_step_ + 1 || std::holds_alternative<SealedStep>(step_) ||
      std::holds_alternative<DecidedStep>(step_)) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", key.rank, " begins step ", step, " but job ", spec_.name,
                     " stands at step ", committed_step_, deciding_ ? " and is updating" : ""));
  }
  if (std::holds_alternative<std::monostate>(step_)) {
    if (environment_.draining->load()) {
      return absl::UnavailableError("the service is stopping and begins no new steps");
    }
    BALLAST_ASSIGN_OR_RETURN(StepTerms terms, MakeTerms(step, settings));
    guess_ = CanSpeculate() ? MakeGuess(terms) : nullptr;
    guessed_squared_norm_ = 0;
    step_ = OpenStep(std::move(terms), layout_.world_size(),
                     static_cast<int64_t>(spec_.layout.parameters.size()));
    trace_.Mark(TraceEventKind::kBegun, step);
  }
  return std::get<OpenStep>(step_).Begin(key.rank, settings);
}

absl::Status JobImpl::CheckUsed(int rank, const UsedParameters& used) const {
  const auto is_trainable = [&](int parameter) {
    return parameter >= 0 && parameter < static_cast<int>(spec_.layout.parameters.size()) &&
           spec_.layout.parameters[parameter].trainable;
  };
  for (const int parameter : used.parameters) {
    if (is_trainable(parameter)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " names parameter ", parameter,
                     " as used, which is not a trainable parameter of job ", spec_.name));
  }
  if (!used.non_finite.has_value()) return absl::OkStatus();
  const auto [parameter, element, value] = *used.non_finite;
  const bool is_one = is_trainable(parameter) && element >= 0 &&
                      element < layout_.place(parameter).elements && !std::isfinite(value);
  if (is_one) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", rank, " reports a non-finite gradient that is none: ", value,
                   " at element ", element, " of parameter ", parameter, " of job ", spec_.name));
}

absl::Status JobImpl::EndMicroStep(const StreamKey& key, uint64_t step, uint32_t micro_step,
                                   UsedParameters used) {
  BALLAST_RETURN_IF_ERROR(CheckUsed(key.rank, used));
  // Of no elements: backward may name them or not, and has not reached anything by that.
  std::erase_if(used.parameters,
                [&](int parameter) { return layout_.place(parameter).elements == 0; });
  MutexLock lock(mutex_);
  BALLAST_RETURN_IF_ERROR(CheckCurrent(key));
  BALLAST_ASSIGN_OR_RETURN(OpenStep * open, FindOpenStep(step));
  return open->EndMicroStep(key.rank, micro_step, used);
}

// ---------------------------------------------------------------- sealing

std::optional<SealRefusal> JobImpl::CheckRankIsWhole(const OpenStep& open, int rank,
                                                     uint32_t micro_steps) const {
  const uint64_t step = open.terms().step;
  std::map<uint32_t, absl::flat_hash_set<int>> missing;  // Parameters by first missing micro-step.
  int closed = -1;                                       // A chunk that can be sent no more.
  for (const int chunk : layout_.chunks_of_rank(rank)) {
    const uint32_t next = ledger_.next_micro_step(chunk);
    if (next > micro_steps) {
      return SealRefusal{absl::FailedPreconditionError(absl::StrCat(
                             "rank ", rank, " seals ", micro_steps, " micro-steps of step ", step,
                             " but has sent chunk ", chunk, " up to micro-step ", next)),
                         {}};
    }
    if (next == micro_steps) continue;
    if (ledger_.closed(chunk)) closed = chunk;
    auto& parameters = missing[next];
    for (const ChunkPiece& piece : layout_.Pieces(chunk)) parameters.insert(piece.parameter);
  }
  if (missing.empty()) return std::nullopt;
  SealRefusal refusal;
  for (const auto& [micro_step, parameters] : missing) {
    MissingContribution& entry = refusal.missing.emplace_back();
    entry.rank = rank;
    entry.micro_step = micro_step;
    std::vector<int> sorted(parameters.begin(), parameters.end());
    std::sort(sorted.begin(), sorted.end());
    for (const int parameter : sorted) {
      entry.parameters.push_back(spec_.layout.parameters[parameter].name);
    }
  }
  const MissingContribution& first = refusal.missing.front();
  refusal.status = absl::FailedPreconditionError(
      absl::StrCat("step ", step, " is not whole: rank ", rank, " has not sent micro-step ",
                   first.micro_step, " of ", ListNames(first.parameters),
                   closed == -1 ? "; send it and seal again"
                                : absl::StrCat("; chunk ", closed,
                                               " was closed by a final contribution, so "
                                               "abort the step and redo it")));
  return refusal;
}

std::optional<SealRefusal> JobImpl::CheckStepIsWhole(const OpenStep& open, int last_rank) const {
  const uint64_t step = open.terms().step;
  if (const int other = open.RankThatDisagrees(last_rank); other != -1) {
    return SealRefusal{absl::FailedPreconditionError(absl::StrCat(
                           "step ", step, ": rank ", last_rank, " sealed ",
                           *open.ranks()[last_rank].sealed, " micro-steps and rank ", other, " ",
                           *open.ranks()[other].sealed, "; all ranks must seal the same number")),
                       {}};
  }
  for (int group = 0; group < layout_.group_count(); ++group) {
    const int64_t end = layout_.flat_elements(group);
    int64_t padding = end;
    while (padding > 0 && layout_.ParameterAt(group, padding - 1) == -1) --padding;
    if (const int chunk = ChunkWithGradient(group, padding, end); chunk != -1) {
      return SealRefusal{
          absl::FailedPreconditionError(absl::StrCat(
              "step ", step, ": rank ", layout_.chunks()[chunk].rank, " sent chunk ", chunk,
              " with a gradient in the padding of group ", spec_.groups[group].name,
              "; padding must be zero; abort the step and redo it")),
          {}};
    }
  }
  if (auto refused = CheckEmpties(open)) return refused;
  return CheckParameters(open, last_rank);
}

std::optional<SealRefusal> JobImpl::CheckParameters(const OpenStep& open, int last_rank) const {
  const uint64_t step = open.terms().step;
  std::vector<std::string> unused;
  for (int p = 0; p < static_cast<int>(spec_.layout.parameters.size()); ++p) {
    const ParameterSpec& parameter = spec_.layout.parameters[p];
    const ParameterPlace& place = layout_.place(p);
    if (!parameter.trainable || place.elements == 0) continue;
    if (open.used(p)) continue;
    unused.push_back(parameter.name);
    const int chunk =
        ChunkWithGradient(parameter.group, place.offset, place.offset + place.elements);
    if (chunk == -1) continue;
    const int owner = layout_.chunks()[chunk].rank;
    return SealRefusal{absl::FailedPreconditionError(absl::StrCat(
                           "step ", step, ": parameter ", parameter.name,
                           " was declared unused by all ranks, but has a gradient (chunk ", chunk,
                           " from rank ", owner, "); abort the step and redo it")),
                       {{.rank = owner, .micro_step = 0, .parameters = {parameter.name}}}};
  }
  if (unused.empty() || spec_.unused_policy != UnusedPolicy::kError) return std::nullopt;
  return SealRefusal{
      absl::FailedPreconditionError(absl::StrCat(
          "step ", step, ": no rank gave a gradient to ", ListNames(unused),
          " in any micro-step; abort the step; if that is meant, create the job with unused_policy "
          "skip or zero")),
      {{.rank = last_rank, .micro_step = 0, .parameters = unused}}};
}

int JobImpl::ChunkWithGradient(int group, int64_t begin, int64_t end) const {
  for (int64_t at = begin; at < end;) {
    const int index = layout_.ChunkAt(group, at);
    const Chunk& chunk = layout_.chunks()[index];
    const int64_t chunk_end = std::min(end, chunk.begin + chunk.elements);
    if (HasGradient(index, at, chunk_end)) return index;
    at = chunk_end;
  }
  return -1;
}

bool JobImpl::HasGradient(int index, int64_t begin, int64_t end) const {
  if (gradients_->is_zero(index)) return false;
  const Chunk& chunk = layout_.chunks()[index];
  const absl::Span<const double> sums = gradients_->block_sums(chunk.group);
  const bool sums_current = sums_[index] == SumsState::kCurrent;
  const GradientView gradient = gradients_->view(index);
  for (int64_t i = begin; i < end;) {
    // No square of a gradient that is not zero is lost in a double. Parameters may be large, and
    // nobody else gets at the job meanwhile.
    if (i % kBlockElements == 0 && end - i >= kBlockElements) {
      double sum = 0;
      if (sums_current) {
        sum = sums[i / kBlockElements];
      } else {
        const auto* data = static_cast<const std::byte*>(gradient.data) +
                           (i - chunk.begin) * SizeBytes(gradient.dtype);
        BlockSumsOfSquares(data, gradient.dtype, {&sum, 1});
      }
      if (sum != 0) return true;
      i += kBlockElements;
      continue;
    }
    if (LoadElement(gradient.data, gradient.dtype, i - chunk.begin) != 0) return true;
    ++i;
  }
  return false;
}

// A reopened stream carries the last seal again, of which its client does not know that it was
// taken. By the time it is read, the other ranks may have sealed, the step been committed, and the
// next begun.
bool JobImpl::HasTakenSeal(uint64_t step, uint32_t micro_steps) const {
  if (step == committed_step_) {
    return !recent_steps_.empty() && recent_steps_.back().outcome.step == step &&
           recent_steps_.back().micro_steps == micro_steps;
  }
  const auto is_it = [&](const auto& sealed) {
    return sealed != nullptr && sealed->terms().step == step &&
           sealed->micro_steps() == micro_steps;
  };
  return is_it(std::get_if<SealedStep>(&step_)) || is_it(std::get_if<DecidedStep>(&step_));
}

absl::StatusOr<std::optional<SealRefusal>> JobImpl::Seal(const StreamKey& key, uint64_t step,
                                                         uint32_t micro_steps) {
  if (micro_steps == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", key.rank, " seals step ", step, " with no micro-steps"));
  }
  Listeners others;
  SealRefusal refusal;
  {
    MutexLock lock(mutex_);
    BALLAST_RETURN_IF_ERROR(CheckCurrent(key));
    if (HasTakenSeal(step, micro_steps)) return std::nullopt;
    BALLAST_ASSIGN_OR_RETURN(OpenStep * open, FindOpenStep(step));
    if (open->ranks()[key.rank].sealed == micro_steps) return std::nullopt;
    open->Unseal(key.rank);  // Its last word counts; until it is taken the rank has not sealed.
    if (auto refused = CheckBackwardReached(*open, key.rank)) return refused;
    if (auto refused = CheckRankIsWhole(*open, key.rank, micro_steps)) return refused;
    if (absl::Status status = open->Seal(key.rank, micro_steps); !status.ok()) {
      return SealRefusal{status, {}};
    }
    if (!open->UnsealedRanks().empty()) return std::nullopt;
    auto refused = CheckStepIsWhole(*open, key.rank);
    if (!refused.has_value()) {
      SealedStep sealed = std::move(*open).Close();
      step_ = std::move(sealed);
      sealed_ns_ = trace_.Begin(step);
      StartDecisionIfDue();
      return std::nullopt;
    }
    refusal = *std::move(refused);
    open->UnsealAll();
    for (int rank = 0; rank < layout_.world_size(); ++rank) {
      if (rank != key.rank && ranks_[rank].listener != nullptr) {
        others.push_back(ranks_[rank].listener);
      }
    }
  }
  for (const auto& listener : others) listener->OnSealRefused(step, refusal);
  return refusal;
}

}  // namespace ballast
