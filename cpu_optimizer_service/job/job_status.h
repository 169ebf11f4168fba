// A consistent picture of a job: what it holds, where its step is and what its ranks have given.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_STATUS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_STATUS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/job/rank_stream.h"

namespace ballast {

// What the engine allocates for a job, in bytes.
struct MemoryNeed {
  int64_t state_bytes = 0;        // master, exp_avg, exp_avg_sq (, max_exp_avg_sq)
  int64_t gradient_bytes = 0;     // one contribution of every chunk, in the wire dtype
  int64_t accumulator_bytes = 0;  // fp32 sums, unless max_micro_steps is 1
  int64_t speculation_bytes = 0;  // second versions of all chunks, if the job speculates
  int64_t other_bytes = 0;        // shard buffers, block sums, tables
  int64_t total_bytes() const {
    return state_bytes + gradient_bytes + accumulator_bytes + speculation_bytes + other_bytes;
  }
};
MemoryNeed NeedOf(const JobSpec& spec, const Layout& layout);

enum class JobPhase : uint8_t { kAwaitingWeights, kReady, kOpen, kSealed, kUpdating, kClosed };

struct RankProgress {
  bool attached = false;
  std::string process_id;
  uint32_t attempt = 0;  // At the next step; those before it are discarded.
  bool begun = false;    // That attempt.
  uint32_t micro_steps_ended = 0;
  bool sealed = false;
  bool shared_memory = false;  // It has memory in common with this process.
  int64_t chunks = 0;
  int64_t chunks_complete = 0;                  // That stand at:
  uint32_t furthest_micro_step = 0;             // the sealed number, or that of the furthest chunk.
  std::vector<std::string> missing_parameters;  // With chunks that do not; the first kMissingNames.
};

// A save that is under way.
struct SaveProgress {
  std::string directory;
  uint64_t step = 0;
  double seconds = 0;                 // Since it began.
  double seconds_since_progress = 0;  // Since anything was written: a disk that hangs shows here.
  int64_t written_bytes = 0;
  int64_t size_bytes = 0;
  bool holds_back_decisions = false;  // There was no room for second versions.
};
inline constexpr size_t kMostSaves = 4;  // Of a job at once.

// A consistent picture of a job.
struct JobStatus {
  uint64_t generation = 0;
  uint64_t committed_step = 0;
  JobPhase phase = JobPhase::kAwaitingWeights;
  uint64_t applied_steps = 0;
  uint64_t skipped_steps = 0;
  // Decided steps of which the ledger held every micro-step of every chunk: all, or a bug.
  uint64_t coverage_complete_steps = 0;
  SpeculationCounts speculation;    // Since creation.
  int64_t speculation_paused = 0;   // Chunks whose provisional updates failed too often of late.
  std::string speculation_refused;  // Why a job that was to speculate waits; empty: it does not.
  std::string trainer_state;        // As the last committed step's begin gave it.
  MemoryNeed memory;
  int64_t accumulators_in_use = 0;
  int64_t rank_memory_bytes = 0;  // Given to ranks, now; beside `memory`.
  std::vector<RankProgress> ranks;
  std::vector<SaveProgress> saves;                // Oldest first.
  std::vector<StepRecord> recent_steps;           // Oldest first, a bounded number.
  std::vector<HyperParameters> hyper_parameters;  // One per group, now in force.
  std::vector<int64_t> update_counts;             // By parameter; 0 for a frozen one.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_STATUS_H_
