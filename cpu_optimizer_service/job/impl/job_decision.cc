// From the last seal to the commit, on the engine's threads.
//
// A decision takes the job's lock twice: to claim the sums that no task has begun, and, once all are
// there, to decide. The commit takes it once more.
//
// The gate keeps everything else away from gradients and state meanwhile, except for the time in
// which votes are awaited. The decision is the commit point: before it nothing of the step shows,
// after it the step only rolls forward.
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/host/kept_record.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"

namespace ballast {

// ---------------------------------------------------------------- the decision

void JobImpl::AwaitDecision() {
  core_.EnterHere(Admission::kDecide, -1,
                  [this, self = Self()](absl::Status admitted)
                      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                        if (!admitted.ok()) return;  // Given up meanwhile.
                        core_.gate.StartDeciding();
                        core_.RunAfter([self = std::move(self)] {
                          self->executor_.StartTask([self] { self->RunDecision(); });
                        });
                      });
}

void JobImpl::RunDecision() {
  JobCore::Section section(core_);
  // Sums whose tasks are only queued are computed by the decision, because ranks wait. Those tasks
  // find nothing to claim then.
  std::vector<bool> claimed = executor_.ClaimSums();
  // What other tasks still compute is waited for in the gate. The last of them gives the turn, so
  // this goes on on a thread of the engine's.
  core_.EnterHere(Admission::kUpdate, -1,
                  [this, self = Self(), claimed = std::move(claimed)](absl::Status admitted)
                      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                        if (!admitted.ok()) return core_.gate.EndDeciding();  // Aborted meanwhile.
                        // It has been reported. A discard would have made the step an open one.
                        if (machine_.agreement()->is_summed()) return DoNext();
                        core_.RunAfter([self = std::move(self), claimed = std::move(claimed),
                                        step = machine_.agreement()->step()] {
                          self->SumAndDecide(claimed, step);
                        });
                      });
}

// An abort meanwhile does not clear the gradients: it waits for this (GateState::deciding).
void JobImpl::SumAndDecide(const std::vector<bool>& claimed, uint64_t step) {
  TaskPool& tasks = *core_.environment.tasks;
  executor_.ComputeClaimed(claimed, step);
  // What is left to sum is not little where chunks cut many blocks.
  PartSums sums = memory_.gradients->CombineSums(
      [&](int64_t count, absl::FunctionRef<void(int64_t)> body) { tasks.ForEach(count, body); });
  GoOnDeciding([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    executor_.FinishAllSums();
    Report(std::move(sums));
  });
}

void JobImpl::GoOnDeciding(absl::FunctionRef<void()> then) {
  JobCore::Section section(core_);
  // The step may have been aborted while the lock was free.
  if (core_.gate.phase() == Phase::kClearing) return core_.gate.EndDeciding();
  then();
}

void JobImpl::Report(PartSums sums) {
  machine_.SetSummed();
  const StepAgreement& sealed = *machine_.agreement();
  StepReport report = decider_.MakeReport(std::move(sums));
  std::optional<StepVote> vote = machine_.CommonVote();
  if (core_.identity.is_lead()) {
    std::vector<ToMember> told;
    StepLead& lead = LeadOfStep();
    const int member = core_.identity.member;
    lead.Stand(member, sealed.attempt(), sealed.live_since(), sealed.terms().settings, told);
    lead.Report(member, sealed.attempt(), std::move(report), std::move(vote), told);
    if (lead.is_ready()) return DecideFromReports();
    AwaitLead();
    return TellMembers(std::move(told));
  }
  // From this flip on only the lead ends the part. One that an earlier process reported has its
  // number: the lead may have decided from it.
  if (!core_.record.prepared.has_value()) {
    core_.record.prepared = KeptReport{.number = ++core_.record.reports,
                                       .attempt = sealed.attempt(),
                                       .micro_steps = sealed.micro_steps(),
                                       .vote = vote};
    journal_.Keep();
  }
  to_lead_.report = {MemberWord::Report{.number = core_.record.prepared->number,
                                        .attempt = sealed.attempt(),
                                        .report = std::move(report),
                                        .vote = std::move(vote)}};
  AwaitLead();
  Say(*to_lead_.report);
}

void JobImpl::DecideFromReports() {
  Draft draft = decider_.MakeDraft();
  if (draft.is_settled()) return Decide(std::move(draft));
  if (is_alone()) {
    core_.RunAfter([this, self = Self(), draft = std::move(draft)]() mutable {
      decider_.Try(draft).Settle(spec(), draft);
      GoOnDeciding([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { Decide(std::move(draft)); });
    });
    return;
  }
  if (const auto trial = lead_.trial(); trial.has_value()) {
    trial->Settle(spec(), draft);
    return Decide(std::move(draft));
  }
  std::vector<ToMember> told;
  lead_.Try(told);
  AwaitLead();
  TellMembers(std::move(told));
}

void JobImpl::Decide(Draft draft) {
  const StepAgreement& sealed = *machine_.agreement();
  KeptDecision decision = {
      .outcome = draft.outcome,
      .terms = sealed.terms(),
      .vote = lead_.vote(),
      .attempt = sealed.attempt(),
      .micro_steps = sealed.micro_steps(),
      .hyper_parameters = draft.update.hyper_parameters,
      .update_counts = draft.update.update_counts,
      .values_after = ValuesAfter(sealed.terms().settings, lead_.vote()),
      .group_norms = GroupNorms(lead_.summary()->group_sums, sealed.terms().settings.scale)};
  for (const Link& link : links_) decision.reports.push_back(link.report);
  if (draft.outcome.decision.apply) core_.bounds = draft.bounds;
  TellDecided(decision.terms.step);
  KeepDecision(std::move(decision), std::move(draft));
  TellAllDecision();
}

// Once the lock is free, so behind the flip, and before ranks are told.
void JobImpl::TellDecided(uint64_t step) {
  if (!core_.identity.is_lead()) return;
  // Of one uid and one load no step has this twice, whichever processes have led the job.
  core_.Tell(JobEvent{.job = spec().name,
                      .text = absl::StrCat("step ", step, " is decided (uid ", core_.identity.uid,
                                           ", load ", core_.record.loads, ")"),
                      .is_step = true});
}

void JobImpl::Decide(LeadWord::Decided decided) {
  Draft draft;
  draft.outcome = decided.decision.outcome;
  draft.update = {.step = decided.decision.terms.step,
                  .hyper_parameters = decided.decision.hyper_parameters,
                  .multipliers = decided.decision.outcome.decision.multipliers,
                  .update_counts = decided.decision.update_counts};
  core_.record.prepared.reset();
  to_lead_.report.reset();
  KeepDecision(std::move(decided.decision), std::move(draft));
}

void JobImpl::KeepDecision(KeptDecision decision, Draft draft) {
  to_lead_.wants_discard.reset();
  core_.history.SetGroupNorms(decision.terms.step, decision.group_norms);
  // No stream is opened before the commit (kOpenStream), so its listeners are all that are to be
  // told. A death between this and the decision's record changes nothing that a later process would
  // find.
  const auto plan = std::make_shared<UpdatePlan>(executor_.MakePlan(std::move(draft)));
  decision.coverage_complete = machine_.ledger().IsWhole(decision.micro_steps);
  decision.speculation = plan->speculation.counts;
  // The record is stored before any rank or member is told or any chunk is written: from here on a
  // later process carries the step out, too.
  const StepVote vote = decision.vote;
  core_.record.decision = std::move(decision);
  journal_.Keep();
  core_.gate.Decide();
  machine_.Decide(vote);  // The commit point.
  clock_.decided = std::chrono::steady_clock::now();
  core_.trace.Record(TraceEventKind::kDecided, plan->outcome.step, /*chunk=*/-1, clock_.sealed_ns);
  core_.RunAfter([this, self = Self(), plan] {
    executor_.CarryOut(plan, [this, self, plan] { Commit(std::move(*plan)); });
  });
}

// ---------------------------------------------------------------- the commit

std::vector<HyperParameters> JobImpl::ValuesAfter(const StepSettings& settings,
                                                  const StepVote& vote) const {
  std::vector<HyperParameters> values = core_.record.hyper_parameters;
  // In the order in which they were said; what an operator has changed since the step began comes
  // last.
  for (const auto* said : {&settings.overrides, &vote.overrides}) {
    for (const auto& [group, overrides] : *said) values[group] = Apply(values[group], overrides);
  }
  for (int group = 0; group < core_.layout.group_count(); ++group) {
    values[group] = Apply(values[group], core_.record.later_changes[group]);
  }
  return values;
}

void JobImpl::Commit(UpdatePlan plan) {
  // Before the lock is taken, since the last reference to a rank's memory unmaps it.
  plan.weights_in_place.clear();
  JobCore::Section section(core_);
  const StepTimes times = clock_.TimesUntilNow();
  last_accumulators_in_use_ = memory_.gradients->accumulators_in_use();
  executor_.EndStep(std::move(plan.speculation.published));
  // A skipped step uses up its number, so chunks stand at it with the state that they had.
  if (!plan.outcome.decision.apply) memory_.store->SetStep(plan.outcome.step);
  RecordStep(*std::exchange(core_.record.decision, std::nullopt), times,
             plan.update.has_second_round);
  members_.table.FreeLeft();
  machine_.Drop();
  machine_.Clear();
  // Memories are unmapped last: that takes long, and ranks wait for the commit.
  if (plan.update.has_second_round) {
    BeginSecondRound();
  } else {
    EndStep(std::move(plan.listeners), plan.outcome.step, times.updating, /*left=*/"");
  }
  core_.RunAfter([lenders = members_.table.TakeLenders()] {});
}

void JobImpl::EndStep(Listeners listeners, uint64_t step, double update_seconds, std::string left) {
  core_.trace.Mark(TraceEventKind::kCommitted, step);
  core_.gate.Commit();
  core_.NotifyStepOver();
  saver_.SaveIfDue();
  if (!core_.identity.is_lead()) SayStanding();
  core_.RunAfter([listeners = std::move(listeners), step, update_seconds, left = std::move(left)] {
    for (const auto& listener : listeners) {
      if (listener != nullptr) listener->OnCommitted(step, update_seconds, left);
    }
  });
}

void JobImpl::RecordStep(KeptDecision decided, const StepTimes& times, bool has_second_round) {
  // The lead keeps it until all members have it, which the next decision shows.
  if (core_.identity.is_lead() && !is_alone()) core_.record.last_decision = decided;
  if (spec().keep_previous) {
    // Before anything below changes what an undo is to bring back.
    core_.record.previous = PreviousState{.committed_step = core_.record.committed_step,
                                          .applied = decided.outcome.decision.apply,
                                          .hyper_parameters = core_.record.hyper_parameters,
                                          .update_counts = core_.record.update_counts,
                                          .trainer_state = core_.record.trainer_state};
  }
  if (decided.outcome.decision.apply) {
    for (size_t p = 0; p < core_.record.update_counts.size(); ++p) {
      if (decided.update_counts[p] > 0) core_.record.update_counts[p] = decided.update_counts[p];
    }
  }
  core_.record.hyper_parameters = std::move(decided.values_after);
  // Those since the decision, too.
  for (int group = 0; group < core_.layout.group_count(); ++group) {
    HyperParameters& values = core_.record.hyper_parameters[group];
    values = Apply(values, std::exchange(core_.record.later_changes[group], {}));
  }
  core_.Move();
  core_.record.committed_step = decided.terms.step;
  core_.record.trainer_state =
      decided.vote.trainer_state.value_or(std::move(decided.terms.settings.trainer_state));
  StepRecord record = {.outcome = std::move(decided.outcome),
                       .speculation = decided.speculation,
                       .micro_steps = decided.micro_steps,
                       .loss_scale = decided.terms.settings.scale.loss_scale,
                       .times = times,
                       .voted = decided.vote.clipping,
                       .abandoned = !decided.vote.apply,
                       .hyper_parameters = std::move(decided.hyper_parameters)};
  if (has_second_round) {
    core_.record.directions = {.record = std::move(record),
                               .coverage_complete = decided.coverage_complete,
                               .update_counts = std::move(decided.update_counts)};
  } else {
    AddToHistory(std::move(record), decided.coverage_complete);
  }
  core_.record.last_vote = std::move(decided.vote);
  // With the next epoch, words of the ledger and entries of the log count no more, in the same
  // flip. Nor do lanes of sums, which are freed after it.
  ++core_.record.epoch;
  journal_.Keep();
  if (journal_.kept() != nullptr) journal_.kept()->FreeLeftLanes();
}

void JobImpl::AddToHistory(StepRecord record, bool coverage_complete) {
  core_.record.history.Add(std::move(record), coverage_complete);
  core_.history.Add(core_.record.history.recent_steps.back(),
                    {.job_bytes = memory_.need.total_bytes() + RankMemoryBytesNow(),
                     .service_bytes = core_.environment.budget->used_bytes()});
}

}  // namespace ballast
