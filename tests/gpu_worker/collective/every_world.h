// The worlds in which what is sent and what comes back must be right: ranks, micro-steps, the
// wire's format, and who sums the micro-steps.
#ifndef BALLAST_TESTS_GPU_WORKER_COLLECTIVE_EVERY_WORLD_H_
#define BALLAST_TESTS_GPU_WORKER_COLLECTIVE_EVERY_WORLD_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "cpu_optimizer_service/common/dtype.h"
#include "gpu_worker/buckets/bucket_reducer.h"

namespace ballast::worker {

using World = std::tuple<int, uint32_t, DType, Accumulation>;

inline auto EveryWorld() {
  return testing::Combine(testing::Values(1, 2, 3), testing::Values(1, 3),
                          testing::Values(DType::kBFloat16, DType::kFloat32),
                          testing::Values(Accumulation::kService, Accumulation::kWorker));
}

inline std::string NameOfWorld(const testing::TestParamInfo<World>& info) {
  const auto& [ranks, micro_steps, dtype, accumulation] = info.param;
  return "Ranks" + std::to_string(ranks) + "MicroSteps" + std::to_string(micro_steps) +
         std::string(Name(dtype)) +
         (accumulation == Accumulation::kService ? "InService" : "OnWorker");
}

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_WORKER_COLLECTIVE_EVERY_WORLD_H_
