// Which stream each piece of a step runs on, and which event lets it begin. Everything on a stream
// begins after what that stream was given before. Host threads: the caller's gives work to
// `compute`, the communication thread (gradient_path.h) to `communicate` and `copy_out`, the thread
// that is notified of weights to `copy_in`; the sender (gradient_sender.h) only waits for events.
//
//   work                            stream        begins after                      event after it
//   ------------------------------  ------------  --------------------------------  --------------
//   forward of a layer              compute       gathered, of its buckets
//   backward of a layer, adding to
//   what the micro-steps before     compute       released, of the buckets that it
//   gave where those are summed                   writes, by the last reduction     ready
//   search for infinities, reduce-                ready; of a sum's last
//   scatter in place                communicate   micro-step only
//   rounding to a wire buffer       communicate   copied out, of the bucket before
//                                                 that used the buffer              released
//   copying a chunk to the host     copy_out      released                          there
//   (the last of a bucket)          copy_out                                        copied out
//   handing a chunk over            the sender    there
//   the loss to the host            compute                                         done
//   ------------------------------  ------------  --------------------------------  --------------
//   copying a chunk's new weights   copy_in       the host's notice; gathered, of
//   to their place, or, while they                the weights before                copied in
//   are provisional, to a buffer
//   all-gather of a bucket from     communicate   copied in; on the host, that
//   there                                         the step is decided               gathered
//   the next step's first forward,  compute       gathered, of its buckets
//   layer by layer
//   ------------------------------  ------------  --------------------------------  --------------
//   Muon's second round, between    communicate   the host's notice
//   the decision and the weights
//
// With the optimizer on the device the rounding writes to the chunk's own place, `there` is
// recorded after it on `communicate`, and nothing is copied out or in; the next forward begins when
// the optimizer is done.
#include "gpu_worker/pipeline/device_backend.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/base/stopwatch.h"
#include "gpu_worker/device/stream_seconds.h"
#include "gpu_worker/muon/device_second_round.h"
#include "gpu_worker/pipeline/device_buckets.h"
#include "gpu_worker/pipeline/device_reduction.h"
#include "gpu_worker/pipeline/device_spaces.h"
#include "gpu_worker/pipeline/device_trace.h"
#include "gpu_worker/pipeline/gradient_path.h"
#include "gpu_worker/pipeline/pipeline_errors.h"
#include "gpu_worker/pipeline/weights_return.h"

namespace ballast::worker {
namespace {

class DeviceBackend final : public TrainingBackend, private SecondRound {
 public:
  DeviceBackend(const DeviceBackendOptions& options, const DeviceBackendParts& parts)
      : options_(options),
        parts_(parts),
        job_(parts.job),
        errors_([this] { Stop(); }),
        seconds_(parts.device) {}
  absl::Status Init(absl::Span<const int> backward_order, const MakeDeviceModel& make_model);
  ~DeviceBackend() override;

  void Start(GradientSink& sink) override { gradient_path_->Start(sink); }
  absl::Status UseGradientMemory(
      const std::function<absl::Span<std::byte>(int chunk)>& memory) override {
    return gradient_path_->UseGradientMemory(memory);
  }
  absl::Status PrepareBatch(const Batch& batch) override;
  absl::Status MicroStep(const MicroStepInput& input) override;
  absl::StatusOr<FinishedStep> FinishStep() override;
  absl::Span<std::byte> weights(int chunk) override { return weights_->at(chunk); }
  void OnWeights(int chunk) override { weights_->OnWeights(chunk); }
  absl::Status GatherWeights() override;
  absl::Status UseWeightsMemory(
      const std::function<absl::Span<std::byte>(int chunk)>& memory) override {
    return weights_->Use(memory);
  }
  bool gathers_ahead() const override { return !options_.on_device; }
  void OnProvisionalWeights(int chunk) override { weights_->OnProvisional(chunk); }
  void OnDroppedWeights(int chunk) override { weights_->OnDropped(chunk); }
  absl::Status ExpectWeights() override;
  absl::Status StartForward(const MicroStepInput& input) override;
  void AbandonWeights() override;
  SecondRound* second_round() override { return second_round_ == nullptr ? nullptr : this; }
  absl::Span<std::byte> chunk(int index) override { return second_round_->chunk(index); }
  absl::Status Run(uint64_t step, absl::Span<const HyperParameters> values) override;
  absl::Status ReadWeights(int group, absl::Span<std::byte> to) override;

 private:
  absl::Status GivePass(const MicroStepInput& input);
  absl::Status BeginPass(const Batch& batch);
  absl::Status GiveForward(const MicroStepInput& input);
  // `adds`: to the gradients of the micro-steps before.
  absl::Status GiveBackward(const MicroStepInput& input, bool adds);
  absl::Status CompleteUnreached(bool adds);
  void ForgetForward();
  absl::Status ReadLoss();
  absl::Status ReadTimes();
  void NoteReduceWait(double seconds);
  void GiveGather(bool all_there);
  absl::Status Fail(const absl::Status& status, absl::string_view what);

  void Stop();

  const DeviceBackendOptions options_;
  const DeviceBackendParts parts_;
  const TrainingJob& job_;
  PipelineErrors errors_;

  std::unique_ptr<DeviceTrace> trace_;
  struct {
    std::unique_ptr<DeviceStream> compute;
    std::unique_ptr<DeviceStream> communicate;
    std::unique_ptr<DeviceStream> copy_out;
  } streams_;
  DeviceSpaces spaces_;
  struct {
    std::unique_ptr<DeviceMemory> device;
    std::unique_ptr<HostMemory> host;
  } loss_sum_;  // A double.
  std::unique_ptr<DeviceEvent> done_;

  std::unique_ptr<DeviceBuckets> buckets_;
  std::unique_ptr<DeviceReduction> reduction_;
  std::unique_ptr<WeightsReturn> weights_;
  std::unique_ptr<DeviceSecondRound> second_round_;  // Nullable.
  std::unique_ptr<DeviceGpt> model_;
  std::unique_ptr<GradientPath> gradient_path_;

  // Used by the caller's thread.
  uint64_t step_ = 0;
  bool gathering_ = false;      // Given since the last GatherWeights.
  bool forward_given_ = false;  // By StartForward, and no MicroStep has gone on from it.
  std::vector<bool> reached_;   // By parameter, in this pass.
  FinishedStep finished_;
  struct Seconds {
    explicit Seconds(Device& device) : passing(device), lacking_weights(device), idle(device) {}
    // Of `compute`: in passes, how much of that waiting for weights, and between passes.
    StreamSeconds passing;
    StreamSeconds lacking_weights;
    StreamSeconds idle;
    double places_waited = 0;      // As read last.
    double waited_after_pass = 0;  // By the last FinishStep.
  } seconds_;
};

// ---------------------------------------------------------------- a step: passes

absl::Status DeviceBackend::MicroStep(const MicroStepInput& input) {
  BALLAST_RETURN_IF_ERROR(errors_.failure());
  step_ = input.step;
  return Fail(GivePass(input), absl::StrCat("step ", input.step, " micro-step ", input.micro_step));
}

absl::Status DeviceBackend::PrepareBatch(const Batch& batch) {
  BALLAST_RETURN_IF_ERROR(errors_.failure());
  return Fail(model_->Prepare(batch), absl::StrCat("after step ", step_, ": the next batch"));
}

// The host's part of the pass is none of the device's time.
absl::Status DeviceBackend::BeginPass(const Batch& batch) {
  BALLAST_RETURN_IF_ERROR(model_->Prepare(batch));
  if (seconds_.idle.begun()) BALLAST_RETURN_IF_ERROR(seconds_.idle.End(*streams_.compute));
  return seconds_.passing.Begin(*streams_.compute);
}

// Backward's buckets are sent while it gives the rest of its work, and the pass ends here before
// the device has begun with most of it.
absl::Status DeviceBackend::GivePass(const MicroStepInput& input) {
  const bool sums_here = options_.accumulation == Accumulation::kWorker && input.micro_steps > 1;
  const bool adds = sums_here && input.micro_step > 0;
  // First, so that the thread can reduce the first buckets while this one still gives work. If this
  // function returns an error, there is no EndPass; the failure stops the thread.
  gradient_path_->BeginPass({.step = input.step,
                             .micro_step = input.micro_step,
                             .micro_steps = input.micro_steps,
                             .sums_here = sums_here});
  reached_.assign(job_.layout.spec().parameters.size(), false);
  const bool ahead = std::exchange(forward_given_, false);
  if (ahead) {
    BALLAST_RETURN_IF_ERROR(seconds_.lacking_weights.End(*streams_.compute));
  } else {
    BALLAST_RETURN_IF_ERROR(BeginPass(input.batch));
  }
  BALLAST_RETURN_IF_ERROR(buckets_->StartPass(*streams_.compute, sums_here ? input.micro_step : 0,
                                              sums_here ? input.micro_steps : 1));
  const SpanOf of{.step = input.step, .micro_step = static_cast<int>(input.micro_step)};
  BALLAST_RETURN_IF_ERROR(
      trace_->Around(*streams_.compute, Track::kCompute, of, [&]() -> absl::Status {
        if (!ahead) BALLAST_RETURN_IF_ERROR(GiveForward(input));
        return GiveBackward(input, adds);
      }));

  UsedParameters used;
  for (size_t p = 0; p < reached_.size(); ++p) {
    if (job_.layout.place(p).offset < 0) continue;  // Frozen.
    if (reached_[p]) used.parameters.push_back(static_cast<int>(p));
    used.all &= reached_[p];
  }
  // Without this their buckets would never be ready, and the other ranks would wait in the
  // reductions.
  BALLAST_RETURN_IF_ERROR(CompleteUnreached(adds));
  BALLAST_RETURN_IF_ERROR(seconds_.passing.End(*streams_.compute));
  // After the last micro-step ReadTimes begins it.
  if (input.micro_step + 1 < input.micro_steps)
    BALLAST_RETURN_IF_ERROR(seconds_.idle.Begin(*streams_.compute));
  // The others' collectives fit all the same; only this rank must not seal.
  if (used.parameters.empty() && !used.all) {
    errors_.FailStep(NoParameterReached(job_.layout, parts_.collective.rank(), input.micro_step));
  }
  if (used.all) used.parameters.clear();
  gradient_path_->EndPass(std::move(used));
  return absl::OkStatus();
}

absl::Status DeviceBackend::GiveForward(const MicroStepInput& input) {
  const DevicePassEvents events{.before_weights =
                                    [this](int p) {
                                      return weights_->BeforeWeights(*streams_.compute, p,
                                                                     seconds_.lacking_weights);
                                    },
                                .before_gradient = nullptr,
                                .gradient_ready = nullptr};
  return model_->Forward(input.batch, events);
}

absl::Status DeviceBackend::GiveBackward(const MicroStepInput& input, bool adds) {
  const DevicePassEvents events{
      .before_weights = nullptr,
      .before_gradient = [this](int p) { return buckets_->BeforeGradient(*streams_.compute, p); },
      .gradient_ready =
          [this](int p) {
            Check(!reached_[p], "a parameter's gradient is complete once in a micro-step");
            reached_[p] = true;
            return buckets_->GradientReady(*streams_.compute, p);
          }};
  return model_->Backward(
      {.loss_scale = input.loss_scale, .add_loss = input.micro_step > 0, .add_gradients = adds},
      loss_sum_.device->as<double>(), events);
}

// Their gradient is zero.
absl::Status DeviceBackend::CompleteUnreached(bool adds) {
  for (size_t p = 0; p < reached_.size(); ++p) {
    const ParameterPlace& place = job_.layout.place(p);
    if (reached_[p] || place.offset < 0) continue;
    float* gradients = spaces_.gradients[job_.layout.spec().parameters[p].group]->as<float>();
    BALLAST_RETURN_IF_ERROR(buckets_->BeforeGradient(*streams_.compute, p));
    // If the pass adds, the memory keeps the zeros, or the gradient, of the micro-steps before.
    if (!adds) {
      BALLAST_RETURN_IF_ERROR(
          streams_.compute->Zero(gradients + place.offset, place.elements * sizeof(float)));
    }
    BALLAST_RETURN_IF_ERROR(buckets_->GradientReady(*streams_.compute, p));
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- a step: its end

absl::StatusOr<FinishedStep> DeviceBackend::FinishStep() {
  absl::Status read = errors_.failure();
  if (read.ok()) read = ReadLoss();
  if (read.ok()) read = ReadTimes();
  if (!read.ok()) {
    ForgetForward();
    seconds_.idle.Clear();
  }
  Fail(read, absl::StrCat("step ", step_)).IgnoreError();

  Stopwatch stopwatch;
  // These waits are made after an error too: the caller relies on it that the sink is not called
  // after this returns.
  gradient_path_->WaitReduced();
  const double reducing = stopwatch.Lap();
  NoteReduceWait(reducing);
  gradient_path_->WaitSent();
  const double sending = stopwatch.Lap();
  finished_.send_seconds += sending;
  seconds_.waited_after_pass = reducing + sending;

  const FinishedStep finished = std::exchange(finished_, {});
  BALLAST_RETURN_IF_ERROR(errors_.FinishStep());
  return finished;
}

absl::Status DeviceBackend::ReadLoss() {
  const absl::Span<std::byte> to = loss_sum_.host->bytes().subspan(0, sizeof(double));
  BALLAST_RETURN_IF_ERROR(streams_.compute->CopyToHost(to, loss_sum_.device->data()));
  BALLAST_RETURN_IF_ERROR(streams_.compute->Record(*done_));
  BALLAST_RETURN_IF_ERROR(done_->Synchronize());
  finished_.loss_sum = *reinterpret_cast<const double*>(to.data());
  return absl::OkStatus();
}

// After ReadLoss: all passes are done.
absl::Status DeviceBackend::ReadTimes() {
  BALLAST_ASSIGN_OR_RETURN(const double passing, seconds_.passing.Take());
  BALLAST_ASSIGN_OR_RETURN(const double for_buckets, buckets_->TakeWaitedSeconds());
  BALLAST_ASSIGN_OR_RETURN(finished_.weights_seconds, seconds_.lacking_weights.Take());
  // Both waits are within the passes. The times are in single precision, so a difference may be a
  // little below zero.
  finished_.compute_seconds = std::max(0.0, passing - for_buckets - finished_.weights_seconds);
  NoteReduceWait(for_buckets);
  if (seconds_.idle.begun()) seconds_.idle.Clear();  // The step has ended before its last pass.
  BALLAST_ASSIGN_OR_RETURN(const double idle, seconds_.idle.Take());
  // This idle time began before the last FinishStep waited for reductions and the sink. That wait
  // was reported there and must not count twice.
  finished_.idle_seconds = std::max(0.0, idle - std::exchange(seconds_.waited_after_pass, 0));
  return seconds_.idle.Begin(*streams_.compute);
}

// Reductions wait while the optimizer occupies all places: that part of a wait for them counts as
// sending.
void DeviceBackend::NoteReduceWait(double seconds) {
  const double places_waited = gradient_path_->places_waited_seconds();
  const double sending =
      std::min(seconds, places_waited - std::exchange(seconds_.places_waited, places_waited));
  finished_.send_seconds += sending;
  finished_.reduce_seconds += seconds - sending;
}

// ---------------------------------------------------------------- weights

absl::Status DeviceBackend::ExpectWeights() {
  BALLAST_RETURN_IF_ERROR(errors_.failure());
  GiveGather(/*all_there=*/false);
  return absl::OkStatus();
}

void DeviceBackend::GiveGather(bool all_there) {
  weights_->Expect(step_, all_there);
  gathering_ = true;
  gradient_path_->Give([this, step = step_] {
    const absl::Status gathered = weights_->Gather(*streams_.communicate, parts_.collective);
    Fail(gathered, absl::StrCat("after step ", step, ": weights")).IgnoreError();
  });
}

// The pass begins here; from the end of this part until MicroStep continues it, it waits for the
// optimizer.
absl::Status DeviceBackend::StartForward(const MicroStepInput& input) {
  BALLAST_RETURN_IF_ERROR(errors_.failure());
  ForgetForward();
  const SpanOf of{.step = input.step, .micro_step = static_cast<int>(input.micro_step)};
  const auto give = [&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(BeginPass(input.batch));
    BALLAST_RETURN_IF_ERROR(
        trace_->Around(*streams_.compute, Track::kCompute, of, [&] { return GiveForward(input); }));
    forward_given_ = true;
    return seconds_.lacking_weights.Begin(*streams_.compute);
  };
  return Fail(give(), absl::StrCat("step ", input.step, " forward pass"));
}

void DeviceBackend::AbandonWeights() { weights_->Abandon(); }

void DeviceBackend::ForgetForward() {
  forward_given_ = false;
  seconds_.passing.Clear();
  seconds_.lacking_weights.Clear();
  buckets_->ForgetWaitedSeconds();
}

absl::Status DeviceBackend::GatherWeights() {
  BALLAST_RETURN_IF_ERROR(errors_.failure());
  // If there was no ExpectWeights, the ranks have just joined, or the optimizer is on the device.
  if (!gathering_) {
    ForgetForward();  // It read other weights.
    GiveGather(/*all_there=*/true);
  }
  gathering_ = false;
  // Until the gathers are given, not until they are done: the passes wait for them on the device.
  gradient_path_->WaitGiven();
  return errors_.failure();
}

// On the thread that gives all collectives: of what was given before, weights are still gathered.
absl::Status DeviceBackend::Run(uint64_t step, absl::Span<const HyperParameters> values) {
  BALLAST_RETURN_IF_ERROR(errors_.failure());
  gradient_path_->Give([&] {
    Fail(second_round_->Run(*streams_.communicate, step, values),
         absl::StrCat("step ", step, ": Muon's second round"))
        .IgnoreError();
  });
  gradient_path_->WaitGiven();
  return errors_.failure();
}

absl::Status DeviceBackend::ReadWeights(int group, absl::Span<std::byte> to) {
  BALLAST_RETURN_IF_ERROR(errors_.failure());
  Check(to.size() <= spaces_.weights[group]->size_bytes(), "a flat space is read, and not past it");
  // Counted apart and not reported: this wait is in no pass.
  StreamSeconds waited(parts_.device);
  const auto read = [&]() -> absl::Status {
    // As for gradients: the device does not say whether a gather was aborted.
    BALLAST_RETURN_IF_ERROR(parts_.collective.Finish());
    BALLAST_RETURN_IF_ERROR(weights_->BeforeGroup(*streams_.compute, group, waited));
    BALLAST_RETURN_IF_ERROR(streams_.compute->CopyToHost(to, spaces_.weights[group]->data()));
    BALLAST_RETURN_IF_ERROR(streams_.compute->Record(*done_));
    return done_->Synchronize();
  };
  return Fail(read(), absl::StrCat("after step ", step_, ": reading the weights"));
}

// ---------------------------------------------------------------- beginning and ending

absl::Status DeviceBackend::Fail(const absl::Status& status, absl::string_view what) {
  if (status.ok()) return status;
  // Only the first failure is kept. Later ones mostly follow from it, such as the CANCELLED of
  // waits that Stop has ended.
  errors_.Fail(Annotate(status, what));
  return errors_.current();
}

// Called by the first failure and by the destructor: every thread that waits for another goes on.
void DeviceBackend::Stop() {
  buckets_->Stop();
  weights_->Stop();
  gradient_path_->Stop();
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
  BALLAST_ASSIGN_OR_RETURN(streams_.compute, device.CreateStream("compute"));
  BALLAST_ASSIGN_OR_RETURN(streams_.communicate, device.CreateStream("communicate"));
  BALLAST_ASSIGN_OR_RETURN(streams_.copy_out, device.CreateStream("copy_out"));
  BALLAST_ASSIGN_OR_RETURN(done_, device.CreateEvent());
  BALLAST_ASSIGN_OR_RETURN(loss_sum_.device, device.Allocate(sizeof(double), "the loss"));
  BALLAST_ASSIGN_OR_RETURN(loss_sum_.host, device.AllocateHost(sizeof(double), "the loss"));
  const DeviceNeeds needs{
      .provisional_weights = !options_.on_device && job_.spec.update_mode == UpdateMode::kSpeculate,
      .world_size = parts_.collective.world_size()};
  BALLAST_ASSIGN_OR_RETURN(spaces_, AllocateSpaces(device, job_, needs));

  BALLAST_ASSIGN_OR_RETURN(
      buckets_, DeviceBuckets::Create(device, job_.layout, job_.buckets, backward_order));
  BALLAST_ASSIGN_OR_RETURN(
      reduction_,
      DeviceReduction::Create(
          {device, *streams_.communicate, parts_.collective, job_, buckets_->order()},
          DeviceSpaces::PointersTo<float>(spaces_.gradients), options_.check_gradients));
  absl::StatusOr<std::unique_ptr<WeightsReturn>> weights = WeightsReturn::Create(
      device, job_, buckets_->order(), spaces_.WeightBytes(),
      {.rank = rank, .on_device = options_.on_device, .provisional = needs.provisional_weights},
      *trace_);
  BALLAST_RETURN_IF_ERROR(ExplainMemory(weights.status(), job_, needs));
  weights_ = *std::move(weights);
  if (job_.spec.newton_schulz == Orthogonalizer::kWorkers) {
    absl::StatusOr<std::unique_ptr<DeviceSecondRound>> round =
        DeviceSecondRound::Create(device, parts_.matmul, parts_.collective, job_);
    BALLAST_RETURN_IF_ERROR(ExplainMemory(round.status(), job_, needs));
    second_round_ = *std::move(round);
  }
  BALLAST_ASSIGN_OR_RETURN(model_, make_model({device, *streams_.compute, parts_.matmul}));
  model_->Place(job_.layout, {.weights = DeviceSpaces::PointersTo<BFloat16Bits>(spaces_.weights),
                              .gradients = DeviceSpaces::PointersTo<float>(spaces_.gradients)});
  absl::StatusOr<std::unique_ptr<GradientPath>> path =
      GradientPath::Create({device, *streams_.communicate, *streams_.copy_out, parts_.collective,
                            job_, *buckets_, *reduction_, *trace_, errors_},
                           {.rank = rank,
                            .on_device = options_.on_device,
                            .staging_slots = options_.staging_slots,
                            .timeout = options_.timeout});
  BALLAST_RETURN_IF_ERROR(ExplainMemory(path.status(), job_, needs));
  gradient_path_ = *std::move(path);
  return absl::OkStatus();
}

DeviceBackend::~DeviceBackend() {
  if (gradient_path_ != nullptr) {
    Stop();
    gradient_path_->End();
  }
  // Their work uses memory of the members, which are destroyed next. End has waited for `copy_out`,
  // and ~WeightsReturn waits for `copy_in`.
  for (DeviceStream* stream : {streams_.compute.get(), streams_.communicate.get()}) {
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
