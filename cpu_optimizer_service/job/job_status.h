// A consistent picture of a job: what it holds, where its step is and what its ranks have given.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_STATUS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_STATUS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/history/job_history.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/plan/memory_need.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/common/text/activity.h"
#include "cpu_optimizer_service/job/rank_stream.h"

namespace ballast {

// kVoting: all ranks have sealed and know the norm, and votes are missing. kBroken: there was no
// memory for a part of the job's work, or a load of a checkpoint did not end.
enum class JobPhase : uint8_t {
  kAwaitingWeights,
  kReady,
  kOpen,
  kSealed,
  kVoting,
  kUpdating,
  kBroken,
  kClosed
};

struct RankProgress {
  bool attached = false;
  std::string process_id;
  uint32_t attempt = 0;  // At the next step; those before it are discarded.
  bool begun = false;    // That attempt.
  uint32_t micro_steps_ended = 0;
  bool sealed = false;
  bool voted = false;
  bool writes_state = false;   // It has ended its part of a write of state, which waits for others.
  bool shared_memory = false;  // It has memory in common with this process.
  int64_t chunks = 0;
  int64_t chunks_complete = 0;                  // That stand at:
  uint32_t furthest_micro_step = 0;             // the sealed number, or that of the furthest chunk.
  std::vector<std::string> missing_parameters;  // With chunks that do not; the first kMissingNames.
};

// A save that is under way.
struct SaveProgress {
  std::string directory;  // The folder that the checkpoint will be in.
  uint64_t step = 0;
  double seconds = 0;                 // Since it began.
  double seconds_since_progress = 0;  // Since anything was written, or any memory was made.
  int64_t written_bytes = 0;
  int64_t size_bytes = 0;
  bool holds_back_decisions = false;  // Steps wait for it,
  bool makes_memory = false;  // or rather for memory for second versions, which is being made.
};

// What has happened to a job, once, in a line for the log.
struct JobEvent {
  std::string job;
  int rank = -1;     // Of which rank; -1: of none.
  std::string text;  // Without the job's name.
};

// Saves that have ended, since the job was created or this process took it over.
struct SaveCounts {
  uint64_t complete = 0;
  uint64_t failed = 0;
  int64_t last_saved_unix_ms = 0;  // As of the last checkpoint that is complete; 0: there was none.
};
inline constexpr size_t kMostSaves = 4;  // Of a job at once: asked for, and as many that are not.

// Gradients taken from ranks and weights given to them since the job was created, in bytes:
// through their streams, and in the memory that they share with this process.
struct JobTraffic {
  int64_t gradient_bytes_in_messages = 0;
  int64_t gradient_bytes_in_place = 0;
  int64_t weight_bytes_in_messages = 0;
  int64_t weight_bytes_in_place = 0;
};

// A consistent picture of a job.
struct JobStatus {
  Generation generation;
  // While first weights are awaited 0, whichever they begin at; of a derived job its origin's.
  uint64_t committed_step = 0;
  uint64_t state_writes = 0;   // By the ranks, since the job was created.
  uint64_t undoable_step = 0;  // The last committed one, while it can be undone; 0: none.
  JobPhase phase = JobPhase::kAwaitingWeights;
  uint64_t applied_steps = 0;
  uint64_t skipped_steps = 0;
  // Decided steps of which the ledger held every micro-step of every chunk: all but
  // statistics.not_kept_steps(), or a bug.
  uint64_t coverage_complete_steps = 0;
  StepStatistics statistics;  // Since creation, as `traffic` and `speculation`.
  JobTraffic traffic;
  SaveCounts save_counts;
  SpeculationCounts speculation;
  int64_t speculation_paused = 0;   // Chunks whose provisional updates failed too often of late.
  std::string speculation_refused;  // Why a job that was to speculate waits; empty: it does not.
  std::string trainer_state;        // Of the last committed step.
  std::string resumed_uid;          // Of the job whose checkpoint was loaded last; empty: none.
  // Of a derived job: the uids of those that it goes on from, the last first.
  std::vector<std::string> ancestors;
  MemoryNeed memory;
  int64_t accumulators_in_use = 0;
  int64_t rank_memory_bytes = 0;                   // Given to ranks, now; beside `memory`.
  std::string problem;                             // Why it is kBroken, and what to do.
  std::string gate;                                // What is under way, in a line.
  std::optional<double> seconds_open;              // Since a rank began the step that is open.
  std::optional<double> seconds_since_first_seal;  // Of that step; absent: no rank has sealed.
  std::vector<RankProgress> ranks;
  std::vector<SaveProgress> saves;                // Oldest first.
  std::vector<Activity> activities;               // Of this job, oldest first.
  std::vector<StepRecord> recent_steps;           // Oldest first, a bounded number.
  LatestReports latest;                           // Of the last committed steps.
  std::vector<HyperParameters> hyper_parameters;  // One per group, now in force.
  std::vector<int64_t> update_counts;             // By parameter; 0 for a frozen one.
  // By parameter: it has its state from the job or checkpoint that this job is derived from. Empty:
  // the job awaits no weights, or is derived from nothing.
  std::vector<bool> inherited;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_STATUS_H_
