// Steps that are given up: by a new generation, which frees all ranks, or as a skip.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"

namespace ballast {

void JobImpl::ForgetUploads(int rank) {
  writes_.DropPart(rank,
                   WithReason(absl::AbortedError(absl::StrCat(
                                  "rank ", rank, " of job ", spec().name,
                                  " has attached again, so its part of a state write is dropped")),
                              reason::kOlderGeneration));
  origin_.Forget(rank);
}

void JobImpl::RaiseGeneration(std::string why, absl::AnyInvocable<void() &&> then) {
  RaiseTo(core_.record.generation.Next(), std::move(why), std::move(then));
}

void JobImpl::RaiseTo(const Generation& generation, std::string why,
                      absl::AnyInvocable<void() &&> then) {
  // Others are told when they stand at the committed step, which is nobody's after a load that failed.
  std::vector<int> followers;
  for (int member = 0; member < static_cast<int>(links_.size()); ++member) {
    if (links_[member].sink != nullptr && (IsInStep(member) || core_.gate.state().torn)) {
      followers.push_back(member);
    }
  }
  core_.record.generation = generation;
  raised_because_ = why;
  core_.Move();
  machine_.GiveUp(0);    // Streams that could still speak of it end.
  core_.bounds.clear();  // The state may become another one: a load's, or the step's before.
  Detached detached = members_.table.FreeAll();
  for (int rank = 0; rank < members_.table.size(); ++rank) {
    ForgetUploads(rank);
  }
  // A load replaces its half new chunks; a superseded job serves nothing any more.
  if (core_.record.loading.has_value() || core_.record.superseded_by != 0) {
    core_.record.directions.reset();
  }
  ForgetOrthogonal();
  // The flip comes before anything is cleared: after a death in between, a later process finds the
  // step gone, and its ranks at an older generation.
  ++core_.record.epoch;
  ForgetPart();
  journal_.Keep();
  lead_.Begin(core_.record.committed_step + 1);
  for (const int member : followers) links_[member].sink->Send({LeadWord::Raised{generation, why}});
  for (int member = 0; member < static_cast<int>(links_.size()); ++member) {
    if (links_[member].has_stood) TellUndo(member);
  }
  machine_.Drop();  // Nothing new can be added from here on.
  executor_.CancelAll();
  core_.gate.StartClearing();
  core_.EnterHere(Admission::kFinishClear, -1,
                  [this, self = shared_from_this(), detached = std::move(detached),
                   why = std::move(why), then = std::move(then)](absl::Status /*cleared*/)
                      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                        FinishClearing();
                        // A process of the old generation may go on writing there: from here on nothing
                        // reads it.
                        for (auto& lender : members_.table.TakeLenders()) {
                          detached.memories.push_back(std::move(lender));
                        }
                        members_.Detach(std::move(detached), WithReason(absl::AbortedError(why),
                                                                        reason::kOlderGeneration));
                        if (!core_.identity.is_lead()) SayStanding();
                        std::move(then)();
                        const bool is_idle = core_.gate.phase() == Phase::kIdle;
                        if (is_idle && core_.record.directions.has_value()) {
                          core_.gate.AwaitDirections();
                          GoOnIfGiven();
                        }
                      });
}

bool JobImpl::MaySkipStep() const {
  if (spec().on_abort != OnAbort::kSkip || !core_.identity.is_lead() || !machine_.CanBeSkipped()) {
    return false;
  }
  for (int member = 0; member < static_cast<int>(links_.size()); ++member) {
    if (member == core_.identity.member) continue;
    const MemberWord::Standing& stands = links_[member].stands;
    if (!IsInStep(member) || stands.attempt != machine_.agreement()->attempt() ||
        !stands.all_have_begun) {
      return false;
    }
  }
  return true;
}

void JobImpl::GiveUpStep(const std::string& why, absl::AnyInvocable<void() &&> then) {
  const bool skips = MaySkipStep();
  core_.Tell(absl::StrCat(
      why, skips ? "; the step is skipped" : "; every rank attaches again, in a new generation"));
  if (skips) return SkipStep(SkipOf(why), std::move(then));
  RaiseGeneration(absl::StrCat(why, "; the generation is now ",
                               ToString(core_.record.generation.Next()), "; attach again"),
                  std::move(then));
}

KeptDecision JobImpl::SkipOf(absl::string_view why) const {
  const StepTerms& terms = machine_.agreement()->terms();
  KeptDecision skip = {
      .outcome = {.step = terms.step,
                  .decision = {},
                  .skip_reason = absl::StrCat("it could not be kept: ", why),
                  .skip_cause = SkipCause::kNotKept,
                  .unused_parameters = {}},
      .terms = terms,
      .hyper_parameters = terms.hyper_parameters,
      .values_after = ValuesAfter(terms.settings, {}),
  };
  skip.reports.assign(links_.size(), 0);  // It is made from none.
  for (int rank = 0; rank < core_.layout.world_size(); ++rank) {
    skip.micro_steps = std::max(skip.micro_steps, machine_.part().rank(rank).micro_steps_ended);
  }
  return skip;
}

// The step's number is used up, so what is still on its way can meet no other attempt, and streams
// go on in the same generation.
void JobImpl::SkipStep(KeptDecision skip, absl::AnyInvocable<void() &&> then) {
  // From here on what comes for the step is dropped. Nothing is stored before it is cleared: should
  // the process die before, the next one goes on with the step, and nobody has been told of its
  // end.
  machine_.GiveUp(skip.outcome.step);
  machine_.Drop();
  executor_.CancelAll();
  core_.gate.StartClearing();
  core_.EnterHere(
      Admission::kFinishClear, -1,
      [this, self = shared_from_this(), skip = std::move(skip), then = std::move(then)](
          absl::Status /*cleared*/) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
        StepOutcome outcome = skip.outcome;
        // An operator may have changed them since. The lead's count for all members.
        if (core_.identity.is_lead()) skip.values_after = ValuesAfter(skip.terms.settings, {});
        ClearStep();
        core_.trace.Mark(TraceEventKind::kCommitted, outcome.step);
        ForgetPart();
        TellDecided(outcome.step);
        RecordStep(std::move(skip), /*times=*/{});
        // After the record's flip. A process that takes over in between does it
        // (TakeOverState).
        memory_.store->SetStep(outcome.step);
        core_.RunAfter([listeners = members_.table.ByRank(), lenders = members_.table.TakeLenders(),
                        outcome = std::move(outcome)]() mutable {
          for (const auto& listener : listeners) {
            if (listener == nullptr) continue;
            listener->OnDecision(outcome, {});
            listener->OnCommitted(outcome.step, /*update_seconds=*/0, /*left=*/"");
          }
        });
        members_.table.FreeLeft();
        core_.NotifyStepOver();
        if (core_.identity.is_lead()) TellAllDecision();
        std::move(then)();
      });
}

void JobImpl::ForgetPart() {
  core_.record.prepared.reset();
  core_.record.lost_part.clear();
  first_report_.reset();
  told_norm_.reset();
  to_lead_.report.reset();
  to_lead_.wants_discard.reset();
  to_lead_.waits.clear();
  next_ = {};
}

bool JobImpl::WasLost(uint64_t step) const {
  const auto& steps = core_.record.history.recent_steps;
  return !steps.empty() && steps.back().outcome.step == step &&
         steps.back().outcome.skip_cause == SkipCause::kNotKept;
}

void JobImpl::FinishClearing() {
  // The next attempt begins after an operator's changes, so its overrides come last again.
  core_.record.later_changes.assign(core_.record.later_changes.size(), {});
  ClearStep();
  if (journal_.kept() != nullptr) journal_.kept()->FreeLeftLanes();
}

// Not its lanes: those stay until the step is over in the record, too. Else a process that takes
// over before would take a half added sum for a whole one.
void JobImpl::ClearStep() {
  // kFinishClear was granted, so no other thread reads or writes any of this.
  machine_.Clear();
  executor_.ForgetAll();
  core_.gate.FinishClearing();
}

}  // namespace ballast
