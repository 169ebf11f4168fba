#include "gpu_worker/muon/device_newton_schulz.h"

#include <algorithm>
#include <utility>

#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/cuda/kernels/unit_norm.h"

namespace ballast::worker {

absl::StatusOr<std::unique_ptr<DeviceNewtonSchulz>> DeviceNewtonSchulz::Create(
    Device& device, DeviceMatmul& matmul, absl::Span<const MatrixShape> shapes) {
  int64_t matrix = 0;
  int64_t shorter = 0;
  for (const MatrixShape& shape : shapes) {
    matrix = std::max(matrix, shape.rows * shape.columns);
    shorter = std::max(shorter, std::min(shape.rows, shape.columns));
  }
  auto made = std::unique_ptr<DeviceNewtonSchulz>(new DeviceNewtonSchulz(matmul));
  for (auto [memory, elements] : {std::pair{&made->x_, matrix},
                                  {&made->next_, matrix},
                                  {&made->gram_, shorter * shorter},
                                  {&made->b_, shorter * shorter}}) {
    BALLAST_ASSIGN_OR_RETURN(*memory,
                             device.Allocate(elements * sizeof(BFloat16Bits), "Newton-Schulz"));
  }
  BALLAST_ASSIGN_OR_RETURN(made->sums_,
                           device.Allocate(cuda::kNormSums * sizeof(double), "Newton-Schulz"));
  return made;
}

absl::StatusOr<const BFloat16Bits*> DeviceNewtonSchulz::Run(DeviceStream& stream,
                                                            const MatrixShape& shape,
                                                            const HyperParameters& values) {
  auto* x = x_->as<BFloat16Bits>();
  auto* next = next_->as<BFloat16Bits>();
  BALLAST_RETURN_IF_ERROR(cuda::DivideByNorm(
      stream, shape.rows * shape.columns, static_cast<float>(values.eps), x, sums_->as<double>()));
  for (int step = 0; step < values.ns_steps; ++step) {
    BALLAST_RETURN_IF_ERROR(Iterate(stream, shape, values, x, next));
    std::swap(x, next);
  }
  return x;
}

absl::Status DeviceNewtonSchulz::Iterate(DeviceStream& stream, const MatrixShape& shape,
                                         const HyperParameters& values, const BFloat16Bits* x,
                                         BFloat16Bits* next) {
  const auto [rows, columns] = shape;
  const bool is_tall = rows > columns;
  const int64_t m = std::min(rows, columns);
  auto* const gram = gram_->as<BFloat16Bits>();
  auto* const b = b_->as<BFloat16Bits>();
  BALLAST_RETURN_IF_ERROR(matmul_.Run(stream, {.m = m,
                                               .n = m,
                                               .k = std::max(rows, columns),
                                               .transpose_a = is_tall,
                                               .transpose_b = !is_tall,
                                               .a = x,
                                               .b = x,
                                               .out = gram}));
  // A product reads there what it adds to.
  BALLAST_RETURN_IF_ERROR(stream.CopyOnDevice(b, gram, m * m * sizeof(BFloat16Bits)));
  BALLAST_RETURN_IF_ERROR(matmul_.Run(stream, {.m = m,
                                               .n = m,
                                               .k = m,
                                               .a = gram,
                                               .b = gram,
                                               .out = b,
                                               .alpha = static_cast<float>(values.ns_c),
                                               .beta = static_cast<float>(values.ns_b)}));
  BALLAST_RETURN_IF_ERROR(stream.CopyOnDevice(next, x, rows * columns * sizeof(BFloat16Bits)));
  return matmul_.Run(stream, {.m = rows,
                              .n = columns,
                              .k = m,
                              .transpose_b = is_tall,
                              .a = is_tall ? x : b,
                              .b = is_tall ? b : x,
                              .out = next,
                              .beta = static_cast<float>(values.ns_a)});
}

}  // namespace ballast::worker
