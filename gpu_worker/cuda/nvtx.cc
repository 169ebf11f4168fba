#include "gpu_worker/cuda/nvtx.h"

#include <nvtx3/nvToolsExt.h>

namespace ballast::worker {

ProfilerRanges NvtxRanges() {
  return {.begin = [](const char* name) { nvtxRangePushA(name); }, .end = [] { nvtxRangePop(); }};
}

}  // namespace ballast::worker
