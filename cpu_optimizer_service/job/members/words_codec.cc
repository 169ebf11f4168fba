#include "cpu_optimizer_service/job/members/words_codec.h"

#include <algorithm>
#include <concepts>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/host/kept_codec.h"
#include "cpu_optimizer_service/job/core/fields.h"

namespace ballast {

template <typename Each>
inline constexpr bool kWrites = std::same_as<std::remove_cvref_t<Each>, KeptWriter>;

template <typename Each>
void Fields(Each&& each, absl::Status& v) {
  int code = static_cast<int>(v.code());
  std::string message(v.message());
  std::string why = ReasonOf(v);
  each(code, message, why);
  if constexpr (!kWrites<Each>) {
    v = absl::Status(static_cast<absl::StatusCode>(code), message);
    if (!why.empty()) v = WithReason(std::move(v), why);
  }
}
template <typename Each>
void Fields(Each&& each, ExactSum& v) {
  ExactSum::Words words = v.words();
  each(words);
  if constexpr (!kWrites<Each>) v = ExactSum::FromWords(words);
}
template <typename Each>
void Fields(Each&& each, StepUses& v) {
  StepUses::Sent sent = v.ToSent();
  int64_t parameters = v.parameters();
  each(sent.sets, sent.uses, parameters);
  if constexpr (!kWrites<Each>) {
    // Others have the size that is refused below.
    const bool fits = parameters >= 0 && parameters <= kMaxParameters;
    v = StepUses::FromSent(fits ? parameters : 0, sent).value_or(StepUses());
  }
}
template <typename Each>
void Fields(Each&& each, CutRun& v) {
  each(v.parameter, v.begin, v.values);
}
template <typename Each>
void Fields(Each&& each, PartSums& v) {
  each(v.groups, v.cut);
}
template <typename Each>
void Fields(Each&& each, GradientElement& v) {
  each(v.parameter, v.element, v.value, v.rank);
}
template <typename Each>
void Fields(Each&& each, NonFiniteReport& v) {
  each(v.rank, v.micro_step, v.found);
}
template <typename Each>
void Fields(Each&& each, StepReport& v) {
  each(v.micro_steps, v.sums, v.uses, v.has_empties, v.non_finite, v.before_reducing);
}
template <typename Each>
void Fields(Each&& each, MissingContribution& v) {
  each(v.rank, v.micro_step, v.parameters, v.more_parameters);
}
template <typename Each>
void Fields(Each&& each, SealRefusal& v) {
  each(v.status, v.missing, v.attempt);
}
template <typename Each>
void Fields(Each&& each, StateBounds& v) {
  each(v.planes);
}
template <typename Each>
void Fields(Each&& each, StateOverflow& v) {
  each(v.plane, v.value, v.gradient);
}
template <typename Each>
void Fields(Each&& each, StepNorm& v) {
  each(v.step, v.attempt, v.norm, v.group_norms, v.non_finite, v.unused_parameters,
       v.more_unused_parameters);
}
template <typename Each>
void Fields(Each&& each, StepUpdate& v) {
  each(v.step, v.hyper_parameters, v.multipliers, v.update_counts);
}
template <typename Each>
void Fields(Each&& each, Draft& v) {
  each(v.outcome, v.update, v.bounds);
}
template <typename Each>
void Fields(Each&& each, ElementRun& v) {
  each(v.begin, v.elements, v.count, v.stride);
}
template <typename Each>
void Fields(Each&& each, ElementRuns& v) {
  std::vector<ElementRun> runs(v.runs().begin(), v.runs().end());
  each(runs);
  // No tensor has those of an absurd cut.
  if constexpr (!kWrites<Each>) {
    if (!v.Read(runs)) v = {};
  }
}
template <typename Each>
void Fields(Each&& each, WrittenFile& v) {
  each(v.size_bytes, v.crc32);
}
template <typename Each>
void Fields(Each&& each, CheckpointIndex::File& v) {
  each(v.plane, v.name, v.written, v.cut);
}
template <typename Each>
void Fields(Each&& each, FirstState& v) {
  each(v.step, v.update_counts);
}
template <typename Each>
void Fields(Each&& each, Follow& v) {
  each(v.uid, v.spec, v.member, v.is_new, v.creation);
}
template <typename Each>
void Fields(Each&& each, MemberWord::Seat& v) {
  each(v.state, v.error, v.needed_bytes, v.free_bytes);
}
template <typename Each>
void Fields(Each&& each, MemberWord::Standing& v) {
  each(v.generation, v.committed_step, v.has_weights, v.loads, v.first_state, v.fits_any_state,
       v.all_have_begun, v.attempt, v.by, v.settings, v.wants_discard);
}
template <typename Each>
void Fields(Each&& each, MemberWord::Report& v) {
  each(v.number, v.attempt, v.report, v.vote);
}
template <typename Each>
void Fields(Each&& each, MemberWord::Checked& v) {
  each(v.round, v.refusal);
}
template <typename Each>
void Fields(Each&& each, MemberWord::Vote& v) {
  each(v.round, v.vote);
}
template <typename Each>
void Fields(Each&& each, MemberWord::Tried& v) {
  each(v.round, v.trial);
}
template <typename Each>
void Fields(Each&& each, MemberWord::Ask& v) {
  each(v.id, v.generation, v.committed_step, v.has_weights, v.give_up);
}
template <typename Each>
void Fields(Each&& each, MemberWord::Done& v) {
  each(v.task, v.round, v.status, v.files);
}
template <typename Each>
void Fields(Each&& each, MemberWord::NotLoaded& v) {
  each(v.loads, v.why);
}
template <typename Each>
void Fields(Each&& each, MemberWord::WantsSave& v) {
  each(v.id);
}
template <typename Each>
void Fields(Each&& each, MemberWord& v) {
  each(v.what);
}
template <typename Each>
void Fields(Each&& each, ToMember::Live& v) {
  each(v.attempt, v.by);
}
template <typename Each>
void Fields(Each&& each, ToMember::OtherSettings& v) {
  each(v.attempt, v.why);
}
template <typename Each>
void Fields(Each&& each, ToMember::Refused& v) {
  each(v.why);
}
template <typename Each>
void Fields(Each&& each, ToMember::CheckUses& v) {
  each(v.round, v.uses);
}
template <typename Each>
void Fields(Each&& each, LeadWord::OfStep::Norm& v) {
  each(v.round, v.norm);
}
template <typename Each>
void Fields(Each&& each, LeadWord::OfStep::VoteAgain& v) {
  each(v.round, v.norm, v.why);
}
template <typename Each>
void Fields(Each&& each, LeadWord::OfStep::Try& v) {
  each(v.round, v.draft);
}
template <typename Each>
void Fields(Each&& each, LeadWord::OfStep::Waits& v) {
  each(v.ranks, v.why);
}
template <typename Each>
void Fields(Each&& each, LeadWord::OfStep& v) {
  each(v.generation, v.step, v.what);
}
template <typename Each>
void Fields(Each&& each, LeadWord::Decided& v) {
  each(v.report, v.decision);
}
template <typename Each>
void Fields(Each&& each, LeadWord::Raised& v) {
  each(v.generation, v.why);
}
template <typename Each>
void Fields(Each&& each, LeadWord::Undo& v) {
  each(v.step, v.loads, v.generation, v.why);
}
template <typename Each>
void Fields(Each&& each, LeadWord::Answer& v) {
  each(v.id, v.refused, v.generation, v.committed_step, v.has_weights);
}
template <typename Each>
void Fields(Each&& /*each*/, LeadWord::Keep& /*v*/) {}
template <typename Each>
void Fields(Each&& each, LeadWord::Begin& v) {
  each(v.state);
}
template <typename Each>
void Fields(Each&& each, LeadWord::OtherStates& v) {
  each(v.why);
}
template <typename Each>
void Fields(Each&& each, LeadWord::Close& v) {
  each(v.why);
}
template <typename Each>
void Fields(Each&& each, LeadWord::Task::Pin& v) {
  each(v.step, v.loads, v.folder, v.asked_for);
}
template <typename Each>
void Fields(Each&& each, LeadWord::Task::Look& v) {
  each(v.directory);
}
template <typename Each>
void Fields(Each&& /*each*/, LeadWord::Task::Write& /*v*/) {}
template <typename Each>
void Fields(Each&& each, LeadWord::Task::Check& v) {
  each(v.name, v.weights_only, v.sha256);
}
template <typename Each>
void Fields(Each&& each, LeadWord::Task::End& v) {
  each(v.saved);
}
template <typename Each>
void Fields(Each&& each, LeadWord::Task& v) {
  each(v.id, v.what);
}
template <typename Each>
void Fields(Each&& each, LeadWord::Load& v) {
  each(v.loads, v.name, v.weights_only, v.sha256);
}
template <typename Each>
void Fields(Each&& each, LeadWord::Saved& v) {
  each(v.id, v.status, v.name, v.step, v.size_bytes);
}
template <typename Each>
void Fields(Each&& each, LeadWord& v) {
  each(v.what);
}

namespace {

// Whether what is used as an index, or goes through all groups or parameters, is of this job.
class Fit {
 public:
  explicit Fit(const JobSpec& spec) : spec_(spec) {}

  bool operator()(const MemberWord& word) const {
    if (const auto* seat = std::get_if<MemberWord::Seat>(&word.what)) {
      return seat->state <= MemberWord::Seat::State::kKept;
    }
    if (const auto* stands = std::get_if<MemberWord::Standing>(&word.what)) {
      const auto& state = stands->first_state;
      return (!state.has_value() || Validate(*state, spec_).ok()) &&
             stands->attempt < kMaxAttempts && (!stands->settings || Is(*stands->settings));
    }
    if (const auto* tried = std::get_if<MemberWord::Tried>(&word.what)) {
      return tried->trial.Fits(spec_);
    }
    if (const auto* vote = std::get_if<MemberWord::Vote>(&word.what)) return Is(vote->vote);
    if (const auto* done = std::get_if<MemberWord::Done>(&word.what)) {
      // The lead writes the names into the index.
      return std::ranges::all_of(done->files, [](const CheckpointIndex::File& file) {
        return IsFileOf(file.plane, file.name);
      });
    }
    const auto* report = std::get_if<MemberWord::Report>(&word.what);
    if (report == nullptr) return true;
    const auto& found = report->report.non_finite;
    const auto& before = report->report.before_reducing;
    return IsOfGroups(report->report.sums.groups) && Is(report->report.uses) &&
           (!found.has_value() || IsParameter(found->parameter)) &&
           (!before.has_value() || IsParameter(before->found.parameter)) &&
           (!report->vote.has_value() || Is(*report->vote)) &&
           std::ranges::all_of(report->report.sums.cut,
                               [&](const CutRun& run) { return IsParameter(run.parameter); });
  }
  bool operator()(const LeadWord& word) const {
    if (const auto* begin = std::get_if<LeadWord::Begin>(&word.what)) {
      return Validate(begin->state, spec_).ok();
    }
    if (const auto* decided = std::get_if<LeadWord::Decided>(&word.what)) {
      const KeptDecision& decision = decided->decision;
      const bool applies = decision.outcome.decision.apply;
      return (!applies || (IsOfGroups(decision.outcome.decision.multipliers) &&
                           IsOfParameters(decision.update_counts))) &&
             AreValuesOf(spec_, decision.hyper_parameters) &&
             AreValuesOf(spec_, decision.values_after) && Is(decision.vote) &&
             Is(decision.terms.settings) && decision.outcome.step == decision.terms.step &&
             static_cast<size_t>(decision.outcome.skip_cause) < kSkipCauses &&
             (decision.group_norms.empty() || IsOfGroups(decision.group_norms));
    }
    const auto* of_step = std::get_if<LeadWord::OfStep>(&word.what);
    if (of_step == nullptr) return true;
    if (const auto* check = std::get_if<ToMember::CheckUses>(&of_step->what)) {
      return Is(check->uses);
    }
    const auto* tried = std::get_if<LeadWord::OfStep::Try>(&of_step->what);
    return tried == nullptr ||
           (AreValuesOf(spec_, tried->draft.update.hyper_parameters) &&
            IsOfGroups(tried->draft.update.multipliers) && IsOfGroups(tried->draft.bounds) &&
            IsOfParameters(tried->draft.update.update_counts));
  }

 private:
  bool IsOfGroups(const auto& values) const { return values.size() == spec_.groups.size(); }
  bool IsOfParameters(const auto& values) const {
    return values.size() == spec_.layout.parameters.size();
  }
  bool Is(const StepSettings& settings) const { return AreGroups(settings.overrides); }
  bool Is(const StepVote& vote) const { return AreGroups(vote.overrides); }
  bool AreGroups(const auto& by_group) const {
    return std::ranges::all_of(by_group, [&](const auto& each) {
      return each.first >= 0 && each.first < static_cast<int>(spec_.groups.size());
    });
  }
  bool IsParameter(int parameter) const {
    return parameter >= 0 && parameter < static_cast<int>(spec_.layout.parameters.size());
  }
  bool Is(const StepUses& uses) const {
    return uses.parameters() == static_cast<int64_t>(spec_.layout.parameters.size());
  }

  const JobSpec& spec_;
};

template <typename Word>
std::string EncodeAny(const Word& word) {
  KeptWriter writer;
  writer(word);
  return writer.bytes();
}

template <typename Word>
absl::StatusOr<Word> DecodeAny(absl::string_view bytes, Word word) {
  KeptReader reader(bytes);
  reader(word);
  if (reader.at_end()) return word;
  return WithReason(
      absl::InvalidArgumentError(absl::StrCat(
          bytes.size(), " bytes on a link of members are no word of format ", kWordsFormat)),
      reason::kMalformedMessage);
}

template <typename Word>
absl::StatusOr<Word> DecodeOf(absl::string_view bytes, const JobSpec& spec, Word blank) {
  BALLAST_ASSIGN_OR_RETURN(Word word, DecodeAny(bytes, std::move(blank)));
  if (Fit(spec)(word)) return word;
  return WithReason(absl::InvalidArgumentError(absl::StrCat(
                        "a word on a link of members is not of job ", spec.name, " as it is here")),
                    reason::kMalformedMessage);
}

}  // namespace

std::string Encode(const Follow& follow) { return EncodeAny(follow); }
std::string Encode(const MemberWord& word) { return EncodeAny(word); }
std::string Encode(const LeadWord& word) { return EncodeAny(word); }

absl::StatusOr<Follow> DecodeFollow(absl::string_view bytes) {
  BALLAST_ASSIGN_OR_RETURN(Follow follow, DecodeAny(bytes, Follow()));
  const JobSpec& spec = follow.spec;
  const bool fits =
      spec.unused_policy <= UnusedPolicy::kZero && spec.update_mode <= UpdateMode::kSpeculate &&
      spec.on_abort <= OnAbort::kSkip &&
      std::ranges::all_of(
          spec.layout.states,
          [](const StateSpec& state) { return state.format <= StateFormat::k8Bit; }) &&
      std::ranges::all_of(spec.groups, [](const GroupSpec& group) {
        return group.wire_dtype <= DType::kFloat32 && group.return_dtype <= DType::kFloat32 &&
               static_cast<size_t>(group.hyper_parameters.rule) < Rules().size();
      });
  if (fits) return follow;
  return WithReason(absl::InvalidArgumentError("a link of members has a description of no job"),
                    reason::kMalformedMessage);
}
absl::StatusOr<MemberWord> DecodeMemberWord(absl::string_view bytes, const JobSpec& spec) {
  return DecodeOf(bytes, spec, MemberWord{MemberWord::Seat()});
}
absl::StatusOr<LeadWord> DecodeLeadWord(absl::string_view bytes, const JobSpec& spec) {
  return DecodeOf(bytes, spec, LeadWord{LeadWord::Keep()});
}

}  // namespace ballast
