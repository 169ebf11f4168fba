#include "gpu_worker/cuda/cublaslt_algorithm.h"

#include <array>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {
namespace {

constexpr int kProposals = 16;
// The other schemes round sums of parts to the output's type, or add to what others add to.
constexpr uint32_t kReductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

using Preference = OwnedByCublasLt<cublasLtMatmulPreference_t>;

absl::StatusOr<Preference> MakePreference(const CublasLt& library, const CublasLtProduct& product,
                                          size_t workspace_bytes) {
  cublasLtMatmulPreference_t made = nullptr;
  BALLAST_RETURN_IF_ERROR(
      CheckCublasLt(library, library.MatmulPreferenceCreate(&made), "choosing an algorithm"));
  Preference preference(made, library.MatmulPreferenceDestroy);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    return CheckCublasLt(
        library, library.MatmulPreferenceSetAttribute(made, attribute, &value, sizeof(value)),
        "choosing an algorithm");
  };
  BALLAST_RETURN_IF_ERROR(
      prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{workspace_bytes}));
  BALLAST_RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, kReductions));
  // If it is not told, the library assumes 256 bytes (cublasLt.h), and may propose what cannot load
  // a parameter: these begin at any multiple of 16 bytes.
  BALLAST_RETURN_IF_ERROR(
      prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, product.a_alignment_bytes));
  BALLAST_RETURN_IF_ERROR(
      prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, product.b_alignment_bytes));
  BALLAST_RETURN_IF_ERROR(
      prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, product.out_alignment_bytes));
  BALLAST_RETURN_IF_ERROR(
      prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, product.out_alignment_bytes));
  return preference;
}

}  // namespace

absl::Status CheckCublasLt(const CublasLt& library, cublasStatus_t status, absl::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const std::string message =
      absl::StrCat("cuBLASLt: ", what, ": ", library.GetStatusString(status));
  switch (status) {
    case CUBLAS_STATUS_NOT_SUPPORTED:
    case CUBLAS_STATUS_INVALID_VALUE:
    case CUBLAS_STATUS_ARCH_MISMATCH:
      // Rows of bf16 are then multiples of 16 bytes, as tensor cores load them.
      return absl::InvalidArgumentError(
          absl::StrCat(message, "; choose a --width and --batch that are multiples of 8"));
    case CUBLAS_STATUS_ALLOC_FAILED:
      return absl::ResourceExhaustedError(absl::StrCat(message, "; choose a smaller --batch"));
    default:
      return absl::UnavailableError(
          absl::StrCat(message, "; see nvidia-smi and dmesg, and start again"));
  }
}

absl::StatusOr<cublasLtMatmulAlgo_t> ChooseAlgorithm(const CublasLt& library,
                                                     cublasLtHandle_t handle,
                                                     const CublasLtProduct& product,
                                                     size_t workspace_bytes,
                                                     absl::string_view what) {
  BALLAST_ASSIGN_OR_RETURN(const Preference preference,
                           MakePreference(library, product, workspace_bytes));
  std::array<cublasLtMatmulHeuristicResult_t, kProposals> proposals = {};
  int proposed = 0;
  BALLAST_RETURN_IF_ERROR(
      CheckCublasLt(library,
                    library.MatmulAlgoGetHeuristic(handle, product.operation, product.a, product.b,
                                                   product.out, product.out, preference.get(),
                                                   kProposals, proposals.data(), &proposed),
                    what));
  // Why the last of them was not taken.
  cublasStatus_t refusal = CUBLAS_STATUS_NOT_SUPPORTED;
  for (const auto& proposal : absl::MakeConstSpan(proposals).first(proposed)) {
    refusal = proposal.state;
    if (refusal != CUBLAS_STATUS_SUCCESS) continue;
    // The heuristic only proposes. The check says whether this GPU can run it, and with what
    // workspace.
    cublasLtMatmulHeuristicResult_t checked = {};
    refusal = library.MatmulAlgoCheck(handle, product.operation, product.a, product.b, product.out,
                                      product.out, &proposal.algo, &checked);
    if (refusal == CUBLAS_STATUS_SUCCESS) refusal = checked.state;
    if (refusal == CUBLAS_STATUS_SUCCESS && checked.workspaceSize <= workspace_bytes) {
      return proposal.algo;
    }
  }
  // The last one could be run, but wants more workspace than there is.
  if (refusal == CUBLAS_STATUS_SUCCESS) refusal = CUBLAS_STATUS_NOT_SUPPORTED;
  return CheckCublasLt(library, refusal,
                       absl::StrCat(what, ": none of ", proposed, " algorithms can be run"));
}

}  // namespace ballast::worker
