// The first weights of a job with several members: it begins when all members have theirs.
//
// A rank that attaches again brings its weights anew, and may bring others. So a member says that it
// has all of them, and takes that back before a rank may bring others. The lead begins the job by a
// flip of its record, and a member begins when it hears of that.
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"

namespace ballast {

absl::StatusOr<Job::Uploader> JobImpl::BeginFirstWeights(const RankHolder& holder,
                                                         FirstState state) {
  absl::StatusOr<Uploader> uploader = origin_.Begin(holder, std::move(state));
  JobCore::Lock lock(core_);
  if (uploader.ok()) other_states_ = absl::OkStatus();
  return uploader;
}

FirstState JobImpl::StateNow() const {
  FirstState state = {.step = core_.record.committed_step};
  if (state.step > 0) state.update_counts = core_.record.update_counts;
  return state;
}

std::optional<FirstState> JobImpl::FirstStateHere() const {
  if (!core_.first_weights.only_held() || !to_lead_.asks.empty()) return std::nullopt;
  return StateNow();
}

void JobImpl::BeginIfAllHaveWeights() {
  const std::optional<FirstState> here = FirstStateHere();
  if (!is_established_ || !here.has_value() || core_.gate.phase() != Phase::kIdle) return;
  int first = -1;  // Member that has any weights.
  FirstState state;
  for (int member = 0; member < static_cast<int>(links_.size()); ++member) {
    const bool is_here = member == core_.identity.member;
    const MemberWord::Standing& stands = links_[member].stands;
    if (!is_here && (!IsInStep(member) || !stands.first_state.has_value())) return;
    if (is_here ? core_.layout.chunks().empty() : stands.fits_any_state) continue;
    const FirstState& there = is_here ? *here : *stands.first_state;
    if (first == -1) {
      first = member;
      state = there;
    }
    if (there == state) continue;
    return RefuseFirstStates(absl::FailedPreconditionError(
        absl::StrCat("job ", spec().name, " cannot begin: ranks of member ",
                     spec().members[first].address, " bring a state of step ", state.step,
                     ", but those of member ", spec().members[member].address, " one of step ",
                     there.step, there.step == state.step ? " with other update counts" : "",
                     "; restart all ranks from the same state")));
  }
  BeginWith(state);
  TellAllNow({LeadWord::Begin{state}});
}

void JobImpl::BeginWith(const FirstState& state) {
  core_.record.committed_step = state.step;
  core_.record.update_counts = state.update_counts;
  core_.record.update_counts.resize(spec().layout.parameters.size(), 0);
  origin_.Complete();
}

void JobImpl::Take(LeadWord::Begin& begin) {
  if (core_.first_weights.complete()) return;
  const bool has_them = core_.first_weights.only_held() &&
                        (core_.layout.chunks().empty() || StateNow() == begin.state);
  if (!has_them) {
    return core_.Tell(
        "the lead has begun the job without this member's first weights; close the job at all "
        "members");
  }
  BeginWith(begin.state);
  SayStanding();
}

void JobImpl::Take(LeadWord::OtherStates& other) {
  if (!core_.first_weights.complete()) EndForOtherStates(other.why);
}

// What members have said in this generation is void with it.
void JobImpl::RefuseFirstStates(const absl::Status& why) {
  TellAllNow({LeadWord::OtherStates{why}});
  EndForOtherStates(why);
  RaiseGeneration(std::string(why.message()), [] {});
}

void JobImpl::EndForOtherStates(const absl::Status& why) {
  other_states_ = why;
  Detached detached;
  for (const int rank : core_.layout.ranks()) members_.table.TakeListener(rank, detached.listeners);
  members_.Detach(std::move(detached), why);
}

}  // namespace ballast
