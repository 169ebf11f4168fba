#include "gpu_worker/gpt/matmul_with_gelu.h"

#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/cuda/kernels/gelu.h"

namespace ballast::worker {
namespace {

class MatmulWithGelu final : public DeviceMatmul {
 public:
  MatmulWithGelu(Device& device, std::unique_ptr<DeviceMatmul> matmul)
      : device_(device), matmul_(std::move(matmul)) {}

  absl::Status Run(DeviceStream& stream, const Matmul& matmul) override {
    const bool gelu = matmul.epilogue == MatmulEpilogue::kBiasGelu ||
                      matmul.epilogue == MatmulEpilogue::kGeluBackward;
    if (!gelu) return matmul_->Run(stream, matmul);
    const Shape shape(matmul.m, matmul.n, matmul.k, matmul.epilogue);
    // Refusals are kept by shape, since it is the shape that a library has no algorithm for.
    if (refused_.contains(shape)) return RunInTwo(stream, matmul);
    const absl::Status status = matmul_->Run(stream, matmul);
    if (!absl::IsInvalidArgument(status)) return status;
    const absl::Status in_two = RunInTwo(stream, matmul);
    // The library refuses it without gelu as well. The first error describes the product that was
    // asked for.
    if (absl::IsInvalidArgument(in_two)) return status;
    // The shape is noted only once this has worked: after a lack of memory the library is asked
    // anew.
    if (in_two.ok()) refused_.insert(shape);
    return in_two;
  }

 private:
  using Shape = std::tuple<int64_t, int64_t, int64_t, MatmulEpilogue>;

  absl::Status RunInTwo(DeviceStream& stream, const Matmul& matmul) {
    const int64_t elements = matmul.m * matmul.n;
    BALLAST_ASSIGN_OR_RETURN(float* const product, ProductOf(stream, elements));
    Matmul plain = matmul;
    plain.epilogue = MatmulEpilogue::kNone;
    plain.bias = nullptr;
    plain.aux = nullptr;
    plain.out = product;
    // As bf16 the product would be rounded once more than in one go, and its bits would differ.
    plain.out_is_fp32 = true;
    BALLAST_RETURN_IF_ERROR(matmul_->Run(stream, plain));
    auto* const out = static_cast<BFloat16Bits*>(matmul.out);
    if (matmul.epilogue == MatmulEpilogue::kBiasGelu) {
      return cuda::BiasGelu(stream, matmul.m, matmul.n, product, matmul.bias, matmul.aux, out);
    }
    return cuda::GeluBackward(stream, elements, product, matmul.aux, out);
  }

  // A stream's own, because two may be in products at the same time. A larger one takes its place
  // when the stream no longer uses it.
  absl::StatusOr<float*> ProductOf(DeviceStream& stream, int64_t elements) {
    std::unique_ptr<DeviceMemory>& product = products_[&stream];
    const size_t bytes = elements * sizeof(float);
    if (product == nullptr || product->size_bytes() < bytes) {
      if (product != nullptr) BALLAST_RETURN_IF_ERROR(stream.Synchronize());
      // It is freed before the larger one is allocated: both need not fit the device at once.
      product.reset();
      BALLAST_ASSIGN_OR_RETURN(product, device_.Allocate(bytes, "a product before gelu"));
    }
    return product->as<float>();
  }

  Device& device_;
  const std::unique_ptr<DeviceMatmul> matmul_;
  std::set<Shape> refused_;
  std::map<const DeviceStream*, std::unique_ptr<DeviceMemory>> products_;
};

}  // namespace

std::unique_ptr<DeviceMatmul> MakeMatmulWithGelu(Device& device,
                                                 std::unique_ptr<DeviceMatmul> matmul) {
  return std::make_unique<MatmulWithGelu>(device, std::move(matmul));
}

}  // namespace ballast::worker
