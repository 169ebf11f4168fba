// A consistent snapshot of a job: its contents, its step, and the ranks' progress.
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

// kVoting: all ranks have sealed and know the norm, and votes are missing. kBroken: a load of a
// checkpoint failed in the middle.
enum class JobPhase : uint8_t {
  kAwaitingWeights,
  kReady,
  kOpen,
  kSealed,
  kVoting,
  kUpdating,
  kDirections,  // Ranks are to give what Newton-Schulz makes of their directions.
  kBroken,
  kClosed
};

struct RankProgress {
  bool attached = false;
  bool left = false;  // Its stream has ended in the step in progress.
  std::string process_id;
  uint32_t attempt = 0;  // At the next step; earlier ones are discarded.
  bool begun = false;    // That attempt.
  uint32_t micro_steps_ended = 0;
  bool sealed = false;
  bool voted = false;
  bool orthogonalizes = false;  // It has not given all that the second round needs of it.
  bool writes_state = false;    // It has ended its part of a write of state, and waits for other
                                // ranks.
  bool shared_memory = false;   // It shares memory with this process.
  int64_t chunks = 0;
  int64_t chunks_complete = 0;                  // Those at furthest_micro_step.
  uint32_t furthest_micro_step = 0;             // The sealed number, or the furthest chunk's.
  std::vector<std::string> missing_parameters;  // With incomplete chunks; the first kMissingNames.
};

// A save in progress.
struct SaveProgress {
  std::string directory;  // The checkpoint's folder.
  uint64_t step = 0;
  double seconds = 0;                 // Since it began.
  double seconds_since_progress = 0;  // Since the last byte was written or the last memory was
                                      // made.
  int64_t written_bytes = 0;
  int64_t size_bytes = 0;
  bool holds_back_decisions = false;  // Steps wait for it,
  bool makes_memory = false;          // or for memory of second versions, which is being made.
};

// An event in a job's life, as a line for the log.
struct JobEvent {
  std::string job;
  int rank = -1;         // -1: no rank's.
  std::string text;      // Without the job's name.
  bool is_step = false;  // A step is decided, at the lead.
};

// Ended saves, since the job was created or this process took it over.
struct SaveCounts {
  uint64_t complete = 0;
  uint64_t failed = 0;
  int64_t last_saved_unix_ms = 0;  // When the last complete checkpoint was; 0: there was none.
};
inline constexpr size_t kMostSaves = 4;  // At once in a job: of requested saves, and as many of
                                         // scheduled ones.

// Bytes of gradients from ranks and weights to them since the job was created: through their
// streams, and in shared memory.
struct JobTraffic {
  int64_t gradient_bytes_in_messages = 0;
  int64_t gradient_bytes_in_place = 0;
  int64_t weight_bytes_in_messages = 0;
  int64_t weight_bytes_in_place = 0;
};

// What a service knows of a member of the job; by JobSpec::members. Only the lead has links to all.
struct MemberStatus {
  bool is_linked = false;  // True for this service itself.
  double seconds_without_link = 0;
  std::string problem;            // Why there is no link.
  bool waited_for = false;        // By a load, a save or the step.
  int64_t memory_bytes = 0;       // Of its part; 0: unknown.
  double round_trip_seconds = 0;  // Of a message by the link; 0: unknown.
};

// A consistent snapshot of a job.
struct JobStatus {
  Generation generation;
  // 0 while first weights are awaited; in a derived job its origin's.
  uint64_t committed_step = 0;
  uint64_t state_writes = 0;   // By the ranks, since the job was created.
  uint64_t undoable_step = 0;  // The last committed one if it can be undone; else 0.
  JobPhase phase = JobPhase::kAwaitingWeights;
  uint64_t applied_steps = 0;
  uint64_t skipped_steps = 0;
  // Decided steps whose ledger held every micro-step of every chunk: all except
  // statistics.not_kept_steps(). Otherwise there is a bug.
  uint64_t coverage_complete_steps = 0;
  StepStatistics statistics;  // Since creation, as `traffic` and `speculation`.
  JobTraffic traffic;
  SaveCounts save_counts;
  SpeculationCounts speculation;
  int64_t speculation_paused = 0;   // Chunks whose recent provisional updates failed too often.
  std::string speculation_refused;  // Why a job waits although it requested speculation; else
                                    // empty.
  std::string trainer_state;        // Of the last committed step.
  std::string resumed_uid;          // Of the job whose checkpoint was loaded last; empty: none.
  // In a derived job: the uids of its ancestors, the latest first.
  std::vector<std::string> ancestors;
  MemoryNeed memory;
  int64_t accumulators_in_use = 0;
  int64_t rank_memory_bytes = 0;                   // Shared with ranks now; not in `memory`.
  std::string problem;                             // Why it is kBroken, and what to do.
  std::string gate;                                // Work in progress, in a line.
  std::optional<double> seconds_open;              // Since a rank began the step that is open.
  std::optional<double> seconds_since_first_seal;  // In that step; absent: no rank has sealed it.
  std::vector<RankProgress> ranks;
  int member = 0;  // This service's, of JobSpec::members.
  std::vector<MemberStatus> members;
  std::string waits_for;  // Other members that the step waits for, in a line; empty: none.
  std::vector<SaveProgress> saves;                // Oldest first.
  std::vector<Activity> activities;               // Of this job, oldest first.
  std::vector<StepRecord> recent_steps;           // Oldest first, a bounded number.
  LatestReports latest;                           // Of the last committed steps.
  std::vector<HyperParameters> hyper_parameters;  // One per group, now in force.
  std::vector<int64_t> update_counts;             // By parameter; 0 for a frozen one.
  // By parameter: it has its state from the origin of this derived job. Empty: the job awaits no
  // weights, or is not derived.
  std::vector<bool> inherited;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_STATUS_H_
