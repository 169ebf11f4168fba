// What the host does for a micro-step and an update of a large model on a GPU, besides giving the
// passes: with as many parameters, chunks and buckets as gpt2-1.5B has, each a thousandth as large,
// on the device that runs on the CPU. Its calls cost about what a driver's do; its work is done on
// a thread of its own, whose time is not counted.
//
//   host_bench [MICRO_STEPS]
//
// One line for each stage: milliseconds of its thread for a micro-step.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/device/single_device_collective.h"
#include "gpu_worker/gpt/architecture.h"
#include "gpu_worker/pipeline/device_backend.h"
#include "tests/gpu_emulator/fake_device.h"

namespace ballast::worker {
namespace {

constexpr GptConfig kModel = {
    .layers = 48, .heads = 25, .width = 1600, .context = 1024, .vocabulary = 50304};
constexpr int64_t kScale = 1024;
constexpr int64_t kChunkElements = kMaxChunkElements / kScale;
constexpr int64_t kBucketElements = (int64_t{8} << 20) / kScale;

// Of the thread that called Here, since then.
class ThreadTime {
 public:
  void Here() {
    if (known_) return;
    pthread_getcpuclockid(pthread_self(), &clock_);
    begun_ = Now();
    known_ = true;
  }
  double seconds() const { return known_ ? Now() - begun_ : 0; }

 private:
  double Now() const {
    timespec now;
    clock_gettime(clock_, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  }
  clockid_t clock_ = 0;
  double begun_ = 0;
  std::atomic<bool> known_ = false;
};

std::vector<ModelParameter> SmallParameters() {
  std::vector<ModelParameter> parameters = GptParameters(kModel);
  for (ModelParameter& parameter : parameters) {
    parameter.shape = {std::max<int64_t>(1, parameter.elements() / kScale)};
  }
  return parameters;
}

// Passes that do nothing but say what they would have done.
class EmptyPasses final : public DeviceGpt {
 public:
  void Place(const Layout&, const DeviceFlatSpaces&) override {}
  absl::Status Prepare(const Batch&) override { return absl::OkStatus(); }
  absl::Status Forward(const Batch&, const DevicePassEvents& events) override {
    for (int p = 0; p < static_cast<int>(order_.size()); ++p) {
      BALLAST_RETURN_IF_ERROR(events.before_weights(p));
    }
    return absl::OkStatus();
  }
  absl::Status Backward(const BackwardOptions&, double*, const DevicePassEvents& events) override {
    for (const int p : order_) {
      BALLAST_RETURN_IF_ERROR(events.before_gradient(p));
      BALLAST_RETURN_IF_ERROR(events.gradient_ready(p));
    }
    return absl::OkStatus();
  }
  int64_t activation_bytes() const override { return 0; }
  double FloatingPointOperations(int) const override { return 0; }

 private:
  const std::vector<int> order_ = GptBackwardOrder(kModel);
};

class Sink final : public GradientSink {
 public:
  explicit Sink(ThreadTime& time) : time_(time) {}
  absl::Status Push(client::GradientPush push) override {
    time_.Here();
    push.released();
    return absl::OkStatus();
  }
  absl::Status EndMicroStep(uint32_t, const UsedParameters&) override { return absl::OkStatus(); }

 private:
  ThreadTime& time_;
};

// This rank's chunks one after the other, as in memory that is shared with a service.
class Memory {
 public:
  Memory(const TrainingJob& job, size_t element_bytes) {
    for (const Chunk& chunk : job.layout.chunks()) {
      begins_.push_back(bytes_);
      bytes_ += chunk.elements * element_bytes;
    }
    begins_.push_back(bytes_);
    memory_.resize(bytes_);
  }
  absl::Span<std::byte> at(int chunk) {
    return absl::MakeSpan(memory_).subspan(begins_[chunk], begins_[chunk + 1] - begins_[chunk]);
  }

 private:
  size_t bytes_ = 0;
  std::vector<size_t> begins_;
  std::vector<std::byte> memory_;
};

absl::Status Run(int micro_steps) {
  const std::vector<ModelParameter> parameters = SmallParameters();
  BALLAST_ASSIGN_OR_RETURN(const TrainingJob job,
                           MakeTrainingJob(parameters, {.micro_steps = 0,
                                                        .update_mode = UpdateMode::kWait,
                                                        .bucket_elements = kBucketElements,
                                                        .chunk_elements = kChunkElements}));
  ThreadTime giving, sending, passing, notified;
  std::atomic<int64_t> events = 0, copies = 0, kernels = 0;
  // Nothing is done before it is waited for: so a call wakes nobody, as a driver's does not.
  FakeDevice device({.seed = 0, .fail = [&](absl::string_view operation, absl::string_view what) {
                       if (operation == "kernel")
                         giving.Here();  // Only rounding: passes are empty.
                       kernels += operation == "kernel";
                       events += operation == "record";
                       copies += operation == "copy to host" || operation == "copy to device";
                       return absl::OkStatus();
                     }});
  const auto matmul = MakeFakeMatmul();
  const auto collective = MakeSingleDeviceCollective(device);
  // The backend uses them until its end.
  Sink sink(sending);
  Memory gradients(job, SizeBytes(DType::kBFloat16)), weights(job, SizeBytes(DType::kBFloat16));
  BALLAST_ASSIGN_OR_RETURN(
      const std::unique_ptr<TrainingBackend> backend,
      MakeDeviceBackendOf({.accumulation = Accumulation::kService},
                          {device, *matmul, *collective, job}, GptBackwardOrder(kModel),
                          [](const DeviceGptParts&) -> absl::StatusOr<std::unique_ptr<DeviceGpt>> {
                            return std::make_unique<EmptyPasses>();
                          }));
  backend->Start(sink);
  BALLAST_RETURN_IF_ERROR(
      backend->UseGradientMemory([&](int chunk) { return gradients.at(chunk); }));
  BALLAST_RETURN_IF_ERROR(backend->UseWeightsMemory([&](int chunk) { return weights.at(chunk); }));
  BALLAST_RETURN_IF_ERROR(backend->GatherWeights());
  const Batch batch{.sequences = 1, .context = 1};
  const auto step = [&](uint64_t number, int count) -> absl::Status {
    for (int m = 0; m < count; ++m) {
      BALLAST_RETURN_IF_ERROR(backend->MicroStep({.step = number,
                                                  .micro_step = static_cast<uint32_t>(m),
                                                  .micro_steps = static_cast<uint32_t>(count),
                                                  .batch = batch}));
    }
    return backend->FinishStep().status();
  };
  BALLAST_RETURN_IF_ERROR(step(1, 1));  // Whose threads are known then, and their memory warm.
  const double gave = giving.seconds(), sent = sending.seconds();
  events = copies = kernels = 0;
  passing.Here();
  BALLAST_RETURN_IF_ERROR(step(2, micro_steps));
  const double passed = passing.seconds();
  std::printf("%zu chunks, %zu buckets; a micro-step: %.0f events, %.0f copies, %.0f kernels\n",
              job.layout.chunks().size(), job.buckets.size(),
              static_cast<double>(events) / micro_steps, static_cast<double>(copies) / micro_steps,
              static_cast<double>(kernels) / micro_steps);
  const auto line = [](const char* stage, double seconds) {
    std::printf("%-44s %7.3f ms\n", stage, 1e3 * seconds);
  };
  line("giving passes their events", passed / micro_steps);
  line("giving reductions, rounding and copies", (giving.seconds() - gave) / micro_steps);
  line("handing over", (sending.seconds() - sent) / micro_steps);
  notified.Here();
  for (const int chunk : job.layout.chunks_of_rank(0)) backend->OnWeights(chunk);
  line("weights that arrive, of a step", notified.seconds());
  return backend->GatherWeights();
}

}  // namespace
}  // namespace ballast::worker

int main(int argc, char** argv) {
  const int micro_steps = argc > 1 ? std::atoi(argv[1]) : 8;
  if (micro_steps < 1) {
    std::fprintf(stderr, "host_bench: %s is no number of micro-steps; give 1 or more\n", argv[1]);
    return 1;
  }
  const absl::Status status = ballast::worker::Run(micro_steps);
  if (status.ok()) return 0;
  std::fprintf(stderr, "host_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}
