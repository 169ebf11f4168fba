#include "gpu_worker/cpu/cpu_backend.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/base/stopwatch.h"
#include "gpu_worker/buckets/bucket_order.h"
#include "gpu_worker/buckets/non_finite.h"
#include "gpu_worker/muon/cpu_second_round.h"

namespace ballast::worker {
namespace {

// The job's groups have one return dtype.
std::unique_ptr<Model> Placed(std::unique_ptr<Model> model, const TrainingJob& job) {
  model->Place(job.layout, job.group_elements, job.spec.groups[0].return_dtype);
  return model;
}

std::vector<absl::Span<float>> GradientsOf(Model& model, const TrainingJob& job) {
  std::vector<absl::Span<float>> gradients;
  for (size_t group = 0; group < job.group_elements.size(); ++group) {
    gradients.push_back(model.gradients(group));
  }
  return gradients;
}

std::vector<DType> WireDTypes(const TrainingJob& job) {
  std::vector<DType> dtypes;
  for (const GroupSpec& group : job.spec.groups) dtypes.push_back(group.wire_dtype);
  return dtypes;
}

}  // namespace

CpuBackend::CpuBackend(const CpuBackendOptions& options, std::unique_ptr<Model> model,
                       const TrainingJob& job, Collective& collective)
    : job_(job),
      collective_(collective),
      model_(Placed(std::move(model), job)),
      staging_(job.layout, WireDTypes(job), collective.rank(), options.timeout),
      second_round_(job.spec.newton_schulz == Orthogonalizer::kWorkers
                        ? std::make_unique<CpuSecondRound>(job, collective)
                        : nullptr),
      timeline_(options.timeline),
      // model_ comes before it and is placed by then: the gradients that are reduced have their
      // memory.
      reducer_(
          job.layout, job.buckets, model_->backward_order(), GradientsOf(*model_, job), collective,
          [this](const ReducedGradient& gradient) { HandOver(gradient); },
          {.accumulation = options.accumulation,
           .checked_as = options.check_gradients ? WireDTypes(job) : std::vector<DType>{},
           .on_reduced = [this](int bucket, double seconds) { NoteReduced(bucket, seconds); }}) {}

absl::Status CpuBackend::UseGradientMemory(
    const std::function<absl::Span<std::byte>(int chunk)>& memory) {
  staging_.Use(memory);
  return absl::OkStatus();
}

// Each bucket is reduced, and handed over, as soon as backward completes it.
absl::Status CpuBackend::MicroStep(const MicroStepInput& input) {
  BALLAST_RETURN_IF_ERROR(failure_);
  Stopwatch stopwatch;
  step_number_ = input.step;
  // This comes before backward: buckets must be filling when the first parameter is announced.
  reducer_.StartMicroStep(input.micro_step, input.micro_steps);
  {
    const TimelineScope scope(
        timeline_, Track::kCompute,
        {.step = input.step, .micro_step = static_cast<int>(input.micro_step)});
    step_.loss_sum += model_->ForwardBackward(input.batch, input.loss_scale, [this](int parameter) {
      reducer_.GradientReady(parameter);
    });
  }
  step_.compute_seconds += stopwatch.Lap();

  // All buckets are reduced and handed over when it returns, so the pushes of a micro-step come
  // before its end, and step_error_ belongs to this thread again.
  absl::StatusOr<ReducedMicroStep> reduced = reducer_.FinishMicroStep();
  // The error is kept for good: the ranks may be at different collectives now, so no later one can
  // fit.
  if (!reduced.ok()) return failure_ = reduced.status();
  step_.reduce_seconds += reduced->reduce_seconds;
  step_.send_seconds += reduced->consume_seconds;
  stopwatch.Lap();
  if (step_error_.ok()) step_error_ = EndMicroStep(input.micro_step, *std::move(reduced));
  step_.send_seconds += stopwatch.Lap();
  return absl::OkStatus();  // An error of the step waits for its end: others wait for this rank.
}

// A parameter is used if backward reached it, even with zeros. A rank without tokens is no
// exception: a pass over none reaches what any pass of its model does, with zeros, as torch's
// backward of an empty sum. The service unites the ranks' sets, so the full set adds nothing to the
// others' full sets; an empty set would be taken for a backward whose hooks did not fire, and the
// seal refused.
absl::Status CpuBackend::EndMicroStep(uint32_t micro_step, ReducedMicroStep reduced) {
  if (reduced.reached_nothing()) {
    return NoParameterReached(job_.layout, collective_.rank(), micro_step);
  }
  LogNonFinite(job_.layout, collective_.rank(), step_number_, micro_step, reduced.non_finite);
  return sink_->EndMicroStep(micro_step, {.all = reduced.all_used,
                                          .parameters = std::move(reduced.used_parameters),
                                          .non_finite = reduced.non_finite});
}

absl::StatusOr<FinishedStep> CpuBackend::FinishStep() {
  // Both are emptied before any return: nothing of a step that failed may show in the next one.
  const FinishedStep finished = std::exchange(step_, {});
  const absl::Status step_error = std::exchange(step_error_, absl::OkStatus());
  // The failure comes first. The step's error may be an ABORTED, after which the trainer joins
  // again and goes on, and over this collective it cannot go on.
  BALLAST_RETURN_IF_ERROR(failure_);
  BALLAST_RETURN_IF_ERROR(step_error);
  return finished;
}

// On the reducer's thread: this rank's part of a reduced bucket.
void CpuBackend::HandOver(const ReducedGradient& gradient) {
  const TimelineScope scope(timeline_, Track::kSend,
                            {.step = step_number_, .bucket = gradient.bucket});
  if (step_error_.ok()) step_error_ = PushChunks(gradient);
}

absl::Status CpuBackend::PushChunks(const ReducedGradient& gradient) {
  // Partitions follow the buckets (MakeTrainingJob), so a shard is whole chunks.
  const RankShard place = ShardOf(job_.layout, job_.buckets[gradient.bucket], collective_.rank());
  for (const int index : place.chunks) {
    const Chunk& chunk = job_.layout.chunks()[index];
    // Fill waits while the optimizer still has the chunk's gradient of the micro-step before. This
    // holds up the reducer's thread, and so, in the end, the ranks that wait in its collectives.
    BALLAST_ASSIGN_OR_RETURN(
        GradientStaging::Payload payload,
        staging_.Fill(index, gradient.micro_step_end - 1,
                      gradient.values.subspan(chunk.begin - place.begin, chunk.elements)));
    BALLAST_RETURN_IF_ERROR(sink_->Push({.chunk = index,
                                         .micro_step_begin = gradient.micro_step_begin,
                                         .micro_step_end = gradient.micro_step_end,
                                         .final = gradient.final,
                                         .empty = false,
                                         .payload = payload.bytes,
                                         .released = std::move(payload.released)}));
  }
  return absl::OkStatus();
}

void CpuBackend::NoteReduced(int bucket, double seconds) {
  if (timeline_ == nullptr) return;
  // The reducer knows no timeline and tells durations only; the call comes at the end of one.
  const Timeline::Clock::time_point end = Timeline::Clock::now();
  timeline_->Add(Track::kReduce, {.step = step_number_, .bucket = bucket},
                 end - std::chrono::duration_cast<Timeline::Clock::duration>(
                           std::chrono::duration<double>(seconds)),
                 end);
}

absl::Span<std::byte> CpuBackend::WeightBytes(int group, int64_t begin, int64_t elements) {
  const int64_t size = SizeBytes(model_->weights_dtype());
  return model_->weights(group).subspan(begin * size, elements * size);
}

absl::Span<std::byte> CpuBackend::weights(int chunk_index) {
  const Chunk& chunk = job_.layout.chunks()[chunk_index];
  return WeightBytes(chunk.group, chunk.begin, chunk.elements);
}

// This rank's shards are in place already; the others' arrive next to them.
absl::Status CpuBackend::GatherWeights() {
  for (size_t i = 0; i < job_.buckets.size(); ++i) {
    const Bucket& bucket = job_.buckets[i];
    const TimelineScope scope(timeline_, Track::kGather,
                              {.step = step_number_, .bucket = static_cast<int>(i)});
    // Shards of one size may reach past the bucket's end. group_elements includes that memory.
    const absl::Span<std::byte> all =
        WeightBytes(bucket.group, bucket.begin, bucket.shard_elements * collective_.world_size());
    const size_t shard_bytes = all.size() / collective_.world_size();
    BALLAST_RETURN_IF_ERROR(
        collective_.AllGather(all.subspan(collective_.rank() * shard_bytes, shard_bytes), all));
  }
  return absl::OkStatus();
}

absl::Status CpuBackend::ReadWeights(int group, absl::Span<std::byte> to) {
  const absl::Span<const std::byte> from = model_->weights(group).subspan(0, to.size());
  std::copy(from.begin(), from.end(), to.begin());
  return absl::OkStatus();
}

}  // namespace ballast::worker
