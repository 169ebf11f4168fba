// The second round of a step with rules of two rounds (common/rule.h), after the commit of the first.
//
// The first commit's flip keeps what the round needs: the directions, and what they are for. So
// gradients are free, and a later process begins the round again. Its decision is one flip more: from
// there on O counts, and the round only rolls forward.
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/steady_time.h"
#include "cpu_optimizer_service/host/kept_record.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"
#include "cpu_optimizer_service/job/update/second_round.h"

namespace ballast {

void JobImpl::BeginSecondRound() {
  const auto update = std::make_shared<const StepUpdate>(SecondUpdateOf(*core_.record.directions));
  core_.RunAfter([this, self = Self(), update, bounds = core_.bounds]() mutable {
    executor_.Orthogonalize(update, std::move(bounds), [this, self](SecondRound round) {
      const JobCore::Section section(core_);
      DecideSecondRound(round);
    });
  });
}

void JobImpl::DecideSecondRound(const SecondRound& round) {
  KeptDirections& directions = *core_.record.directions;
  directions.second = round.decision;
  std::string& left = directions.record.outcome.left;
  left = WhatWasLeft(spec().layout, round.decision);
  core_.bounds = round.bounds;
  journal_.Keep();
  if (!left.empty()) core_.Tell(absl::StrCat("step ", directions.record.outcome.step, ": ", left));
  const auto plan =
      std::make_shared<UpdatePlan>(executor_.MakeSecondPlan(SecondUpdateOf(directions)));
  core_.RunAfter([this, self = Self(), plan] {
    executor_.CarryOutSecond(plan, [this, self, plan] {
      plan->weights_in_place.clear();  // Without the lock: the last reference unmaps the memory.
      const JobCore::Section section(core_);
      StepRecord& record = core_.record.directions->record;
      // A process that took the step over does not know when it was decided.
      const bool is_known = clock_.decided != StepClock::Time();
      if (is_known) record.times.updating = SecondsSince(clock_.decided);
      const double seconds = record.times.updating;
      std::string left = record.outcome.left;
      RecordSecondRound();
      EndStep(std::move(plan->listeners), plan->update.step, seconds, std::move(left));
    });
  });
}

void JobImpl::RecordSecondRound() {
  KeptDirections directions = *std::exchange(core_.record.directions, std::nullopt);
  AddToHistory(std::move(directions.record), directions.coverage_complete);
  core_.Move();
  journal_.Keep();
}

// ---------------------------------------------------------------- after a death

absl::Status JobImpl::TakeOverSecondRound(std::string& story) {
  const uint64_t step = core_.record.committed_step;
  if (core_.record.directions->record.outcome.step != step || memory_.directions == nullptr) {
    return absl::DataLossError("its second round is not of its last step");
  }
  BALLAST_RETURN_IF_ERROR(CheckUpdateLanes(step));
  core_.gate.ResumeUpdating();
  if (!core_.record.directions->second.has_value()) {
    journal_.kept()->update_lanes().FreeLeft();
    absl::StrAppend(&story, "; the second round of step ", step, " begins again");
    return absl::OkStatus();
  }
  RollForward(SecondUpdateOf(*core_.record.directions), Round::kSecond);
  Stored("all is rolled forward");
  RecordSecondRound();
  core_.gate.Commit();
  absl::StrAppend(&story, "; the second round of step ", step, " has been carried out to its end");
  return absl::OkStatus();
}

}  // namespace ballast
