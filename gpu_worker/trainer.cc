#include "gpu_worker/trainer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/check.h"
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

}  // namespace

Trainer::Trainer(const TrainerOptions& options, const TrainerParts& parts)
    : options_(options),
      model_(parts.model),
      data_(parts.data),
      job_(parts.job),
      collective_(parts.collective),
      staging_(parts.staging),
      optimizer_(parts.optimizer),
      reducer_(job_.layout, job_.buckets, model_.backward_order(), GradientsOf(model_, job_),
               collective_, [this](int bucket, uint32_t micro_step, absl::Span<const float> shard) {
                 return HandOver(bucket, micro_step, shard);
               }) {}

absl::Status Trainer::Run(const std::function<void(const StepReport&)>& on_step) {
  BALLAST_RETURN_IF_ERROR(optimizer_.Start([this](int chunk, absl::Span<float> values) {
    FillInitialValues(model_, job_.layout, chunk, values);
  }));
  BALLAST_RETURN_IF_ERROR(GatherWeights());
  while (optimizer_.committed_step() < options_.steps) {
    BALLAST_ASSIGN_OR_RETURN(const StepReport report, Step(optimizer_.committed_step() + 1));
    on_step(report);
  }
  return absl::OkStatus();
}

absl::StatusOr<StepReport> Trainer::Step(uint64_t step) {
  Stopwatch stopwatch;
  StepReport report;
  report.step = step;
  BALLAST_RETURN_IF_ERROR(optimizer_.BeginStep(Settings(step)));
  for (uint32_t micro_step = 0; micro_step < options_.micro_steps; ++micro_step) {
    BALLAST_RETURN_IF_ERROR(MicroStep(step, micro_step, report));
  }
  BALLAST_RETURN_IF_ERROR(SealAndReceive(report));
  BALLAST_RETURN_IF_ERROR(SumLoss(report));
  report.seconds = stopwatch.Lap();
  report.tokens_per_second = tokens_per_step() / report.seconds;
  return report;
}

// The collectives sum over ranks and the optimizer over micro-steps; it divides, once, by this.
client::StepSettings Trainer::Settings(uint64_t step) const {
  client::StepSettings settings;
  const double lr = LearningRate(options_.learning_rate, step);
  for (int group = 0; group < job_.layout.group_count(); ++group) {
    settings.scale.divisors.push_back(tokens_per_step());
    settings.overrides[group].lr = lr;
  }
  return settings;
}

absl::Status Trainer::MicroStep(uint64_t step, uint32_t micro_step, StepReport& report) {
  Stopwatch stopwatch;
  const Batch batch = data_.Slice({.seed = options_.seed, .step = step, .micro_step = micro_step},
                                  options_.batch, collective_.rank(), collective_.world_size());
  // Each bucket is reduced, and handed over, as soon as backward completes it.
  reducer_.StartMicroStep(micro_step);
  report.loss +=
      model_.ForwardBackward(batch, [this](int parameter) { reducer_.GradientReady(parameter); });
  report.times.compute += stopwatch.Lap();

  BALLAST_ASSIGN_OR_RETURN(ReducedMicroStep reduced, reducer_.FinishMicroStep());
  report.times.reduce += reduced.reduce_seconds;
  report.times.send += reduced.consume_seconds;
  stopwatch.Lap();
  BALLAST_RETURN_IF_ERROR(optimizer_.EndMicroStep(
      micro_step, {.all = reduced.all_used, .parameters = std::move(reduced.used_parameters)}));
  report.times.send += stopwatch.Lap();
  return absl::OkStatus();
}

// On the communication thread: this rank's shard of a bucket, chunk by chunk.
absl::Status Trainer::HandOver(int bucket_index, uint32_t micro_step,
                               absl::Span<const float> shard) {
  const Bucket& bucket = job_.buckets[bucket_index];
  const int64_t begin = bucket.begin + collective_.rank() * bucket.shard_elements;
  const absl::Span<const Chunk> chunks = job_.layout.chunks();
  auto chunk = std::lower_bound(chunks.begin(), chunks.end(), std::pair(bucket.group, begin),
                                [](const Chunk& c, const std::pair<int, int64_t>& at) {
                                  return std::pair(c.group, c.begin) < at;
                                });
  for (size_t done = 0; done < shard.size(); done += chunk->elements, ++chunk) {
    Check(chunk->begin == begin + static_cast<int64_t>(done) && chunk->rank == collective_.rank(),
          "a rank's chunks tile its shards");
    const int index = static_cast<int>(chunk - chunks.begin());
    GradientStaging::Payload payload = staging_.Fill(index, shard.subspan(done, chunk->elements));
    BALLAST_RETURN_IF_ERROR(optimizer_.Push({.chunk = index,
                                             .micro_step_begin = micro_step,
                                             .micro_step_end = micro_step + 1,
                                             .final = micro_step + 1 == options_.micro_steps,
                                             .empty = false,
                                             .payload = payload.bytes,
                                             .released = std::move(payload.released)}));
  }
  return absl::OkStatus();
}

absl::Status Trainer::SealAndReceive(StepReport& report) {
  Stopwatch stopwatch;
  BALLAST_ASSIGN_OR_RETURN(client::StepDecision decision, optimizer_.Seal(options_.micro_steps));
  report.times.send += stopwatch.Lap();
  report.norm = decision.norm;
  report.clip_coefficient = decision.clip_coefficient;
  report.applied = decision.applied;
  report.skip_reason = std::move(decision.skip_reason);

  BALLAST_RETURN_IF_ERROR(optimizer_.ReceiveWeights());
  const double receiving = stopwatch.Lap();
  report.times.update = std::min(receiving, optimizer_.update_seconds());
  report.times.receive = receiving - report.times.update;
  if (decision.applied) BALLAST_RETURN_IF_ERROR(GatherWeights());
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

absl::Status Trainer::SumLoss(StepReport& report) {
  BALLAST_RETURN_IF_ERROR(collective_.AllReduceSum({&report.loss, 1}));
  report.loss /= tokens_per_step();
  return absl::OkStatus();
}

double Trainer::tokens_per_step() const {
  return static_cast<double>(options_.batch) * options_.context * options_.micro_steps;
}

}  // namespace ballast::worker
