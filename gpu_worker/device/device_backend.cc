// Which stream each piece of a step runs on, and which event lets it begin. Everything on a stream
// comes after what that stream was given before. Host threads: the caller's gives `compute`, the
// communication thread `communicate` and `copy_out`, the sender (shard_sender.h) waits for events
// alone; between FinishStep and the next MicroStep the caller has `communicate` too.
//
//   work                            stream        begins after                      event after it
//   ------------------------------  ------------  --------------------------------  --------------
//   forward of a layer              compute       gathered, of its buckets
//   backward of a layer             compute       released, of the buckets that it
//                                                 writes, by the micro-step before  ready
//   adding to the sum               communicate   ready                             released
//   search for infinities, reduce-
//   scatter in place                communicate   ready, of the last micro-step
//   rounding to a wire buffer       communicate   copied out, of the bucket before
//                                                 that used the buffer              released
//   copying a chunk to the host     copy_out      released                          there
//   (the last of a bucket)          copy_out                                        copied out
//   handing a chunk over            the sender    there
//   the loss to the host            compute                                         done
//   ------------------------------  ------------  --------------------------------  --------------
//   copying a chunk's new weights   copy_in       the host's word; gathered, of
//                                                 the weights before                copied in
//   all-gather of a bucket          communicate   copied in                         gathered
//
// With the optimizer on the device the rounding writes to the chunk's own place, `there` is
// recorded after it on `communicate`, and nothing is copied out or in.
#include "gpu_worker/device/device_backend.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/check.h"
#include "gpu_worker/device/device_buckets.h"
#include "gpu_worker/device/device_reduction.h"
#include "gpu_worker/device/device_trace.h"
#include "gpu_worker/device/gradient_path.h"
#include "gpu_worker/device/pipeline_errors.h"
#include "gpu_worker/device/weights_return.h"
#include "gpu_worker/stopwatch.h"

namespace ballast::worker {
namespace {

class DeviceBackend final : public TrainingBackend {
 public:
  DeviceBackend(const DeviceBackendOptions& options, const DeviceBackendParts& parts)
      : options_(options), parts_(parts), job_(parts.job), errors_([this] { Stop(); }) {}
  absl::Status Init(absl::Span<const int> backward_order, const MakeDeviceModel& make_model);
  ~DeviceBackend() override;

  void Start(StepSink sink) override { gradient_path_->Start(std::move(sink)); }
  absl::Status UseGradientMemory(
      const std::function<absl::Span<std::byte>(int chunk)>& memory) override {
    return gradient_path_->UseGradientMemory(memory);
  }
  absl::Status MicroStep(const MicroStepInput& input) override;
  absl::StatusOr<FinishedStep> FinishStep() override;
  absl::Span<std::byte> weights(int chunk) override { return weights_->at(chunk); }
  void OnWeights(int chunk) override { weights_->OnWeights(chunk); }
  absl::Status GatherWeights() override;
  absl::Status ReadWeights(int group, absl::Span<std::byte> to) override;

 private:
  absl::Status AllocateSpaces();
  absl::Status ExplainMemory(const absl::Status& status) const;

  absl::Status GivePass(const MicroStepInput& input);
  absl::Status ZeroUnreached();
  void NoteWait(double seconds, double places_waited_before);
  absl::Status ReadLoss();
  absl::Status Fail(const absl::Status& status, absl::string_view what);

  void Stop();

  const DeviceBackendOptions options_;
  const DeviceBackendParts parts_;
  const TrainingJob& job_;
  PipelineErrors errors_;

  std::unique_ptr<DeviceTrace> trace_;
  std::unique_ptr<DeviceStream> compute_;
  std::unique_ptr<DeviceStream> communicate_;
  std::unique_ptr<DeviceStream> copy_out_;
  std::vector<std::unique_ptr<DeviceMemory>> live_weights_;  // By group, as the two below.
  std::vector<std::unique_ptr<DeviceMemory>> gradients_;
  std::vector<std::unique_ptr<DeviceMemory>> sums_;  // Empty: nothing is summed here.
  std::unique_ptr<DeviceMemory> loss_sum_;           // A double.
  std::unique_ptr<HostMemory> host_loss_sum_;
  std::unique_ptr<DeviceEvent> done_;

  std::unique_ptr<DeviceBuckets> buckets_;
  std::unique_ptr<DeviceReduction> reduction_;
  std::unique_ptr<WeightsReturn> weights_;
  std::unique_ptr<DeviceGpt> model_;
  std::unique_ptr<GradientPath> gradient_path_;

  // Of the caller.
  uint64_t step_ = 0;
  std::vector<bool> reached_;  // By parameter, in this pass.
  FinishedStep finished_;
};

// ---------------------------------------------------------------- a step: passes

absl::Status DeviceBackend::MicroStep(const MicroStepInput& input) {
  BALLAST_RETURN_IF_ERROR(errors_.failure());
  Stopwatch stopwatch;
  const double places_waited = gradient_path_->places_waited_seconds();
  step_ = input.step;
  const absl::Status given = GivePass(input);
  const double waited = buckets_->TakeWaitedSeconds();
  finished_.compute_seconds += stopwatch.Lap() - waited;
  NoteWait(waited, places_waited);
  return Fail(given, absl::StrCat("step ", input.step, " micro-step ", input.micro_step));
}

// Backward's buckets go on their way while it gives the rest of its work, and the pass ends here
// before the device has begun with most of it.
absl::Status DeviceBackend::GivePass(const MicroStepInput& input) {
  const bool sums_here = !sums_.empty() && input.micro_steps > 1;
  gradient_path_->BeginPass({.step = input.step,
                             .micro_step = input.micro_step,
                             .micro_steps = input.micro_steps,
                             .sums_here = sums_here});
  reached_.assign(job_.layout.spec().parameters.size(), false);
  BALLAST_RETURN_IF_ERROR(buckets_->StartPass(*compute_, sums_here ? input.micro_step : 0,
                                              sums_here ? input.micro_steps : 1));
  const DevicePassEvents events{
      .before_weights = [this](int p) { return weights_->BeforeWeights(*compute_, p); },
      .before_gradient = [this](int p) { return buckets_->BeforeGradient(*compute_, p); },
      .gradient_ready =
          [this](int p) {
            Check(!reached_[p], "a parameter's gradient is complete once in a micro-step");
            reached_[p] = true;
            return buckets_->GradientReady(*compute_, p);
          }};
  BALLAST_RETURN_IF_ERROR(
      trace_->Around(*compute_, Track::kCompute,
                     {.step = input.step, .micro_step = static_cast<int>(input.micro_step)}, [&] {
                       return model_->ForwardBackward(input.batch, input.loss_scale,
                                                      /*first=*/input.micro_step == 0,
                                                      loss_sum_->as<double>(), events);
                     }));

  client::UsedParameters used;
  for (size_t p = 0; p < reached_.size(); ++p) {
    if (job_.layout.place(p).offset < 0) continue;  // Frozen.
    if (reached_[p]) used.parameters.push_back(static_cast<int>(p));
    used.all &= reached_[p];
  }
  BALLAST_RETURN_IF_ERROR(ZeroUnreached());
  // The others' collectives fit all the same; only this rank must not seal.
  if (used.parameters.empty() && !used.all) {
    errors_.FailStep(NoParameterReached(job_.layout, parts_.collective.rank(), input.micro_step));
  }
  if (used.all) used.parameters.clear();
  gradient_path_->EndPass(std::move(used));
  return absl::OkStatus();
}

absl::Status DeviceBackend::ZeroUnreached() {
  for (size_t p = 0; p < reached_.size(); ++p) {
    const ParameterPlace& place = job_.layout.place(p);
    if (reached_[p] || place.offset < 0) continue;
    float* gradients = gradients_[job_.layout.spec().parameters[p].group]->as<float>();
    BALLAST_RETURN_IF_ERROR(buckets_->BeforeGradient(*compute_, p));
    BALLAST_RETURN_IF_ERROR(
        compute_->Zero(gradients + place.offset, place.elements * sizeof(float)));
    BALLAST_RETURN_IF_ERROR(buckets_->GradientReady(*compute_, p));
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- a step: its end

absl::StatusOr<FinishedStep> DeviceBackend::FinishStep() {
  Stopwatch stopwatch;
  const double places_waited = gradient_path_->places_waited_seconds();
  const absl::Status loss = errors_.failure().ok() ? ReadLoss() : absl::OkStatus();
  Fail(loss, absl::StrCat("step ", step_)).IgnoreError();
  finished_.compute_seconds += stopwatch.Lap();
  gradient_path_->WaitReduced();
  NoteWait(stopwatch.Lap(), places_waited);
  gradient_path_->WaitSent();
  finished_.send_seconds += stopwatch.Lap();

  const FinishedStep finished = std::exchange(finished_, {});
  BALLAST_RETURN_IF_ERROR(errors_.FinishStep());
  return finished;
}

absl::Status DeviceBackend::ReadLoss() {
  const absl::Span<std::byte> to = host_loss_sum_->bytes().subspan(0, sizeof(double));
  BALLAST_RETURN_IF_ERROR(compute_->CopyToHost(to, loss_sum_->data()));
  BALLAST_RETURN_IF_ERROR(compute_->Record(*done_));
  BALLAST_RETURN_IF_ERROR(done_->Synchronize());
  finished_.loss_sum = *reinterpret_cast<const double*>(to.data());
  return absl::OkStatus();
}

// Reductions wait behind an optimizer that holds all places: that much of a wait for them is its.
void DeviceBackend::NoteWait(double seconds, double places_waited_before) {
  const double sending =
      std::min(seconds, gradient_path_->places_waited_seconds() - places_waited_before);
  finished_.send_seconds += sending;
  finished_.reduce_seconds += seconds - sending;
}

// ---------------------------------------------------------------- weights

absl::Status DeviceBackend::GatherWeights() {
  BALLAST_RETURN_IF_ERROR(errors_.failure());
  return Fail(weights_->Gather(*communicate_, parts_.collective, step_),
              absl::StrCat("after step ", step_, ": weights"));
}

absl::Status DeviceBackend::ReadWeights(int group, absl::Span<std::byte> to) {
  BALLAST_RETURN_IF_ERROR(errors_.failure());
  Check(to.size() <= live_weights_[group]->size_bytes(), "a flat space is read, and not past it");
  const auto read = [&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(weights_->BeforeGroup(*compute_, group));
    BALLAST_RETURN_IF_ERROR(compute_->CopyToHost(to, live_weights_[group]->data()));
    BALLAST_RETURN_IF_ERROR(compute_->Record(*done_));
    return done_->Synchronize();
  };
  return Fail(read(), absl::StrCat("after step ", step_, ": reading the weights"));
}

// ---------------------------------------------------------------- beginning and ending

absl::Status DeviceBackend::Fail(const absl::Status& status, absl::string_view what) {
  if (status.ok()) return status;
  errors_.Fail(Annotate(status, what));
  return errors_.current();
}

// By the first failure, or when all ends: every thread that waits for another goes on.
void DeviceBackend::Stop() {
  buckets_->Stop();
  gradient_path_->Stop();
}

absl::Status DeviceBackend::ExplainMemory(const absl::Status& status) const {
  if (!absl::IsResourceExhausted(status)) return status;
  int64_t elements = 0;
  for (const int64_t of_group : job_.group_elements) elements += of_group;
  const auto gib = [](int64_t bytes) {
    return absl::StrCat(static_cast<double>(bytes >> 20) / 1024, " GiB");
  };
  return absl::ResourceExhaustedError(absl::StrCat(
      status.message(), "; besides the activations the model needs ", gib(2 * elements),
      " for weights, ", gib(4 * elements), " for gradients",
      options_.accumulation == Accumulation::kWorker && job_.spec.max_micro_steps != 1
          ? absl::StrCat(" and ", gib(4 * elements),
                         " for sums of micro-steps, which accumulation in the service does not")
          : "",
      "; give micro-steps fewer sequences, or choose a smaller model or another GPU"));
}

absl::Status DeviceBackend::AllocateSpaces() {
  const bool sums =
      options_.accumulation == Accumulation::kWorker && job_.spec.max_micro_steps != 1;
  for (const int64_t elements : job_.group_elements) {
    BALLAST_ASSIGN_OR_RETURN(live_weights_.emplace_back(),
                             parts_.device.Allocate(elements * sizeof(BFloat16Bits), "weights"));
    BALLAST_ASSIGN_OR_RETURN(gradients_.emplace_back(),
                             parts_.device.Allocate(elements * sizeof(float), "gradients"));
    if (!sums) continue;
    BALLAST_ASSIGN_OR_RETURN(sums_.emplace_back(), parts_.device.Allocate(elements * sizeof(float),
                                                                          "sums of micro-steps"));
  }
  BALLAST_ASSIGN_OR_RETURN(loss_sum_, parts_.device.Allocate(sizeof(double), "the loss"));
  BALLAST_ASSIGN_OR_RETURN(host_loss_sum_, parts_.device.AllocateHost(sizeof(double), "the loss"));
  return absl::OkStatus();
}

absl::Status DeviceBackend::Init(absl::Span<const int> backward_order,
                                 const MakeDeviceModel& make_model) {
  Device& device = parts_.device;
  const int rank = parts_.collective.rank();
  for (const GroupSpec& group : job_.spec.groups) {
    if (group.return_dtype == DType::kBFloat16) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("group ", group.name, ": passes on a GPU compute with weights in bf16, not ",
                     Name(group.return_dtype)));
  }
  BALLAST_ASSIGN_OR_RETURN(trace_, DeviceTrace::Create(device, parts_.timeline));
  BALLAST_ASSIGN_OR_RETURN(compute_, device.CreateStream("compute"));
  BALLAST_ASSIGN_OR_RETURN(communicate_, device.CreateStream("communicate"));
  BALLAST_ASSIGN_OR_RETURN(copy_out_, device.CreateStream("copy_out"));
  BALLAST_ASSIGN_OR_RETURN(done_, device.CreateEvent());
  BALLAST_RETURN_IF_ERROR(ExplainMemory(AllocateSpaces()));

  BALLAST_ASSIGN_OR_RETURN(
      buckets_, DeviceBuckets::Create(device, job_.layout, job_.buckets, backward_order));
  DeviceFlatSpaces spaces;
  std::vector<absl::Span<std::byte>> live;
  std::vector<float*> sums;
  for (size_t group = 0; group < live_weights_.size(); ++group) {
    spaces.weights.push_back(live_weights_[group]->as<BFloat16Bits>());
    spaces.gradients.push_back(gradients_[group]->as<float>());
    live.push_back({live_weights_[group]->data(), live_weights_[group]->size_bytes()});
    if (!sums_.empty()) sums.push_back(sums_[group]->as<float>());
  }
  BALLAST_ASSIGN_OR_RETURN(
      reduction_,
      DeviceReduction::Create({device, *communicate_, parts_.collective, job_, buckets_->order()},
                              {.gradients = spaces.gradients, .sums = std::move(sums)},
                              options_.check_gradients));
  BALLAST_ASSIGN_OR_RETURN(
      weights_, WeightsReturn::Create(device, job_, buckets_->order(), std::move(live), rank,
                                      options_.on_device, *trace_));
  absl::StatusOr<std::unique_ptr<DeviceGpt>> model = make_model({device, *compute_, parts_.matmul});
  BALLAST_RETURN_IF_ERROR(ExplainMemory(model.status()));
  model_ = *std::move(model);
  model_->Place(job_.layout, spaces);
  absl::StatusOr<std::unique_ptr<GradientPath>> path =
      GradientPath::Create({device, *communicate_, *copy_out_, parts_.collective, job_, *buckets_,
                            *reduction_, *trace_, errors_},
                           {.rank = rank,
                            .on_device = options_.on_device,
                            .staging_slots = options_.staging_slots,
                            .timeout = options_.timeout});
  BALLAST_RETURN_IF_ERROR(ExplainMemory(path.status()));
  gradient_path_ = *std::move(path);
  return absl::OkStatus();
}

DeviceBackend::~DeviceBackend() {
  if (gradient_path_ != nullptr) gradient_path_->End();
  for (DeviceStream* stream : {compute_.get(), communicate_.get()}) {
    if (stream != nullptr) stream->Synchronize().IgnoreError();
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<TrainingBackend>> MakeDeviceBackendOf(
    const DeviceBackendOptions& options, const DeviceBackendParts& parts,
    absl::Span<const int> backward_order, const MakeDeviceModel& make_model) {
  auto backend = std::make_unique<DeviceBackend>(options, parts);
  BALLAST_RETURN_IF_ERROR(backend->Init(backward_order, make_model));
  return backend;
}

absl::StatusOr<std::unique_ptr<TrainingBackend>> MakeDeviceBackend(
    const DeviceBackendOptions& options, const DeviceBackendParts& parts) {
  return MakeDeviceBackendOf(
      options, parts, GptBackwardOrder(options.model), [&](const DeviceGptParts& gpt_parts) {
        return DeviceGpt::Create(options.model, gpt_parts, options.sequences);
      });
}

}  // namespace ballast::worker
