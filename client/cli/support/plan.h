// What a job would take of a service's memory, by the engine's own arithmetic, with each of the
// options that change it.
#ifndef BALLAST_CLIENT_CLI_SUPPORT_PLAN_H_
#define BALLAST_CLIENT_CLI_SUPPORT_PLAN_H_

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/plan/memory_need.h"

namespace ballast::client::cli {

// Of `text`, which is a size such as "7B:bf16" or "1.5B:fp32:amsgrad", or names a file with a
// description of a job as CreateJob takes it (ballast.v1.Job in JSON), in which groups without
// hyper-parameters have the defaults, and without partitions or a mesh the flat spaces are cut for
// `world_size` ranks. INVALID_ARGUMENT, NOT_FOUND: one line.
absl::StatusOr<JobSpec> ReadPlanSpec(const std::string& text, int world_size);

struct PlanRow {
  UpdateMode update = UpdateMode::kWait;
  bool several_micro_steps = false;
  bool shared_memory = false;
  MemoryNeed need;
  int64_t shared_bytes = 0;  // Beside it, if shared_memory.
  int64_t total_bytes() const { return need.total_bytes() + shared_bytes; }
};
struct Plan {
  int64_t elements = 0;  // Of trainable parameters.
  int64_t parameters = 0;
  int64_t chunks = 0;
  int world_size = 0;
  int64_t checkpoint_bytes = 0;  // About, on the disk.
  // What a rank that speculates needs without shared memory.
  int64_t largest_rank_weights_bytes = 0;
  int64_t limit_bytes = 0;
  int64_t previous_bytes = 0;   // What keep_previous takes,
  bool keeps_previous = false;  // which the rows have if the description says so.
  std::vector<PlanRow> rows;    // From the least memory to the most, as a rule.
  bool fits() const;            // With some option.
};
// INVALID_ARGUMENT: no such job can be created.
absl::StatusOr<Plan> MakePlan(JobSpec spec, int64_t limit_bytes);

std::string PlanText(const Plan& plan);
nlohmann::ordered_json ToJson(const Plan& plan);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_SUPPORT_PLAN_H_
