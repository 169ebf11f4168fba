// Which of cuBLASLt's algorithms computes a product: the first that it proposes, checks and has the
// memory for, so that one proposal that cannot be run is not the end.
//
// The choice follows from the product, the GPU and the library's version, and every algorithm that
// may be chosen gives the same bits in every run: sums over k that the library cuts into parts stay
// fp32, and are added in a step of their own.
#ifndef BALLAST_GPU_WORKER_CUDA_CUBLASLT_ALGORITHM_H_
#define BALLAST_GPU_WORKER_CUDA_CUBLASLT_ALGORITHM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "gpu_worker/cuda/libraries.h"

namespace ballast::worker {

// A description of the library's, destroyed by its own function.
template <typename Handle>
using OwnedByCublasLt = std::unique_ptr<std::remove_pointer_t<Handle>, cublasStatus_t (*)(Handle)>;

// The status of a call of the library; `what` describes it. INVALID_ARGUMENT, saying what to
// change, where it has no way to do it; RESOURCE_EXHAUSTED; else UNAVAILABLE.
absl::Status CheckCublasLt(const CublasLt& library, cublasStatus_t status, absl::string_view what);

// A product as the library sees it, column-major, with what its operands' addresses are multiples
// of. All is borrowed.
struct CublasLtProduct {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr;
  cublasLtMatrixLayout_t b = nullptr;
  cublasLtMatrixLayout_t out = nullptr;
  uint32_t a_alignment_bytes = 0;
  uint32_t b_alignment_bytes = 0;
  uint32_t out_alignment_bytes = 0;
};

absl::StatusOr<cublasLtMatmulAlgo_t> ChooseAlgorithm(const CublasLt& library,
                                                     cublasLtHandle_t handle,
                                                     const CublasLtProduct& product,
                                                     size_t workspace_bytes,
                                                     absl::string_view what);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_CUDA_CUBLASLT_ALGORITHM_H_
