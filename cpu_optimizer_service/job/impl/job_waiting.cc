// Whom a step waits for: ranks of this member, or other members, and what is known of those.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/system/steady_time.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"

namespace ballast {

namespace {

std::string Lines(const std::map<int, std::string>& awaited) {
  return absl::StrJoin(awaited, "; ", [](std::string* out, const auto& member) {
    absl::StrAppend(out, member.second);
  });
}

}  // namespace

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
  if (core_.gate.phase() == Phase::kDirections && SecondsSinceFirstGiven().has_value()) {
    Awaited awaited = {.step = core_.record.committed_step,
                       .ranks = orthogonal_.RanksAwaited(),
                       .why = "they orthogonalize their directions"};
    for (const int rank : core_.layout.ranks()) {
      if (orthogonal_.Awaits(rank) || members_.table[rank].listener == nullptr) continue;
      awaited.waiting.push_back(members_.table[rank].listener);
    }
    return awaited;
  }
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
  if (is_alone()) return awaited;
  if (!core_.identity.is_lead()) {
    if (is_reported() && to_lead_.sink == nullptr) {
      awaited.ranks = spec().RanksOf(spec().lead());
      awaited.members[spec().lead()] =
          to_lead_.no_link.Of(absl::StrCat(seats_.NameOf(spec().lead()), ", the lead,"));
    }
  } else if (first_report_.has_value() && lead_.step() == DecidedStep() + 1) {
    awaited.step = lead_.step();
    const std::vector<int> unreported = lead_.Unreported();
    for (const int member : unreported.empty() ? lead_.Unvoted() : unreported) {
      if (member == core_.identity.member && !awaited.ranks.empty()) continue;
      const std::vector<int> ranks = spec().RanksOf(member);
      awaited.ranks.insert(awaited.ranks.end(), ranks.begin(), ranks.end());
      if (member != core_.identity.member)
        awaited.members[member] = links_[member].no_link.Of(seats_.NameOf(member));
    }
    std::sort(awaited.ranks.begin(), awaited.ranks.end());
  }
  awaited.why = Lines(awaited.members);
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
  if (phase == Phase::kDirections) return SecondsSinceFirstGiven();
  if (phase != Phase::kIdle && phase != Phase::kOpen && phase != Phase::kReported) return seconds;
  if (!machine_.between_steps()) seconds = clock_.SecondsSinceFirstSeal();
  // Another member's ranks may have sealed before any one here.
  if (first_report_.has_value() && lead_.step() == DecidedStep() + 1) {
    seconds = std::max(seconds.value_or(0), SecondsSince(*first_report_));
  }
  return seconds;
}

std::map<int, std::string> JobImpl::AwaitedMembers() const {
  std::map<int, std::string> awaited;
  if (loader_.awaits_others()) {
    for (int member = 0; member < static_cast<int>(links_.size()); ++member) {
      if (member == core_.identity.member || links_[member].stands.loads == core_.record.loads) {
        continue;
      }
      const bool is_linked = links_[member].sink != nullptr;
      awaited[member] = is_linked ? absl::StrCat(seats_.NameOf(member), " has not loaded its part")
                                  : links_[member].no_link.Of(seats_.NameOf(member));
    }
    return awaited;
  }
  awaited = tasks_.WaitsFor();
  const bool waits = is_reported() || first_report_.has_value();
  if (!awaited.empty() || is_alone() || !waits) return awaited;
  return AwaitedByAll().members;
}

void JobImpl::AddMembers(JobStatus& status) const {
  const std::map<int, std::string> awaited = AwaitedMembers();
  // The lead has said whom it waits for itself.
  status.waits_for = awaited.empty() && is_reported() ? to_lead_.waits : Lines(awaited);
  status.member = core_.identity.member;
  for (int member = 0; member < static_cast<int>(spec().members.size()); ++member) {
    MemberStatus& known = status.members.emplace_back();
    known.waited_for = awaited.contains(member);
    if (member == core_.identity.member) {
      known.is_linked = true;
      known.memory_bytes = memory_.need.total_bytes();
      continue;
    }
    // Other members have a link to the lead alone.
    if (!core_.identity.is_lead() && member != spec().lead()) continue;
    const NoLink& no_link = core_.identity.is_lead() ? links_[member].no_link : to_lead_.no_link;
    known.is_linked = !no_link.since.has_value();
    known.seconds_without_link = known.is_linked ? 0 : SecondsSince(*no_link.since);
    known.problem = no_link.why;
    if (!core_.identity.is_lead()) continue;
    known.memory_bytes = seats_.NeededBytes(member);
    known.round_trip_seconds = links_[member].round_trip_seconds;
  }
}

}  // namespace ballast
