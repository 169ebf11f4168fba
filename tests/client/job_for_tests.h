// A small job with two groups, cut into chunks of one block, for any world size.
#ifndef BALLAST_TESTS_CLIENT_JOB_FOR_TESTS_H_
#define BALLAST_TESTS_CLIENT_JOB_FOR_TESTS_H_

#include <string>

#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/step_settings.h"

namespace ballast::client {

// Group "decay": wte [40, 16] and h.0.w [300], bf16 both ways; group "no_decay": h.0.b [7], fp32
// both ways. Flat spaces: 4 blocks and 1 block. Each rank owns a part of every bucket.
inline JobSpec SmallJob(const std::string& name, int world_size) {
  JobSpec job;
  job.name = name;
  job.groups.push_back({.name = "decay", .hyper_parameters = {.lr = 0.01}});
  job.groups.push_back({.name = "no_decay",
                        .hyper_parameters = {.lr = 0.02, .weight_decay = 0},
                        .wire_dtype = DType::kFloat32,
                        .return_dtype = DType::kFloat32});
  job.layout.world_size = world_size;
  job.layout.group_count = 2;
  job.layout.parameters = {{.name = "wte", .shape = {40, 16}, .group = 0},
                           {.name = "h.0.w", .shape = {300}, .group = 0},
                           {.name = "h.0.b", .shape = {7}, .group = 1}};
  job.layout.chunk_elements = kBlockElements;
  job.layout.partitions = PartitionsOf(
      MakeBuckets(FlatElements(job.layout), world_size, 2 * kBlockElements), world_size);
  return job;
}

// What its ranks vote in tests that need no look at the norm.
inline StepVote SmallVote() { return {.clipping = {.max_norm = 1.0}}; }

}  // namespace ballast::client

#endif  // BALLAST_TESTS_CLIENT_JOB_FOR_TESTS_H_
