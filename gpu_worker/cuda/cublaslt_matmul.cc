// The library is column-major: it sees each matrix as its transpose. So it is asked for
//
//   out^T (n x m) = op(b)^T (n x k) * op(a)^T (k x m)
//
// with b first. A row-major matrix that is not transposed is, as the library sees it, not
// transposed either; its leading dimension is the length of its rows. The bias is one value for
// each row of out^T, which is a column of out.
#include "gpu_worker/cuda/cublaslt_matmul.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/cuda/cublaslt_algorithm.h"
#include "gpu_worker/cuda/gpu_stream.h"
#include "gpu_worker/cuda/libraries.h"

namespace ballast::worker {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // What cuBLAS itself takes on sm_90.
// Memory of the device begins at multiples of it (device.h), and cuBLASLt assumes it by default.
constexpr uint32_t kMostAlignment = 256;

uint32_t Alignment(const void* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  // There is no such operand, for example no bias: it restricts nothing.
  if (address == 0) return kMostAlignment;
  // The lowest bit of the address that is set is the largest power of two that divides it.
  return static_cast<uint32_t>(std::min<uintptr_t>(kMostAlignment, address & (~address + 1)));
}

// All that the choice of an algorithm depends on.
using Key = std::tuple<int64_t, int64_t, int64_t, bool, bool, bool, bool, MatmulEpilogue,
                       std::array<uint32_t, 5>>;

Key KeyOf(const Matmul& matmul) {
  return {matmul.m,
          matmul.n,
          matmul.k,
          matmul.transpose_a,
          matmul.transpose_b,
          matmul.out_is_fp32,
          matmul.beta != 0,
          matmul.epilogue,
          {Alignment(matmul.a), Alignment(matmul.b), Alignment(matmul.out), Alignment(matmul.bias),
           Alignment(matmul.aux)}};
}

std::string Describe(const Matmul& matmul) {
  return absl::StrCat("a matrix product of m=", matmul.m, " n=", matmul.n, " k=", matmul.k,
                      matmul.transpose_a ? " with a transposed" : "",
                      matmul.transpose_b ? " with b transposed" : "",
                      matmul.out_is_fp32 ? " to fp32" : "", ", epilogue ",
                      static_cast<int>(matmul.epilogue));
}

cublasLtEpilogue_t EpilogueOf(MatmulEpilogue epilogue) {
  switch (epilogue) {
    case MatmulEpilogue::kNone:
      return CUBLASLT_EPILOGUE_DEFAULT;
    case MatmulEpilogue::kBias:
      return CUBLASLT_EPILOGUE_BIAS;
    case MatmulEpilogue::kBiasGelu:
      return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case MatmulEpilogue::kGeluBackward:
      return CUBLASLT_EPILOGUE_DGELU;
  }
  return CUBLASLT_EPILOGUE_DEFAULT;
}

// How one shape is computed.
struct Plan {
  OwnedByCublasLt<cublasLtMatmulDesc_t> operation;
  OwnedByCublasLt<cublasLtMatrixLayout_t> b;
  OwnedByCublasLt<cublasLtMatrixLayout_t> a;
  OwnedByCublasLt<cublasLtMatrixLayout_t> out;
  cublasLtMatmulAlgo_t algorithm;
};

class CublasLtMatmul final : public DeviceMatmul {
 public:
  CublasLtMatmul(const CublasLt& library, cublasLtHandle_t handle, CudaDevice& device)
      : library_(library), handle_(handle, library.Destroy), device_(device) {}

  absl::Status Run(DeviceStream& stream, const Matmul& matmul) override {
    if (matmul.m == 0 || matmul.n == 0) return absl::OkStatus();
    auto& gpu = static_cast<GpuStream&>(stream);
    BALLAST_ASSIGN_OR_RETURN(const cudaStream_t native, gpu.Enter());
    BALLAST_ASSIGN_OR_RETURN(DeviceMemory* const workspace, WorkspaceOf(native));
    BALLAST_ASSIGN_OR_RETURN(const Plan* const plan, PlanOf(matmul));
    // The plan is for all products of its shape; bias and aux are other memory each time.
    BALLAST_RETURN_IF_ERROR(SetPointers(matmul, plan->operation.get()));
    const cublasStatus_t status = library_.Matmul(
        handle_.get(), plan->operation.get(), &matmul.alpha, matmul.b, plan->b.get(), matmul.a,
        plan->a.get(), &matmul.beta, matmul.out, plan->out.get(), matmul.out, plan->out.get(),
        &plan->algorithm, workspace->data(), kWorkspaceBytes, native);
    if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
    // Of a lost GPU the library says only that the call failed; the GPU's own error says more.
    BALLAST_RETURN_IF_ERROR(gpu.CheckGpu(Describe(matmul)));
    return CheckCublasLt(library_, status, Describe(matmul));
  }

 private:
  // Two streams may be in products at the same time, so each has its own.
  absl::StatusOr<DeviceMemory*> WorkspaceOf(cudaStream_t stream) {
    std::unique_ptr<DeviceMemory>& workspace = workspaces_[stream];
    if (workspace == nullptr) {
      BALLAST_ASSIGN_OR_RETURN(workspace,
                               device_.Allocate(kWorkspaceBytes, "matrix products' workspace"));
    }
    return workspace.get();
  }

  absl::StatusOr<const Plan*> PlanOf(const Matmul& matmul) {
    const Key key = KeyOf(matmul);
    auto plan = plans_.find(key);
    if (plan == plans_.end()) {
      BALLAST_ASSIGN_OR_RETURN(Plan made, MakePlan(matmul));
      plan = plans_.emplace(key, std::move(made)).first;
    }
    return &plan->second;
  }

  absl::StatusOr<Plan> MakePlan(const Matmul& matmul) {
    const cudaDataType_t out_type = matmul.out_is_fp32 ? CUDA_R_32F : CUDA_R_16BF;
    cublasLtMatmulDesc_t operation = nullptr;
    BALLAST_RETURN_IF_ERROR(CheckCublasLt(
        library_, library_.MatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "describing a product"));
    Plan plan = {.operation = {operation, library_.MatmulDescDestroy},
                 .b = {nullptr, library_.MatrixLayoutDestroy},
                 .a = {nullptr, library_.MatrixLayoutDestroy},
                 .out = {nullptr, library_.MatrixLayoutDestroy},
                 .algorithm = {}};
    // What the library calls A is our `b`, as the head of this file explains.
    const cublasOperation_t first = matmul.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = matmul.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasLtEpilogue_t epilogue = EpilogueOf(matmul.epilogue);
    BALLAST_RETURN_IF_ERROR(Set(operation, CUBLASLT_MATMUL_DESC_TRANSA, first));
    BALLAST_RETURN_IF_ERROR(Set(operation, CUBLASLT_MATMUL_DESC_TRANSB, second));
    BALLAST_RETURN_IF_ERROR(Set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue));
    // Before the choice, which depends on where bias and aux lie (Key).
    BALLAST_RETURN_IF_ERROR(SetPointers(matmul, operation));

    const bool tb = matmul.transpose_b;
    const bool ta = matmul.transpose_a;
    BALLAST_RETURN_IF_ERROR(
        MakeLayout(plan.b, CUDA_R_16BF, tb ? matmul.k : matmul.n, tb ? matmul.n : matmul.k));
    BALLAST_RETURN_IF_ERROR(
        MakeLayout(plan.a, CUDA_R_16BF, ta ? matmul.m : matmul.k, ta ? matmul.k : matmul.m));
    BALLAST_RETURN_IF_ERROR(MakeLayout(plan.out, out_type, matmul.n, matmul.m));
    BALLAST_ASSIGN_OR_RETURN(plan.algorithm,
                             ChooseAlgorithm(library_, handle_.get(),
                                             {.operation = operation,
                                              .a = plan.b.get(),
                                              .b = plan.a.get(),
                                              .out = plan.out.get(),
                                              .a_alignment_bytes = Alignment(matmul.b),
                                              .b_alignment_bytes = Alignment(matmul.a),
                                              .out_alignment_bytes = Alignment(matmul.out)},
                                             kWorkspaceBytes, Describe(matmul)));
    return plan;
  }

  // `rows` and `columns` as the library sees them: a row of ours is a column of its.
  absl::Status MakeLayout(OwnedByCublasLt<cublasLtMatrixLayout_t>& layout, cudaDataType_t type,
                          int64_t rows, int64_t columns) {
    cublasLtMatrixLayout_t made = nullptr;
    BALLAST_RETURN_IF_ERROR(CheckCublasLt(
        library_,
        library_.MatrixLayoutCreate(&made, type, static_cast<uint64_t>(rows),
                                    static_cast<uint64_t>(columns), std::max<int64_t>(rows, 1)),
        absl::StrCat("describing a matrix of ", columns, " x ", rows)));
    layout.reset(made);
    return absl::OkStatus();
  }

  absl::Status SetPointers(const Matmul& matmul, cublasLtMatmulDesc_t operation) {
    if (matmul.epilogue == MatmulEpilogue::kBias || matmul.epilogue == MatmulEpilogue::kBiasGelu) {
      BALLAST_RETURN_IF_ERROR(
          Set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(matmul.bias)));
    }
    if (matmul.epilogue == MatmulEpilogue::kBiasGelu ||
        matmul.epilogue == MatmulEpilogue::kGeluBackward) {
      BALLAST_RETURN_IF_ERROR(Set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                                  static_cast<const void*>(matmul.aux)));
      BALLAST_RETURN_IF_ERROR(Set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, matmul.n));
    }
    return absl::OkStatus();
  }

  template <typename T>
  absl::Status Set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                   const T& value) {
    return CheckCublasLt(
        library_, library_.MatmulDescSetAttribute(operation, attribute, &value, sizeof(value)),
        "describing a product");
  }

  const CublasLt& library_;
  const OwnedByCublasLt<cublasLtHandle_t> handle_;
  CudaDevice& device_;
  std::map<Key, Plan> plans_;
  std::map<cudaStream_t, std::unique_ptr<DeviceMemory>> workspaces_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMatmul>> MakeCublasLtMatmul(CudaDevice& device) {
  BALLAST_ASSIGN_OR_RETURN(const CublasLt* const library, LoadCublasLt());
  BALLAST_RETURN_IF_ERROR(device.MakeCurrent());
  cublasLtHandle_t handle = nullptr;
  BALLAST_RETURN_IF_ERROR(CheckCublasLt(*library, library->Create(&handle), "beginning"));
  return std::make_unique<CublasLtMatmul>(*library, handle, device);
}

}  // namespace ballast::worker
