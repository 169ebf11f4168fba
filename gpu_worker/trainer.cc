#include "gpu_worker/trainer.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/check.h"
#include "gpu_worker/log.h"
#include "gpu_worker/share.h"
#include "gpu_worker/stopwatch.h"

namespace ballast::worker {
namespace {

std::vector<absl::Span<float>> GradientsOf(Model& model, const TrainingJob& job) {
  std::vector<absl::Span<float>> gradients;
  for (size_t group = 0; group < job.group_elements.size(); ++group) {
    gradients.push_back(model.gradients(group));
  }
  return gradients;
}

ReducerOptions ReducerOptionsOf(const TrainerOptions& options, const TrainingJob& job) {
  ReducerOptions reducer{.accumulation = options.accumulation, .checked_as = {}};
  if (options.check_gradients) {
    for (const GroupSpec& group : job.spec.groups) reducer.checked_as.push_back(group.wire_dtype);
  }
  return reducer;
}

}  // namespace

absl::Status Trainer::Validate(const TrainerOptions& options) {
  if (!options.loss_scaler.has_value()) return absl::OkStatus();
  return client::DynamicLossScaler::Create(*options.loss_scaler).status();
}

Trainer::Trainer(const TrainerOptions& options, const TrainerParts& parts)
    : options_(options),
      model_(parts.model),
      data_(parts.data),
      job_(parts.job),
      collective_(parts.collective),
      staging_(parts.staging),
      optimizer_(parts.optimizer),
      reducer_(
          job_.layout, job_.buckets, model_.backward_order(), GradientsOf(model_, job_),
          collective_, [this](const ReducedShard& shard) { return HandOver(shard); },
          ReducerOptionsOf(options_, job_)) {}

absl::Status Trainer::Run(const TrainerEvents& events) {
  while (optimizer_.committed_step() < options_.steps) {
    BALLAST_RETURN_IF_ERROR(Step(optimizer_.committed_step() + 1, events));
  }
  return absl::OkStatus();
}

absl::Status Trainer::Step(uint64_t step, const TrainerEvents& events) {
  Stopwatch stopwatch;
  attempt_ = {.report = {.step = step, .loss_scale = loss_scale()},
              .micro_steps = MicroStepsOf(step)};
  BALLAST_RETURN_IF_ERROR(UnlessLost(optimizer_.BeginStep(Settings())));
  for (uint32_t micro_step = 0; micro_step < attempt_.micro_steps; ++micro_step) {
    BALLAST_RETURN_IF_ERROR(Annotate(MicroStep(micro_step), absl::StrCat("step ", step)));
  }
  // No rank seals before all have come so far: one that failed is noticed here at the latest.
  BALLAST_RETURN_IF_ERROR(SumLoss());
  if (!attempt_.lost) {
    attempt_.sealing = true;
    if (events.on_sealing) {
      BALLAST_RETURN_IF_ERROR(events.on_sealing(step, attempt_.report.loss));
    }
    BALLAST_RETURN_IF_ERROR(SealAndReceive());
    BALLAST_RETURN_IF_ERROR(ShareDecision());
  }

  StepReport& report = attempt_.report;
  if (attempt_.lost) {
    BALLAST_RETURN_IF_ERROR(JoinAgain(lost_because_));
    // A step that only some ranks saw the end of is committed all the same. One that no rank sealed
    // is not: an operator loaded a checkpoint of that step.
    if (optimizer_.committed_step() != step || !attempt_.sealing) return absl::OkStatus();
    if (!attempt_.decided) report.applied = optimizer_.last_step_applied();
  } else {
    if (scaler_.has_value()) scaler_->Update(/*overflow=*/!report.applied);
    Stopwatch gathering;
    if (report.applied) BALLAST_RETURN_IF_ERROR(GatherWeights());
    report.times.receive += gathering.Lap();
  }
  attempts_in_a_row_ = 0;
  report.seconds = stopwatch.Lap();
  report.tokens_per_second = tokens_per_step() / report.seconds;
  return events.on_step ? events.on_step(report) : absl::OkStatus();
}

// The collectives sum over ranks and the optimizer over micro-steps; it divides, once, by this.
client::StepSettings Trainer::Settings() const {
  client::StepSettings settings;
  settings.scale.loss_scale = loss_scale();
  if (scaler_.has_value()) settings.trainer_state = scaler_->Serialize();
  const double lr = LearningRate(options_.learning_rate, attempt_.report.step);
  for (int group = 0; group < job_.layout.group_count(); ++group) {
    settings.scale.divisors.push_back(tokens_per_step());
    settings.overrides[group].lr = lr;
  }
  return settings;
}

absl::Status Trainer::MicroStep(uint32_t micro_step) {
  StepReport& report = attempt_.report;
  Stopwatch stopwatch;
  const Batch batch =
      data_.Slice({.seed = options_.seed, .step = report.step, .micro_step = micro_step},
                  options_.batch, collective_.rank(), collective_.world_size());
  // Each bucket is reduced, and handed over, as soon as backward completes it.
  reducer_.StartMicroStep(micro_step, attempt_.micro_steps);
  report.loss += model_.ForwardBackward(
      batch, loss_scale(), [this](int parameter) { reducer_.GradientReady(parameter); });
  report.times.compute += stopwatch.Lap();

  BALLAST_ASSIGN_OR_RETURN(ReducedMicroStep reduced, reducer_.FinishMicroStep());
  report.times.reduce += reduced.reduce_seconds;
  report.times.send += reduced.consume_seconds;
  if (reduced.non_finite.has_value()) {
    Log().warn("step {} micro-step {}: rank {} has a gradient of {} at element {} of {}",
               report.step, micro_step, collective_.rank(), reduced.non_finite->value,
               reduced.non_finite->element,
               job_.layout.spec().parameters[reduced.non_finite->parameter].name);
  }
  stopwatch.Lap();
  if (!attempt_.lost) {
    BALLAST_RETURN_IF_ERROR(UnlessLost(
        optimizer_.EndMicroStep(micro_step, {.all = reduced.all_used,
                                             .parameters = std::move(reduced.used_parameters),
                                             .non_finite = reduced.non_finite})));
  }
  report.times.send += stopwatch.Lap();
  return absl::OkStatus();
}

// On the communication thread: this rank's shard of a bucket, chunk by chunk.
absl::Status Trainer::HandOver(const ReducedShard& shard) {
  const Bucket& bucket = job_.buckets[shard.bucket];
  const int64_t begin = bucket.begin + collective_.rank() * bucket.shard_elements;
  const absl::Span<const Chunk> chunks = job_.layout.chunks();
  auto chunk = std::lower_bound(chunks.begin(), chunks.end(), std::pair(bucket.group, begin),
                                [](const Chunk& c, const std::pair<int, int64_t>& at) {
                                  return std::pair(c.group, c.begin) < at;
                                });
  for (size_t done = 0; done < shard.values.size() && !attempt_.lost;
       done += chunk->elements, ++chunk) {
    Check(chunk->begin == begin + static_cast<int64_t>(done) && chunk->rank == collective_.rank(),
          "a rank's chunks tile its shards");
    const int index = static_cast<int>(chunk - chunks.begin());
    BALLAST_ASSIGN_OR_RETURN(GradientStaging::Payload payload,
                             staging_.Fill(index, shard.micro_step_end - 1,
                                           shard.values.subspan(done, chunk->elements)));
    BALLAST_RETURN_IF_ERROR(UnlessLost(optimizer_.Push({.chunk = index,
                                                        .micro_step_begin = shard.micro_step_begin,
                                                        .micro_step_end = shard.micro_step_end,
                                                        .final = shard.final,
                                                        .empty = false,
                                                        .payload = payload.bytes,
                                                        .released = std::move(payload.released)})));
  }
  return absl::OkStatus();
}

absl::Status Trainer::SumLoss() {
  Stopwatch stopwatch;
  double sums[] = {attempt_.report.loss, attempt_.lost ? 1.0 : 0.0};
  BALLAST_RETURN_IF_ERROR(collective_.AllReduceSum(absl::MakeSpan(sums)));
  attempt_.report.loss = sums[0] / tokens_per_step();
  attempt_.lost = sums[1] > 0;
  attempt_.report.times.reduce += stopwatch.Lap();
  return absl::OkStatus();
}

absl::Status Trainer::SealAndReceive() {
  StepReport& report = attempt_.report;
  Stopwatch stopwatch;
  absl::StatusOr<client::StepDecision> decision = optimizer_.Seal(attempt_.micro_steps);
  report.times.send += stopwatch.Lap();
  if (!decision.ok()) return UnlessLost(decision.status());
  attempt_.decided = true;
  report.norm = decision->norm;
  report.clip_coefficient = decision->clip_coefficient;
  report.applied = decision->applied;
  report.skip_reason = std::move(decision->skip_reason);

  BALLAST_RETURN_IF_ERROR(UnlessLost(optimizer_.ReceiveWeights()));
  const double receiving = stopwatch.Lap();
  report.times.update = std::min(receiving, optimizer_.update_seconds());
  report.times.receive = receiving - report.times.update;
  return absl::OkStatus();
}

// Whether all ranks saw the end of the step; if not, what became of it, from one that knows.
absl::Status Trainer::ShareDecision() {
  struct Ending {  // Of one size throughout: padding would send what the stack held.
    uint64_t lost;
    uint64_t decided;
    uint64_t applied;
    double norm;
    double clip_coefficient;
  };
  StepReport& report = attempt_.report;
  Stopwatch stopwatch;
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Ending> endings,
                           Share(Ending{.lost = attempt_.lost,
                                        .decided = attempt_.decided,
                                        .applied = report.applied,
                                        .norm = report.norm,
                                        .clip_coefficient = report.clip_coefficient},
                                 collective_));
  if (!attempt_.decided) {
    report.norm = report.clip_coefficient = std::numeric_limits<double>::quiet_NaN();
  }
  for (const Ending& ending : endings) {
    attempt_.lost |= ending.lost != 0;
    if (ending.decided == 0 || attempt_.decided) continue;
    attempt_.decided = true;
    report.applied = ending.applied != 0;
    report.norm = ending.norm;
    report.clip_coefficient = ending.clip_coefficient;
  }
  report.times.receive += stopwatch.Lap();
  return absl::OkStatus();
}

// This rank's shards are in place already; the others' arrive beside them.
absl::Status Trainer::GatherWeights() {
  for (const Bucket& bucket : job_.buckets) {
    const absl::Span<std::byte> all = WeightBytes(model_, bucket.group, bucket.begin,
                                                  bucket.shard_elements * collective_.world_size());
    const size_t shard_bytes = all.size() / collective_.world_size();
    BALLAST_RETURN_IF_ERROR(
        collective_.AllGather(all.subspan(collective_.rank() * shard_bytes, shard_bytes), all));
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- joining, and joining again

// An ABORTED marks the step as lost and is no error: this rank goes on with the collectives alone.
absl::Status Trainer::UnlessLost(const absl::Status& status) {
  if (!absl::IsAborted(status)) return status;
  attempt_.lost = true;
  lost_because_ = std::string(status.message());
  return absl::OkStatus();
}

absl::Status Trainer::JoinAgain(const std::string& reason) {
  const uint64_t step = attempt_.report.step;
  const std::string why = reason.empty() ? "another rank was told so" : reason;
  if (++attempts_in_a_row_ >= kMaxAttempts) {
    return absl::AbortedError(absl::StrCat(
        "step ", step, " was aborted ", attempts_in_a_row_, " times in a row, last because: ", why,
        "; find out who aborts it, and start the workers again"));
  }
  lost_because_.clear();
  BALLAST_RETURN_IF_ERROR(Annotate(Join(), absl::StrCat("after step ", step, " was aborted")));
  Log().info("step {} was aborted ({}); going on from committed step {}", step, why,
             optimizer_.committed_step());
  return absl::OkStatus();
}

// A rank that joins may end the sessions of those that joined before it, and a load between two may
// leave them at different steps: all join until they stand together.
absl::Status Trainer::Join() {
  absl::Status status;
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    status = optimizer_.Join([this](int chunk, absl::Span<float> values) {
      FillInitialValues(model_, job_.layout, chunk, values);
    });
    if (!status.ok() && !absl::IsAborted(status)) return status;
    BALLAST_ASSIGN_OR_RETURN(const bool together, StandTogether(status.ok()));
    if (!together) continue;
    if (optimizer_.committed_step() > options_.steps) return PastTheLastStep();
    LogTransport();
    staging_.Use([this](int chunk) { return optimizer_.gradient_memory(chunk); });
    BALLAST_RETURN_IF_ERROR(RestoreScaler());
    return GatherWeights();
  }
  return absl::AbortedError(
      absl::StrCat("job ", job_.spec.name, ": the ranks joined ", kMaxAttempts,
                   " times and never stood at the same step (", status.message(),
                   "); find out who takes a rank or loads checkpoints all the time"));
}

void Trainer::LogTransport() {
  const std::string transport = optimizer_.transport();
  if (transport == transport_) return;
  Log().info("rank {}: gradients and weights travel through {}{}", collective_.rank(), transport,
             transport_.empty() ? "" : absl::StrCat(", no longer through ", transport_));
  transport_ = transport;
}

absl::Status Trainer::PastTheLastStep() const {
  return absl::FailedPreconditionError(
      absl::StrCat("job ", job_.spec.name, " is at step ", optimizer_.committed_step(),
                   " already; ask for more with --steps, or start another with --job"));
}

absl::StatusOr<bool> Trainer::StandTogether(bool joined) {
  struct Place {
    uint64_t joined = 0;
    uint64_t generation = 0;
    uint64_t committed_step = 0;
    bool operator==(const Place&) const = default;
  };
  Place mine;
  if (joined) mine = {1, optimizer_.generation(), optimizer_.committed_step()};
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Place> places, Share(mine, collective_));
  return places[0].joined == 1 &&
         std::all_of(places.begin(), places.end(),
                     [&](const Place& place) { return place == places[0]; });
}

// A step's begin leaves the scaler's state as it was before that step's outcome.
absl::Status Trainer::RestoreScaler() {
  if (!options_.loss_scaler.has_value()) return absl::OkStatus();
  const std::string state = optimizer_.trainer_state();
  if (state.empty()) {
    BALLAST_ASSIGN_OR_RETURN(scaler_, client::DynamicLossScaler::Create(*options_.loss_scaler));
    return absl::OkStatus();
  }
  BALLAST_ASSIGN_OR_RETURN(scaler_,
                           client::DynamicLossScaler::Deserialize(state, *options_.loss_scaler));
  scaler_->Update(/*overflow=*/!optimizer_.last_step_applied());
  return absl::OkStatus();
}

uint32_t Trainer::MicroStepsOf(uint64_t step) const {
  return options_.micro_steps_of_step ? options_.micro_steps_of_step(step) : options_.micro_steps;
}

double Trainer::tokens_per_step() const {
  return static_cast<double>(options_.batch) * options_.context * attempt_.micro_steps;
}

}  // namespace ballast::worker
