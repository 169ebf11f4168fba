// The parts of one rank's run on a GPU, for worker_run.h: the device, its matrix products, its
// collective.
//
//   GpuRun gpu = GpuRun::Open({.local_rank = 0, ...}).value();
//   options.make_backend = gpu->make_backend();
//   RunWorker(std::move(options), collective, gpu->make_local_optimizer(), ...);
#ifndef BALLAST_GPU_WORKER_RUN_GPU_RUN_H_
#define BALLAST_GPU_WORKER_RUN_GPU_RUN_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gpu_worker/base/timeline.h"
#include "gpu_worker/run/worker_flags.h"
#include "gpu_worker/run/worker_run.h"

namespace ballast::worker {

struct GpuRunOptions {
  int local_rank = 0;
  CollectiveKind collective = CollectiveKind::kAuto;
  OptimizerKind optimizer = OptimizerKind::kService;
  Accumulation accumulation = Accumulation::kService;
  absl::Duration peer_timeout;
  Timeline* timeline = nullptr;  // Nullable. Borrowed for the run.
};

// Must outlive the run; the run's collective must outlive it. Errors are those of CudaDevice::Open
// and MakeCublasLtMatmul: one line with the remedy.
class GpuRun {
 public:
  static absl::StatusOr<std::unique_ptr<GpuRun>> Open(const GpuRunOptions& options);
  virtual ~GpuRun() = default;

  virtual MakeBackend make_backend() = 0;
  // A LocalOptimizer with its arithmetic on the GPU.
  virtual MakeOptimizer make_local_optimizer() = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_RUN_GPU_RUN_H_
