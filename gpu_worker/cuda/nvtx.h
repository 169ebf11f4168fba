// The timeline's scopes as NVTX ranges, which Nsight Systems shows beside the GPU's work. Without a
// profiler they cost almost nothing.
#ifndef BALLAST_GPU_WORKER_CUDA_NVTX_H_
#define BALLAST_GPU_WORKER_CUDA_NVTX_H_

#include "gpu_worker/base/timeline.h"

namespace ballast::worker {

ProfilerRanges NvtxRanges();

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_CUDA_NVTX_H_
