// Steps that are given up: by a new generation, which frees all ranks, or as a skip.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {

void JobImpl::Detach(Detached detached, absl::Status why) {
  if (detached.listeners.empty() && detached.memories.empty()) return;
  RunAfter([detached = std::move(detached), why = std::move(why)]() mutable {
    for (const auto& listener : detached.listeners) listener->OnDetached(why);
    detached.memories.clear();
  });
}

void JobImpl::ForgetUploads(int rank) {
  DropPart(rank,
           WithReason(absl::AbortedError(absl::StrCat(
                          "rank ", rank, " of job ", spec().name,
                          " has been taken anew, which gives up its part of a write of state")),
                      reason::kOlderGeneration));
  if (first_weights_.complete()) return;
  const absl::Span<const int> chunks = layout_.chunks_of_rank(rank);
  for (const int chunk : chunks) store_->SetArrived(chunk, false);
  first_weights_.Forget(rank, chunks);
  ShowFirstWeights();
}

void JobImpl::RaiseGeneration(std::string why, absl::AnyInvocable<void() &&> then) {
  record_.generation = record_.generation.Next();
  Move();
  given_up_step_ = 0;  // Streams that could still speak of it end.
  bounds_.clear();     // The state may become another one: a load's, or the step's before.
  Detached detached = ranks_.FreeAll();
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    ForgetUploads(rank);
  }
  // The flip comes before anything is cleared: after a death in between, a later process finds the
  // step gone, and its ranks at an older generation.
  ++record_.epoch;
  Keep();
  step_ = std::monostate();  // Nothing new can be added from here on.
  VoidAllTickets();
  speculation_.Stop();
  gate_.StartClearing();
  EnterHere(
      Admission::kFinishClear, -1,
      [this, self = shared_from_this(), detached = std::move(detached), why = std::move(why),
       then = std::move(then)](absl::Status cleared) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
        if (!cleared.ok()) return;  // Broken; streams have been told.
        FinishClearing();
        // A process of the old generation may go on writing there: from here on nothing
        // reads it.
        for (auto& lender : ranks_.TakeLenders()) {
          detached.memories.push_back(std::move(lender));
        }
        Detach(std::move(detached), WithReason(absl::AbortedError(why), reason::kOlderGeneration));
        std::move(then)();
      });
}

bool JobImpl::MaySkipStep() const {
  const OpenStep* given = Undecided();
  // The record of a skip needs the step's terms, which an attempt lacks until a rank begins it.
  if (given == nullptr || given->lacks_terms() || spec().on_abort != OnAbort::kSkip) return false;
  return std::all_of(given->ranks().begin(), given->ranks().end(),
                     [](const RankInStep& rank) { return rank.begun; });
}

bool JobImpl::WasGivenUp(uint64_t step, int rank) const {
  if (step == 0 || step != given_up_step_ || step < record_.committed_step) return false;
  // A rank that has begun the next step knows of the skip. What it says of the older step is an
  // error again.
  const OpenStep* next = Undecided();
  return next == nullptr || !next->ranks()[rank].begun;
}

void JobImpl::GiveUpStep(const std::string& why, absl::AnyInvocable<void() &&> then) {
  const bool skips = MaySkipStep();
  Tell(absl::StrCat(
      why, skips ? "; the step is skipped" : "; every rank attaches again, in a new generation"));
  if (skips) return SkipStep(why, std::move(then));
  RaiseGeneration(absl::StrCat(why, "; the generation is now ", ToString(record_.generation.Next()),
                               "; attach again"),
                  std::move(then));
}

KeptDecision JobImpl::SkipOf(const OpenStep& given, absl::string_view why) {
  KeptDecision skip = {
      .outcome = {.step = given.terms().step,
                  .decision = {},
                  .skip_reason = absl::StrCat("it could not be kept: ", why),
                  .skip_cause = SkipCause::kNotKept,
                  .unused_parameters = {}},
      .terms = given.terms(),
      .hyper_parameters = given.terms().hyper_parameters,
  };
  for (const RankInStep& rank : given.ranks()) {
    skip.micro_steps = std::max(skip.micro_steps, rank.micro_steps_ended);
  }
  return skip;
}

// The step's number is used up, so what is still on its way can meet no other attempt, and streams
// go on in the same generation.
void JobImpl::SkipStep(const std::string& why, absl::AnyInvocable<void() &&> then) {
  KeptDecision skip = SkipOf(*Undecided(), why);
  // From here on what comes for the step is dropped. Nothing is stored before it is cleared: should
  // the process die before, the next one goes on with the step, and nobody has been told of its
  // end.
  given_up_step_ = skip.outcome.step;
  step_ = std::monostate();
  VoidAllTickets();
  speculation_.Stop();
  gate_.StartClearing();
  EnterHere(Admission::kFinishClear, -1,
            [this, self = shared_from_this(), skip = std::move(skip), then = std::move(then)](
                absl::Status cleared) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
              if (!cleared.ok()) return;  // Broken; streams have been told.
              StepOutcome outcome = skip.outcome;
              ClearStep();
              trace_.Mark(TraceEventKind::kCommitted, outcome.step);
              RecordStep(std::move(skip), /*times=*/{});
              // After the record's flip. A process that takes over in between does it
              // (TakeOverState).
              store_->SetStep(outcome.step);
              RunAfter([listeners = ranks_.ByRank(), lenders = ranks_.TakeLenders(),
                        outcome = std::move(outcome)]() mutable {
                for (const auto& listener : listeners) {
                  if (listener == nullptr) continue;
                  listener->OnDecision(outcome, {});
                  listener->OnCommitted(outcome.step, /*update_seconds=*/0);
                }
              });
              ranks_.FreeLeft();
              step_over_.NotifyAll();
              std::move(then)();
            });
}

void JobImpl::FinishClearing() {
  // The next attempt begins after an operator's changes, so its overrides come last again.
  record_.later_changes.assign(record_.later_changes.size(), {});
  ClearStep();
}

void JobImpl::ClearStep() {
  // kFinishClear was granted, so no other thread reads or writes any of this.
  speculation_.DropAll(*store_);
  ledger_.Clear();
  sums_.Clear();
  gradients_->ClearAll();
  if (kept_ != nullptr) kept_->FreeLeftSumLanes();
  gate_.FinishClearing();
}

}  // namespace ballast
