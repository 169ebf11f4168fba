// Chooses cuBLASLt's algorithm for a product: the first proposed one that passes the check and has
// enough memory. So one failing proposal is not the end.
//
// The choice follows from the product, the GPU and the library's version. Every candidate gives the
// same bits in every run: if the library cuts sums over k into parts, these stay fp32 and are added
// in a separate step.
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

// The status of a call of the library; `what` describes it. INVALID_ARGUMENT, with what to change,
// if the library does not support it; RESOURCE_EXHAUSTED; else UNAVAILABLE.
absl::Status CheckCublasLt(const CublasLt& library, cublasStatus_t status, absl::string_view what);

// A product in the library's column-major form, with the alignments of its operands' addresses. All
// is borrowed.
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
