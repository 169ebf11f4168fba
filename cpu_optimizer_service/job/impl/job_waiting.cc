// Whom a step waits for: ranks of this member, or other members, and what is known of those.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/system/steady_time.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"

namespace ballast {

std::string JobImpl::NoLink::Of(absl::string_view who) const {
  if (!since.has_value()) return absl::StrCat(who, " has not reported the step");
  return absl::StrCat(who, " has had no link for ", std::lround(SecondsSince(*since)), " s",
                      why.empty() ? "" : ": ", why);
}

void JobImpl::NoLink::Begin(const absl::Status& because) {
  if (!since.has_value()) since = std::chrono::steady_clock::now();
  why = std::string(because.message());
}

JobImpl::Awaited JobImpl::AwaitedHere() const {
  const StepAgreement* given = machine_.undecided();
  // Where all have sealed, and the engine is at work, no rank waits for another one.
  if (given == nullptr || !given->any_sealed() || machine_.stage() == StepMachine::Stage::kSealed) {
    return {};
  }
  const bool voting = machine_.stage() == StepMachine::Stage::kReported;
  // Until all members have reported, all ranks of this one wait.
  const bool knows_norm = told_norm_.has_value() && told_norm_->step == given->step() &&
                          told_norm_->attempt == given->attempt();
  Awaited awaited = {.step = given->step(), .ranks = {}};
  if (!voting) awaited.ranks = given->UnsealedRanks();
  if (voting && knows_norm) awaited.ranks = given->RanksWithoutVote();
  for (const int rank : core_.layout.ranks()) {
    const RankInStep& state = given->ranks()[rank];
    const bool waits = voting && knows_norm ? state.vote.has_value() : state.sealed.has_value();
    if (waits && members_.table[rank].listener != nullptr) {
      awaited.waiting.push_back(members_.table[rank].listener);
    }
  }
  return awaited;
}

JobImpl::Awaited JobImpl::AwaitedByAll() const {
  Awaited awaited = AwaitedHere();
  std::vector<std::string> why;
  if (is_alone()) return awaited;
  if (!core_.identity.is_lead()) {
    if (is_reported() && to_lead_.sink == nullptr) {
      awaited.ranks = spec().RanksOf(spec().lead());
      why.push_back(to_lead_.no_link.Of(absl::StrCat(seats_.NameOf(spec().lead()), ", the lead,")));
    }
  } else if (first_report_.has_value() && lead_.step() == DecidedStep() + 1) {
    awaited.step = lead_.step();
    const std::vector<int> unreported = lead_.Unreported();
    for (const int member : unreported.empty() ? lead_.Unvoted() : unreported) {
      if (member == core_.identity.member && !awaited.ranks.empty()) continue;
      const std::vector<int> ranks = spec().RanksOf(member);
      awaited.ranks.insert(awaited.ranks.end(), ranks.begin(), ranks.end());
      if (member != core_.identity.member)
        why.push_back(links_[member].no_link.Of(seats_.NameOf(member)));
    }
    std::sort(awaited.ranks.begin(), awaited.ranks.end());
  }
  awaited.why = absl::StrJoin(why, "; ");
  return awaited;
}

void JobImpl::TellWaiting() {
  Awaited awaited;
  {
    JobCore::Lock lock(core_);
    awaited = AwaitedByAll();
    for (int member = 0; member < static_cast<int>(links_.size()); ++member) {
      if (awaited.ranks.empty() || links_[member].sink == nullptr || !IsInStep(member)) continue;
      links_[member].sink->Send({LeadWord::OfStep{
          .generation = core_.record.generation,
          .step = awaited.step,
          .what = LeadWord::OfStep::Waits{.ranks = awaited.ranks, .why = awaited.why}}});
    }
  }
  if (awaited.ranks.empty()) return;
  for (const auto& listener : awaited.waiting) {
    listener->OnWaiting(awaited.step, awaited.ranks, awaited.why);
  }
}

void JobImpl::TakeOfStep(uint64_t step, LeadWord::OfStep::Waits& waits) {
  if (!is_reported()) return;
  to_lead_.waits = waits.why;
  core_.RunAfter([listeners = AwaitedHere().waiting, step, waits = std::move(waits)] {
    for (const auto& listener : listeners) listener->OnWaiting(step, waits.ranks, waits.why);
  });
}

std::optional<double> JobImpl::SecondsSinceFirstSeal() const {
  JobCore::Lock lock(core_);
  std::optional<double> seconds;
  // In other phases nobody waits for a rank, so no deadline applies.
  const Phase phase = core_.gate.phase();
  if (phase != Phase::kIdle && phase != Phase::kOpen && phase != Phase::kReported) return seconds;
  if (!machine_.between_steps()) seconds = clock_.SecondsSinceFirstSeal();
  // Another member's ranks may have sealed before any one here.
  if (first_report_.has_value() && lead_.step() == DecidedStep() + 1) {
    seconds = std::max(seconds.value_or(0), SecondsSince(*first_report_));
  }
  return seconds;
}

std::string JobImpl::WaitsFor() const {
  if (loader_.awaits_others()) {
    std::vector<std::string> who;
    for (int member = 0; member < static_cast<int>(links_.size()); ++member) {
      if (member == core_.identity.member || links_[member].stands.loads == core_.record.loads) {
        continue;
      }
      const bool is_linked = links_[member].sink != nullptr;
      who.push_back(is_linked ? absl::StrCat(seats_.NameOf(member), " has not loaded its part")
                              : links_[member].no_link.Of(seats_.NameOf(member)));
    }
    return absl::StrJoin(who, "; ");
  }
  if (std::string others = tasks_.WaitsFor(); !others.empty()) return others;
  const bool waits = is_reported() || first_report_.has_value();
  if (is_alone() || !waits) return "";
  const std::string why = AwaitedByAll().why;
  return why.empty() && is_reported() ? to_lead_.waits : why;
}

std::vector<MemberStatus> JobImpl::MembersNow() const {
  std::vector<MemberStatus> members;
  for (int member = 0; member < static_cast<int>(spec().members.size()); ++member) {
    const bool is_here = member == core_.identity.member;
    // Other members have a link to the lead alone.
    if (!core_.identity.is_lead() && member != spec().lead() && !is_here) {
      members.emplace_back();
      continue;
    }
    const NoLink& no_link = core_.identity.is_lead() ? links_[member].no_link : to_lead_.no_link;
    members.push_back({.is_linked = is_here || !no_link.since.has_value(),
                       .seconds_without_link =
                           is_here || !no_link.since.has_value() ? 0 : SecondsSince(*no_link.since),
                       .problem = is_here ? "" : no_link.why});
  }
  return members;
}

}  // namespace ballast
