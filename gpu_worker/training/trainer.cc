#include "gpu_worker/training/trainer.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/base/log.h"
#include "gpu_worker/base/stopwatch.h"
#include "gpu_worker/collective/share.h"

namespace ballast::worker {

namespace {

Clipping ClippingOf(const TrainerOptions& options) { return {.max_norm = options.max_norm}; }

}  // namespace

absl::Status Trainer::Validate(const TrainerOptions& options) {
  // Without multipliers the number of groups is not looked at.
  BALLAST_RETURN_IF_ERROR(ballast::Validate(ClippingOf(options), /*group_count=*/0));
  if (!options.loss_scaler.has_value()) return absl::OkStatus();
  return client::DynamicLossScaler::Create(*options.loss_scaler).status();
}

Trainer::Trainer(const TrainerOptions& options, const TrainerParts& parts)
    : options_(options),
      backend_(parts.backend),
      data_(parts.data),
      job_(parts.job),
      initial_values_(parts.initial_values),
      collective_(parts.collective),
      optimizer_(parts.optimizer),
      timeline_(parts.timeline) {
  backend_.Start(optimizer_);
}

Trainer::~Trainer() { LeaveOptimizersMemory().IgnoreError(); }

absl::Status Trainer::Run(const OnStep& on_step) {
  // The optimizer counts, not this loop: after a load or an undo the next step may be an earlier
  // one, and a lost step is simply the next one again.
  since_seal_.Lap();
  while (optimizer_.committed_step() < options_.steps) {
    BALLAST_RETURN_IF_ERROR(Step(optimizer_.committed_step() + 1, on_step));
  }
  return absl::OkStatus();
}

absl::Status Trainer::Step(uint64_t step, const OnStep& on_step) {
  const TimelineScope scope(timeline_, Track::kStep, {.step = step});
  Stopwatch stopwatch;
  StartAttempt(step);
  // If the step is lost here, its passes are done all the same: their reductions are collectives,
  // in which the other ranks would wait for this one.
  BALLAST_RETURN_IF_ERROR(UnlessLost(optimizer_.BeginStep(Settings())));
  BALLAST_RETURN_IF_ERROR(Annotate(Passes(), absl::StrCat("step ", step)));
  // No rank seals before all are here: a rank that failed is noticed here at the latest.
  BALLAST_RETURN_IF_ERROR(SumLoss());
  if (!lost_) {
    attempt_.sealing = true;  // From here on the step may become committed.
    BALLAST_RETURN_IF_ERROR(Seal());
    // After an ABORTED, too, this rank goes on to ShareDecision, where the others learn of it.
    bool all_receive = false;
    if (backend_.gathers_ahead() || backend_.second_round() != nullptr) {
      // What follows needs all ranks. So it is begun only if all of them are known to have the
      // decision.
      BALLAST_RETURN_IF_ERROR(ShareDecision());
      all_receive = !lost_ && attempt_.report.applied;
    }
    if (all_receive && backend_.second_round() != nullptr) {
      Stopwatch orthogonalizing;
      BALLAST_RETURN_IF_ERROR(UnlessLost(Orthogonalize(step)));
      NoteInGap(attempt_.report.times.update, orthogonalizing.Lap());
    }
    if (all_receive && backend_.gathers_ahead()) {
      BALLAST_RETURN_IF_ERROR(ReceiveUnderNextForward());
    } else {
      BALLAST_RETURN_IF_ERROR(Receive());
    }
    BALLAST_RETURN_IF_ERROR(ShareDecision());
  }

  StepReport& report = attempt_.report;
  if (lost_) {
    BALLAST_RETURN_IF_ERROR(JoinAgain());
    // A step that only some ranks saw the end of is committed all the same. One that no rank sealed
    // is not: an operator loaded a checkpoint of that step.
    if (optimizer_.committed_step() != step || !attempt_.sealing) return absl::OkStatus();
    if (!attempt_.decided) report.applied = optimizer_.last_step_applied();
  } else {
    // In the other branch Join has restored the scaler, with the outcome of the committed step.
    if (scaler_.has_value()) scaler_->Update(/*overflow=*/!report.applied);
    // All ranks have the same decision, so all of them gather or none does. A skipped step has left
    // the weights as they are.
    Stopwatch gathering;
    if (report.applied && !attempt_.gathered) BALLAST_RETURN_IF_ERROR(backend_.GatherWeights());
    NoteInGap(report.times.receive, gathering.Lap());
  }
  // The step is committed: the row of failed attempts ends here.
  attempts_in_a_row_ = 0;
  waited_ = report.times.exposed() - exposed_to_seal_;
  report.seconds = stopwatch.Lap();
  report.tokens_per_second = tokens_per_step() / report.seconds;
  return on_step(report);
}

void Trainer::StartAttempt(uint64_t step) {
  attempt_ = {.report = {.step = step, .loss_scale = loss_scale()},
              .micro_steps = MicroStepsOf(step)};
  lost_.reset();
}

// The collectives sum over ranks and the optimizer over micro-steps; it divides, once, by this.
StepSettings Trainer::Settings() const {
  StepSettings settings;
  settings.scale.loss_scale = loss_scale();
  settings.expected_clipping = ClippingOf(options_);
  if (scaler_.has_value()) settings.trainer_state = scaler_->Serialize();
  const double lr = LearningRate(options_.learning_rate, attempt_.report.step);
  for (int group = 0; group < job_.layout.group_count(); ++group) {
    // All groups have the same.
    settings.scale.divisors.push_back(tokens_per_step());
    settings.overrides[group].lr = lr;
  }
  return settings;
}

// Forward and backward of all micro-steps; gradients are reduced, and handed over, on the way.
absl::Status Trainer::Passes() {
  absl::Status status;
  for (uint32_t micro_step = 0; micro_step < attempt_.micro_steps && status.ok(); ++micro_step) {
    status = MicroStep(micro_step);
  }
  if (status.ok()) status = PrepareNextBatch();
  // After an error too: afterwards the backend does not call the optimizer.
  const absl::StatusOr<FinishedStep> finished = backend_.FinishStep();
  // An error of a pass came first.
  if (status.ok()) status = finished.status();
  if (!status.ok()) return UnlessLost(status);
  StepReport& report = attempt_.report;
  report.loss = finished->loss_sum;
  report.times.compute = finished->compute_seconds;
  report.times.reduce = finished->reduce_seconds;
  report.times.send = finished->send_seconds;
  // Weights waited for here are the step before's.
  if (forward_ahead_) {
    NoteReceiving(finished->weights_seconds);
  } else {
    report.times.receive += finished->weights_seconds;
  }
  // The device's idle time begins at the end of the step before. In it are waits that this loop has
  // noted since, and these must not count twice.
  report.times.receive += std::max(0.0, finished->idle_seconds - std::exchange(gap_noted_, 0));
  return absl::OkStatus();
}

absl::Status Trainer::MicroStep(uint32_t micro_step) {
  const uint64_t step = attempt_.report.step;
  const Batch batch = BatchOf(step, micro_step);
  return backend_.MicroStep({.step = step,
                             .micro_step = micro_step,
                             .micro_steps = attempt_.micro_steps,
                             .batch = batch,
                             .loss_scale = loss_scale()});
}

// Under the passes that a backend was given and still has to do.
absl::Status Trainer::PrepareNextBatch() {
  const uint64_t next = attempt_.report.step + 1;
  if (next > options_.steps) return absl::OkStatus();
  // It is kept, because StartForward and MicroStep of the next step get the same batch.
  next_batch_ = BatchOf(next, 0);
  next_batch_of_ = next;
  return backend_.PrepareBatch(next_batch_);
}

void Trainer::NoteInGap(double& entry, double seconds) {
  entry += seconds;
  gap_noted_ += seconds;
}

Batch Trainer::BatchOf(uint64_t step, uint32_t micro_step) const {
  if (micro_step == 0 && step == next_batch_of_) return next_batch_;
  return data_.Slice({.seed = options_.seed, .step = step, .micro_step = micro_step},
                     options_.batch, collective_.rank(), collective_.world_size());
}

absl::Status Trainer::SumLoss() {
  Stopwatch stopwatch;
  // One all-reduce for both: the loss, and whether a rank lost the step.
  double sums[] = {attempt_.report.loss, lost_.has_value() ? 1.0 : 0.0};
  BALLAST_RETURN_IF_ERROR(collective_.AllReduceSum(absl::MakeSpan(sums)));
  // Where the step is lost this means nothing, but such a step is not sealed and not reported.
  attempt_.report.loss = sums[0] / tokens_per_step();
  if (sums[1] > 0) Lose("");
  NoteInGap(attempt_.report.times.reduce, stopwatch.Lap());
  return absl::OkStatus();
}

// For those who look at the job: what the service cannot know.
absl::Status Trainer::Report() {
  const StepReport& report = attempt_.report;
  const double seconds = since_seal_.Lap();
  const StepTimes& times = report.times;
  RankSeconds parts = {.reduce = times.reduce,
                       .send = times.send,
                       .wait = std::exchange(waited_, 0) + times.update + times.receive};
  parts.compute = std::max(0.0, seconds - parts.reduce - parts.send - parts.wait);
  exposed_to_seal_ = times.exposed();
  return optimizer_.Report(
      {.numbers = {{"loss", report.loss}, {"tokens_per_second", tokens_per_step() / seconds}},
       .seconds = parts});
}

absl::Status Trainer::Seal() {
  StepReport& report = attempt_.report;
  BALLAST_RETURN_IF_ERROR(Report());
  Stopwatch stopwatch;
  absl::StatusOr<client::StepDecision> decision = [&] {
    const TimelineScope scope(timeline_, Track::kSend, {.step = report.step});
    return optimizer_.Seal(attempt_.micro_steps, {.clipping = ClippingOf(options_)});
  }();
  NoteInGap(report.times.send, stopwatch.Lap());
  // After ABORTED the step may be committed all the same: the word of it got lost with the session.
  // ShareDecision and Join find out.
  if (!decision.ok()) return UnlessLost(decision.status());
  attempt_.decided = true;
  attempt_.decided_at = Timeline::Clock::now();
  report.norm = decision->norm;
  report.clip_coefficient = decision->clip_coefficient;
  report.applied = decision->applied;
  report.skip_reason = std::move(decision->skip_reason);
  return absl::OkStatus();
}

// All ranks are in it. ABORTED: this rank's part is void.
absl::Status Trainer::Orthogonalize(uint64_t step) {
  const TimelineScope scope(timeline_, Track::kOrthogonalize, {.step = step});
  SecondRound& round = *backend_.second_round();
  const absl::StatusOr<std::vector<HyperParameters>> values =
      optimizer_.ReadDirections([&](int chunk, absl::Span<const std::byte> direction) {
        std::ranges::copy(direction, round.chunk(chunk).begin());
      });
  if (!values.ok() && !absl::IsAborted(values.status())) return values.status();
  // Without values, too: the other ranks may be in its collectives.
  BALLAST_RETURN_IF_ERROR(
      round.Run(step, values.ok() ? *values : absl::Span<const HyperParameters>()));
  if (!values.ok() || values->empty()) return values.status();
  return optimizer_.GiveOrthogonal([&](int chunk, absl::Span<std::byte> out) {
    std::ranges::copy(round.chunk(chunk), out.begin());
  });
}

// No pass runs meanwhile: all of it is exposed.
absl::Status Trainer::Receive() {
  forward_ahead_ = false;
  if (lost_) return absl::OkStatus();
  Stopwatch stopwatch;
  BALLAST_RETURN_IF_ERROR(ReceiveWeights());
  const double seconds = stopwatch.Lap();
  NoteReceiving(seconds);
  gap_noted_ += seconds;
  return absl::OkStatus();
}

// The optimizer's arithmetic is a part of it.
void Trainer::NoteReceiving(double seconds) {
  const double update = std::min(seconds, optimizer_.update_seconds());
  attempt_.report.times.update += update;
  attempt_.report.times.receive += seconds - update;
}

absl::Status Trainer::ReceiveWeights() {
  const uint64_t step = attempt_.report.step;
  {
    const TimelineScope scope(timeline_, Track::kReceive, {.step = step});
    BALLAST_RETURN_IF_ERROR(UnlessLost(optimizer_.ReceiveWeights()));
  }
  if (timeline_ != nullptr && !lost_) {
    timeline_->Add(
        Track::kUpdate, {.step = step}, attempt_.decided_at,
        attempt_.decided_at + std::chrono::duration_cast<Timeline::Clock::duration>(
                                  std::chrono::duration<double>(optimizer_.update_seconds())));
  }
  return absl::OkStatus();
}

// All ranks know the decision; weights are gathered as they arrive, and the next step's first
// forward pass begins with those that have arrived. The backend reports that pass's waits when its
// step is finished; from its start on nothing here is exposed.
absl::Status Trainer::ReceiveUnderNextForward() {
  BALLAST_RETURN_IF_ERROR(backend_.ExpectWeights());
  attempt_.gathered = true;
  Stopwatch stopwatch;
  absl::Status received;
  // StartForward waits for weights on the host, so another thread must receive them. In Muon's second
  // round this rank may have lost the step.
  // Until the join below lost_ is the receiver's alone: StartNextForward does not use it.
  std::thread receiver([&] {
    if (!lost_) received = ReceiveWeights();
    if (!received.ok() || lost_) backend_.AbandonWeights();
  });
  const absl::Status forward = StartNextForward();
  if (!forward.ok()) {
    Log().error("{}; waiting for the service to end the step", std::string(forward.message()));
  }
  // The join comes before any return: the thread refers to this frame.
  receiver.join();
  BALLAST_RETURN_IF_ERROR(forward);
  BALLAST_RETURN_IF_ERROR(received);
  // This is called also if the step was lost meanwhile, so that the gathers that have begun come to
  // their end on all ranks. Step shares afterwards that it was lost.
  BALLAST_RETURN_IF_ERROR(backend_.GatherWeights());
  if (!forward_ahead_) NoteReceiving(stopwatch.Lap());  // The last step: nothing else went on.
  return absl::OkStatus();
}

absl::Status Trainer::StartNextForward() {
  const uint64_t next = attempt_.report.step + 1;
  forward_ahead_ = next <= options_.steps;
  if (!forward_ahead_) return absl::OkStatus();
  const Batch batch = BatchOf(next, 0);
  // The loss scale is not known: the scaler has not seen the outcome of this step yet. Only
  // backward uses it, and MicroStep gives it to that.
  return backend_.StartForward({.step = next,
                                .micro_step = 0,
                                .micro_steps = MicroStepsOf(next),
                                .batch = batch,
                                .loss_scale = 0});
}

// Whether all ranks saw the end of the step; if not, its outcome from one that did.
absl::Status Trainer::ShareDecision() {
  struct Ending {  // No padding: that would send what is on the stack.
    uint64_t lost;
    uint64_t decided;
    uint64_t applied;
    double norm;
    double clip_coefficient;
  };
  StepReport& report = attempt_.report;
  Stopwatch stopwatch;
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Ending> endings,
                           Share(Ending{.lost = lost_.has_value(),
                                        .decided = attempt_.decided,
                                        .applied = report.applied,
                                        .norm = report.norm,
                                        .clip_coefficient = report.clip_coefficient},
                                 collective_));
  if (!attempt_.decided) {
    // This stays where no rank has the decision; the loop below replaces it by the values of a rank
    // that has.
    report.norm = report.clip_coefficient = std::numeric_limits<double>::quiet_NaN();
  }
  for (const Ending& ending : endings) {
    if (ending.lost != 0) Lose("");
    if (ending.decided == 0 || attempt_.decided) continue;
    attempt_.decided = true;
    report.applied = ending.applied != 0;
    report.norm = ending.norm;
    report.clip_coefficient = ending.clip_coefficient;
  }
  if (!attempt_.gathered) NoteInGap(report.times.receive, stopwatch.Lap());
  return absl::OkStatus();
}

uint32_t Trainer::MicroStepsOf(uint64_t step) const {
  return options_.micro_steps_of_step ? options_.micro_steps_of_step(step) : options_.micro_steps;
}

double Trainer::tokens_per_step() const {
  return static_cast<double>(options_.batch) * options_.context * attempt_.micro_steps;
}

}  // namespace ballast::worker
