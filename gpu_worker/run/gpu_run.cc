#include "gpu_worker/run/gpu_run.h"

#include <string>
#include <utility>

#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/base/log.h"
#include "gpu_worker/cuda/cublaslt_matmul.h"
#include "gpu_worker/cuda/cuda_device.h"
#include "gpu_worker/cuda/nccl_collective.h"
#include "gpu_worker/device/gloo_device_collective.h"
#include "gpu_worker/device/single_device_collective.h"
#include "gpu_worker/gpt/matmul_with_gelu.h"
#include "gpu_worker/pipeline/device_arithmetic.h"
#include "gpu_worker/pipeline/device_backend.h"
#include "gpu_worker/training/local_optimizer.h"

namespace ballast::worker {
namespace {

class OpenedGpuRun final : public GpuRun {
 public:
  OpenedGpuRun(const GpuRunOptions& options, std::unique_ptr<CudaDevice> device,
               std::unique_ptr<DeviceMatmul> matmul)
      : options_(options), device_(std::move(device)), matmul_(std::move(matmul)) {}

  MakeBackend make_backend() override {
    return [this](const WorkerOptions& options, const TrainingJob& job, Collective& host) {
      return Make(options, job, host);
    };
  }

  MakeOptimizer make_local_optimizer() override {
    return [this](const TrainingJob& job, TrainingBackend& backend,
                  Collective& host) -> absl::StatusOr<std::unique_ptr<StepOptimizer>> {
      // It says whether a chunk may be pushed more than once in a step. If not, the optimizer needs
      // no memory for sums, 4 bytes an element.
      const bool sums =
          options_.accumulation == Accumulation::kService && job.spec.max_micro_steps != 1;
      BALLAST_ASSIGN_OR_RETURN(
          std::unique_ptr<LocalArithmetic> arithmetic,
          MakeDeviceArithmetic(*device_, job.layout, job.spec.groups, host.rank(), sums,
                               [&backend](int chunk) { return backend.weights(chunk); }));
      return std::make_unique<LocalOptimizer>(job.spec, job.layout, host, std::move(arithmetic));
    };
  }

 private:
  absl::StatusOr<std::unique_ptr<TrainingBackend>> Make(const WorkerOptions& options,
                                                        const TrainingJob& job, Collective& host) {
    // This is here and not in Open: by now RunWorker has compared the flags of all ranks, and it
    // shares an error of this call with them.
    BALLAST_RETURN_IF_ERROR(Connect(host));
    const int world_size = host.world_size();
    return MakeDeviceBackend({.model = options.model,
                              // The first ranks have as many; others may have one sequence less.
                              .sequences = DivideUp(options.trainer.batch, world_size),
                              .accumulation = options.accumulation,
                              .check_gradients = options.check_gradients,
                              .on_device = options_.optimizer == OptimizerKind::kLocal,
                              .timeout = options.seal_timeout},
                             {.device = *device_,
                              .matmul = *matmul_,
                              .collective = *collective_,
                              .job = job,
                              .timeline = options_.timeline});
  }

  absl::Status Connect(Collective& host) {
    BALLAST_ASSIGN_OR_RETURN(const CollectiveKind kind, Choose(host));
    if (kind == CollectiveKind::kNccl) {
      BALLAST_ASSIGN_OR_RETURN(collective_, ConnectNccl(*device_, host, options_.peer_timeout));
    } else if (host.world_size() > 1) {
      collective_ = MakeGlooDeviceCollective(*device_, host);
    } else {
      collective_ = MakeSingleDeviceCollective(*device_);
    }
    const char* by = kind == CollectiveKind::kNccl ? "NCCL"
                     : host.world_size() > 1       ? "Gloo through the hosts"
                                                   : "no other";
    Log().info("rank {}: {}, joined to {} ranks by {}", host.rank(), device_->name(),
               host.world_size() - 1, by);
    return absl::OkStatus();
  }

  // What kAuto stands for: the same on all ranks.
  absl::StatusOr<CollectiveKind> Choose(Collective& host) {
    // Flags are agreed on, so all ranks leave here or none: ShareGpus is a collective.
    if (options_.collective != CollectiveKind::kAuto) return options_.collective;
    // Connect makes no Gloo of it: there is no other rank.
    if (host.world_size() == 1) return CollectiveKind::kGloo;
    BALLAST_ASSIGN_OR_RETURN(const bool shared, ShareGpus(*device_, host));
    return shared ? CollectiveKind::kGloo : CollectiveKind::kNccl;
  }

  const GpuRunOptions options_;
  const std::unique_ptr<CudaDevice> device_;
  const std::unique_ptr<DeviceMatmul> matmul_;
  std::unique_ptr<DeviceCollective> collective_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GpuRun>> GpuRun::Open(const GpuRunOptions& options) {
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> device,
                           CudaDevice::Open(options.local_rank));
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMatmul> matmul, MakeCublasLtMatmul(*device));
  // cuBLASLt may have no algorithm for gelu in some shapes.
  matmul = MakeMatmulWithGelu(*device, std::move(matmul));
  return std::make_unique<OpenedGpuRun>(options, std::move(device), std::move(matmul));
}

}  // namespace ballast::worker
