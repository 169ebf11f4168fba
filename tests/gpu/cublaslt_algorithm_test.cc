// Which of cuBLASLt's proposals is taken, with a library that proposes what a test sets.
#include "gpu_worker/cuda/cublaslt_algorithm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace ballast::worker {
namespace {

using testing::HasSubstr;

constexpr size_t kWorkspaceBytes = 1000;

// An algorithm as the library describes it: its state when proposed, and the result of its check.
struct Proposal {
  cublasStatus_t proposed = CUBLAS_STATUS_SUCCESS;
  cublasStatus_t check = CUBLAS_STATUS_SUCCESS;
  cublasStatus_t checked = CUBLAS_STATUS_SUCCESS;
  size_t workspace_bytes = 0;
};

// The library's functions take no context, so what they know is one test's at a time.
struct Library {
  std::vector<Proposal> proposals;
  cublasStatus_t answer = CUBLAS_STATUS_SUCCESS;
  std::map<cublasLtMatmulPreferenceAttributes_t, uint64_t> preferences;
  int requested = 0;
  int preferences_alive = 0;
} library;

const CublasLt kFunctions = {
    .MatmulAlgoCheck =
        [](cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
           cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t* algorithm,
           cublasLtMatmulHeuristicResult_t* result) {
          const Proposal& proposal = library.proposals[algorithm->data[0]];
          result->state = proposal.checked;
          result->workspaceSize = proposal.workspace_bytes;
          return proposal.check;
        },
    .MatmulAlgoGetHeuristic =
        [](cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
           cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t,
           int requested, cublasLtMatmulHeuristicResult_t* results, int* count) {
          library.requested = requested;
          *count = 0;
          for (size_t i = 0; i < library.proposals.size(); ++i, ++*count) {
            results[i].algo.data[0] = i;
            results[i].state = library.proposals[i].proposed;
          }
          return library.answer;
        },
    .MatmulPreferenceCreate =
        [](cublasLtMatmulPreference_t* preference) {
          *preference = reinterpret_cast<cublasLtMatmulPreference_t>(&library);
          ++library.preferences_alive;
          return CUBLAS_STATUS_SUCCESS;
        },
    .MatmulPreferenceDestroy =
        [](cublasLtMatmulPreference_t) {
          --library.preferences_alive;
          return CUBLAS_STATUS_SUCCESS;
        },
    .MatmulPreferenceSetAttribute =
        [](cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t attribute,
           const void* value, size_t size_bytes) {
          std::memcpy(&library.preferences[attribute], value, size_bytes);
          return CUBLAS_STATUS_SUCCESS;
        },
    .GetStatusString = [](cublasStatus_t) -> const char* { return "no"; },
};

// The number of the proposal that is taken.
absl::StatusOr<uint64_t> Choose(std::vector<Proposal> proposals,
                                cublasStatus_t answer = CUBLAS_STATUS_SUCCESS) {
  library = {.proposals = std::move(proposals), .answer = answer};
  const auto algorithm =
      ChooseAlgorithm(kFunctions, nullptr,
                      {.a_alignment_bytes = 16, .b_alignment_bytes = 32, .out_alignment_bytes = 64},
                      kWorkspaceBytes, "a product of m=7");
  EXPECT_EQ(library.preferences_alive, 0);
  if (!algorithm.ok()) return algorithm.status();
  return algorithm->data[0];
}

TEST(CublasLtAlgorithm, IsTheFirstThatTheLibraryProposes) {
  EXPECT_EQ(Choose({{}, {}, {}}).value(), 0u);
  EXPECT_GT(library.requested, 1);
}

TEST(CublasLtAlgorithm, IsTheNextOneWhereThatCannotBeRun) {
  EXPECT_EQ(Choose({{.proposed = CUBLAS_STATUS_NOT_SUPPORTED},
                    {.check = CUBLAS_STATUS_NOT_SUPPORTED},
                    {.checked = CUBLAS_STATUS_INVALID_VALUE},
                    {.workspace_bytes = kWorkspaceBytes + 1},
                    {.workspace_bytes = kWorkspaceBytes},
                    {}})
                .value(),
            4u);
}

TEST(CublasLtAlgorithm, RepeatsToTheBitAndTakesTheOperandsAsTheyLie) {
  ASSERT_TRUE(Choose({{}}).ok());
  using testing::Pair;
  EXPECT_THAT(
      library.preferences,
      testing::UnorderedElementsAre(
          Pair(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes),
          Pair(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE),
          Pair(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, 16),
          Pair(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, 32),
          Pair(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, 64),
          Pair(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, 64)));
}

TEST(CublasLtAlgorithm, ThatIsNotThereIsAnErrorThatNamesTheProduct) {
  for (const absl::Status& status :
       {Choose({}).status(), Choose({}, CUBLAS_STATUS_NOT_SUPPORTED).status(),
        Choose({{.check = CUBLAS_STATUS_NOT_SUPPORTED}}).status(),
        Choose({{.workspace_bytes = kWorkspaceBytes + 1}}).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("a product of m=7"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("choose a --width"));
  }
}

TEST(CublasLtAlgorithm, ALibraryThatFailsIsNotTakenForOneThatCannot) {
  EXPECT_EQ(Choose({}, CUBLAS_STATUS_ALLOC_FAILED).status().code(),
            absl::StatusCode::kResourceExhausted);
  const absl::Status status = Choose({}, CUBLAS_STATUS_INTERNAL_ERROR).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("see nvidia-smi"));
}

}  // namespace
}  // namespace ballast::worker
