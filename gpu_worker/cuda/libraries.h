// cuBLASLt and NCCL, loaded on demand when a GPU is requested. They belong to the machine, and one
// binary runs with and without them. The names are the libraries' own, without their prefix.
//
// Searched by the dynamic linker (including LD_LIBRARY_PATH), then in $CUDA_HOME/lib64 and
// /usr/local/cuda/lib64.
//
// Thread-safe. Errors: FAILED_PRECONDITION, with the library and what to set.
#ifndef BALLAST_GPU_WORKER_CUDA_LIBRARIES_H_
#define BALLAST_GPU_WORKER_CUDA_LIBRARIES_H_

#include <cublasLt.h>
#include <nccl.h>

#include "absl/status/statusor.h"

namespace ballast::worker {

struct CublasLt {
  decltype(&cublasLtCreate) Create;
  decltype(&cublasLtDestroy) Destroy;
  decltype(&cublasLtMatmul) Matmul;
  decltype(&cublasLtMatmulAlgoCheck) MatmulAlgoCheck;
  decltype(&cublasLtMatmulAlgoGetHeuristic) MatmulAlgoGetHeuristic;
  decltype(&cublasLtMatmulDescCreate) MatmulDescCreate;
  decltype(&cublasLtMatmulDescDestroy) MatmulDescDestroy;
  decltype(&cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute;
  decltype(&cublasLtMatmulPreferenceCreate) MatmulPreferenceCreate;
  decltype(&cublasLtMatmulPreferenceDestroy) MatmulPreferenceDestroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute;
  decltype(&cublasLtMatrixLayoutCreate) MatrixLayoutCreate;
  decltype(&cublasLtMatrixLayoutDestroy) MatrixLayoutDestroy;
  decltype(&cublasLtGetStatusString) GetStatusString;
};

struct Nccl {
  decltype(&ncclGetUniqueId) GetUniqueId;
  decltype(&ncclCommInitRankConfig) CommInitRankConfig;
  decltype(&ncclCommGetAsyncError) CommGetAsyncError;
  decltype(&ncclCommFinalize) CommFinalize;
  decltype(&ncclCommDestroy) CommDestroy;
  decltype(&ncclCommAbort) CommAbort;
  decltype(&ncclReduceScatter) ReduceScatter;
  decltype(&ncclAllGather) AllGather;
  decltype(&ncclGetErrorString) GetErrorString;
  decltype(&ncclGetLastError) GetLastError;
};

// They stay loaded until the process ends.
absl::StatusOr<const CublasLt*> LoadCublasLt();
absl::StatusOr<const Nccl*> LoadNccl();

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_CUDA_LIBRARIES_H_
