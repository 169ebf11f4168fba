// torch.optim.Muon's Newton-Schulz iteration on a device, in bf16 with fp32 sums:
//
//   x = x / max(norm, eps)
//   ns_steps times:  gram = x x^T;  b = ns_b gram + ns_c gram gram;  x = ns_a x + b x
//
// A tall matrix is iterated as its transpose is, without being transposed: gram = x^T x, and x b^T.
// What is not finite in x makes O not finite.
#ifndef BALLAST_GPU_WORKER_MUON_DEVICE_NEWTON_SCHULZ_H_
#define BALLAST_GPU_WORKER_MUON_DEVICE_NEWTON_SCHULZ_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"
#include "gpu_worker/muon/matrix_turns.h"

namespace ballast::worker {

class DeviceNewtonSchulz {
 public:
  // `shapes`: of all matrices. Borrows until destruction. RESOURCE_EXHAUSTED with the size.
  static absl::StatusOr<std::unique_ptr<DeviceNewtonSchulz>> Create(
      Device& device, DeviceMatmul& matmul, absl::Span<const MatrixShape> shapes);

  // Where a direction is put.
  BFloat16Bits* direction() const { return x_->as<BFloat16Bits>(); }
  // Gives the work to `stream`, and returns where O will be, until another direction is put.
  absl::StatusOr<const BFloat16Bits*> Run(DeviceStream& stream, const MatrixShape& shape,
                                          const HyperParameters& values);

 private:
  explicit DeviceNewtonSchulz(DeviceMatmul& matmul) : matmul_(matmul) {}
  absl::Status Iterate(DeviceStream& stream, const MatrixShape& shape,
                       const HyperParameters& values, const BFloat16Bits* x, BFloat16Bits* next);

  DeviceMatmul& matmul_;
  std::unique_ptr<DeviceMemory> x_;
  std::unique_ptr<DeviceMemory> next_;  // x, by turns.
  std::unique_ptr<DeviceMemory> gram_;
  std::unique_ptr<DeviceMemory> b_;
  std::unique_ptr<DeviceMemory> sums_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_MUON_DEVICE_NEWTON_SCHULZ_H_
