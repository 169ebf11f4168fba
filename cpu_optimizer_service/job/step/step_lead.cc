#include "cpu_optimizer_service/job/step/step_lead.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/job/step/step_decision.h"

namespace ballast {

StepLead::StepLead(const JobSpec& spec, const Layout& layout, std::vector<int> first_ranks)
    : spec_(spec),
      layout_(layout),
      first_ranks_(std::move(first_ranks)),
      members_(first_ranks_.size()) {}

void StepLead::Begin(uint64_t step) {
  step_ = step;
  attempt_ = 0;
  live_since_ = 0;
  members_.assign(members_.size(), {});
  summary_.reset();
}

// ---------------------------------------------------------------- attempts

void StepLead::Stand(int member, uint32_t attempt, int by,
                     const std::optional<StepSettings>& settings, std::vector<ToMember>& told) {
  Member& state = members_[member];
  if (attempt != state.attempt) Withdraw(member);
  state.attempt = attempt;
  state.settings = settings;
  if (attempt > attempt_) {
    VoidReports();
    attempt_ = attempt;
    live_since_ = by;
    for (int other = 0; other < static_cast<int>(members_.size()); ++other) {
      if (other == member) continue;
      told.push_back({other, ToMember::Live{.attempt = attempt, .by = by}});
    }
  } else if (attempt < attempt_) {
    told.push_back({member, ToMember::Live{.attempt = attempt_, .by = live_since_}});
    return;
  }
  if (settings.has_value()) CompareSettings(told);
}

std::vector<int> StepLead::CompareSettings(std::vector<ToMember>& told) {
  std::vector<int> differ;
  // Compared with the lowest member's, so that the message does not depend on who is faster.
  const StepSettings* first = nullptr;
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) {
    const Member& each = members_[member];
    if (each.attempt != attempt_ || !each.settings.has_value()) continue;
    if (first == nullptr) first = &*each.settings;
    const std::string difference = FirstDifference(*first, *each.settings);
    if (difference.empty()) continue;
    differ.push_back(member);
    told.push_back(
        {member, ToMember::OtherSettings{
                     .attempt = attempt_,
                     .why = WithReason(
                         absl::FailedPreconditionError(absl::StrCat(
                             "rank ", first_ranks_[member], " begins step ", step_, " with ",
                             difference, "; all ranks must begin a step with the same settings")),
                         reason::kOtherSettings)}});
  }
  return differ;
}

bool StepLead::has_begun() const {
  return attempt_ > 0 || std::ranges::any_of(members_, [](const Member& each) {
           return each.settings.has_value();
         });
}

// ---------------------------------------------------------------- reports

void StepLead::Report(int member, uint32_t attempt, StepReport report, std::optional<StepVote> vote,
                      std::vector<ToMember>& told) {
  Member& state = members_[member];
  if (attempt != attempt_ || state.attempt != attempt_) {
    told.push_back({member, ToMember::Live{.attempt = attempt_, .by = live_since_}});
    return;
  }
  Withdraw(member);
  state.report = std::move(report);
  state.first_vote = std::move(vote);
  if (Unreported().empty()) TakeReports(told);
}

void StepLead::Withdraw(int member) {
  Member& state = members_[member];
  state.report.reset();
  state.first_vote.reset();
  summary_.reset();
}

void StepLead::VoidReports() {
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) Withdraw(member);
}

void StepLead::RefuseAll(const SealRefusal& why, std::vector<ToMember>& told) {
  VoidReports();
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) {
    told.push_back({member, ToMember::Refused{why}});
  }
}

void StepLead::TakeReports(std::vector<ToMember>& told) {
  if (const std::vector<int> differ = CompareSettings(told); !differ.empty()) {
    for (const int member : differ) Withdraw(member);
    return;
  }
  const uint32_t micro_steps = members_[0].report->micro_steps;
  const auto differs = std::ranges::find_if(
      members_, [&](const Member& each) { return each.report->micro_steps != micro_steps; });
  if (differs != members_.end()) {
    const SealRefusal refusal = {
        .status =
            WithReason(absl::FailedPreconditionError(absl::StrCat(
                           "step ", step_, ": rank ", first_ranks_[0], " sealed ", micro_steps,
                           " micro-steps and rank ", first_ranks_[differs - members_.begin()], " ",
                           differs->report->micro_steps, "; all ranks must seal the same number")),
                       reason::kSendAndSealAgain),
        .missing = {},
        .attempt = attempt_};
    return RefuseAll(refusal, told);
  }
  std::vector<const StepReport*> reports;
  for (const Member& each : members_) reports.push_back(&*each.report);
  absl::StatusOr<StepSummary> summary = Summarize(spec_, layout_, reports);
  if (!summary.ok()) {
    return RefuseAll({.status = WithReason(summary.status(), reason::kAbortAndRedo),
                      .missing = {},
                      .attempt = attempt_},
                     told);
  }
  summary_ = *std::move(summary);
  ++round_;
  // A single member has found at its last seal whether all is used, with the uses of all ranks.
  const bool asks =
      members_.size() > 1 && (std::ranges::any_of(reports, &StepReport::has_empties) ||
                              HasUnused(spec_, layout_, summary_->uses));
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) {
    members_[member].checked = !asks;
    members_[member].vote = members_[member].first_vote;
    members_[member].tries = false;
    members_[member].trial.reset();
    if (asks) told.push_back({member, ToMember::CheckUses{round_, summary_->uses}});
  }
  if (!asks) AskForVotes(told);
}

bool StepLead::is_checked() const {
  return summary_.has_value() && std::ranges::all_of(members_, &Member::checked);
}

void StepLead::Checked(int member, uint64_t round, std::optional<SealRefusal> refusal,
                       std::vector<ToMember>& told) {
  if (!summary_.has_value() || round != round_ || is_checked()) return;
  if (refusal.has_value()) return RefuseAll(*refusal, told);
  members_[member].checked = true;
  if (is_checked()) AskForVotes(told);
}

// ---------------------------------------------------------------- votes

void StepLead::AskForVotes(std::vector<ToMember>& told) {
  const std::vector<int> unvoted = Unvoted();
  for (const int member : unvoted) told.push_back({member, ToMember::Norm{round_}});
  if (unvoted.empty()) CompareVotes(told);
}

void StepLead::Vote(int member, uint64_t round, StepVote vote, std::vector<ToMember>& told) {
  if (!is_checked() || round != round_) return;
  members_[member].vote = std::move(vote);
  if (Unvoted().empty()) CompareVotes(told);
}

void StepLead::CompareVotes(std::vector<ToMember>& told) {
  const auto differs = std::ranges::find_if(
      members_, [&](const Member& each) { return *each.vote != *members_[0].vote; });
  if (differs == members_.end()) return;
  const absl::Status why = VotesDiffer(step_, first_ranks_[differs - members_.begin()],
                                       *differs->vote, first_ranks_[0], *members_[0].vote);
  ++round_;  // A vote of before may still be on its way.
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) {
    members_[member].vote.reset();
    members_[member].first_vote.reset();  // Refused, for another round, too.
    told.push_back({member, ToMember::VoteAgain{round_, why}});
  }
}

// ---------------------------------------------------------------- trials

void StepLead::Try(std::vector<ToMember>& told) {
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) {
    if (!std::exchange(members_[member].tries, true)) {
      told.push_back({member, ToMember::Try{round_}});
    }
  }
}

void StepLead::Tried(int member, uint64_t round, StateTrial trial) {
  if (!is_ready() || round != round_) return;
  members_[member].trial = std::move(trial);
}

bool StepLead::awaits_trials() const {
  return std::ranges::any_of(
      members_, [](const Member& each) { return each.tries && !each.trial.has_value(); });
}

std::optional<StateTrial> StepLead::trial() const {
  if (!is_ready()) return std::nullopt;
  StateTrial all(static_cast<int>(spec_.groups.size()));
  for (const Member& each : members_) {
    if (!each.trial.has_value()) return std::nullopt;
    all.Add(spec_, *each.trial);
  }
  return all;
}

// ---------------------------------------------------------------- the result

bool StepLead::is_ready() const { return is_checked() && Unvoted().empty(); }

std::vector<int> StepLead::Unreported() const {
  std::vector<int> members;
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) {
    if (!members_[member].report.has_value()) members.push_back(member);
  }
  return members;
}

std::vector<int> StepLead::Unvoted() const {
  std::vector<int> members;
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) {
    if (!members_[member].vote.has_value()) members.push_back(member);
  }
  return members;
}

}  // namespace ballast
