// A job's identity, and its small state: plain values, with everything that a restart needs besides
// chunks and gradients. Thread-compatible: the job's lock guards what changes.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_JOB_RECORD_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_JOB_RECORD_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/job/step/step_agreement.h"

namespace ballast {

// Given to a job when it is made.
struct JobIdentity {
  std::string uid;
  JobSpec spec;
  Derivation derivation;
  int member = 0;                   // Which of spec.members this service is.
  std::string lead_principal = {};  // Who has created this part; empty: unknown, or it leads.
  // With several members: which of the lead's creations it is, by its clock.
  uint64_t creation = 0;

  bool is_lead() const { return member == spec.lead(); }
};

// A unique uid: 128 random bits in hex.
std::string MakeJobUid();

// Which chunks of a new job have their first weights, and which state these belong to.
class FirstWeights {
 public:
  FirstWeights(int64_t chunks, int ranks)
      : arrived_(chunks, false), missing_(chunks), forgotten_(ranks, 0) {}

  int64_t missing() const { return missing_; }
  bool complete() const { return missing_ == 0 && !held_; }
  bool none() const { return missing_ == static_cast<int64_t>(arrived_.size()); }
  void Arrive(int64_t chunk) {
    if (!arrived_[chunk]) --missing_;
    arrived_[chunk] = true;
  }
  void CompleteAll() {
    arrived_.assign(arrived_.size(), true);
    missing_ = 0;
    held_ = false;
  }
  // In a derived job: the chunk has all its weights from the origin, and never misses them.
  void Inherit(int64_t chunk) {
    if (inherited_.empty()) inherited_.assign(arrived_.size(), false);
    inherited_[chunk] = true;
    Arrive(chunk);
  }
  // They are not complete before CompleteAll, even if none is missing.
  void Hold() { held_ = true; }
  bool only_held() const { return held_ && missing_ == 0; }
  // The weights of two attempts do not mix. So until all have arrived, a rank that is taken again
  // misses its own.
  void Forget(int rank, absl::Span<const int> chunks) {
    if (complete()) return;
    ++forgotten_[rank];
    for (const int chunk : chunks) {
      if (!inherited_.empty() && inherited_[chunk]) continue;
      if (arrived_[chunk]) ++missing_;
      arrived_[chunk] = false;
    }
  }
  // How often that happened to the rank.
  uint64_t forgotten(int rank) const { return forgotten_[rank]; }

  // Ranks begin with another state than before, or may have.
  void BeginOtherState() { ++state_; }
  // A number for that state; 0: there were no moments.
  uint64_t state() const { return state_; }

 private:
  std::vector<bool> arrived_;    // By chunk.
  std::vector<bool> inherited_;  // By chunk; empty: none is.
  bool held_ = false;
  int64_t missing_ = 0;
  std::vector<uint64_t> forgotten_;  // By rank.
  uint64_t state_ = 0;
};

// The decisions so far.
struct StepHistory {
  std::deque<StepRecord> recent_steps;  // Oldest first, at most kRecentSteps.
  uint64_t applied_steps = 0;
  uint64_t skipped_steps = 0;
  // Decided steps whose ledger held every micro-step of every chunk: all except lost steps, which
  // are given up incomplete. Otherwise there is a bug.
  uint64_t coverage_complete_steps = 0;
  SpeculationCounts speculation;
  StepStatistics statistics;

  // Counts the step and keeps its record, with at most kRecordedNames names.
  void Add(StepRecord record, bool coverage_complete);
  // The records are of steps outside the new state: drops them, keeps the counts. `last` may be
  // null.
  void Replace(const StepRecord* last);
  // The last step was undone: drops its record, keeps the counts.
  void Undo() {
    if (!recent_steps.empty()) recent_steps.pop_back();
  }
};

// The small state before the last committed step, in a job that keeps it.
struct PreviousState {
  uint64_t committed_step = 0;
  bool applied = false;  // The step after it was applied, so chunks differ, too.
  std::vector<HyperParameters> hyper_parameters;
  std::vector<int64_t> update_counts;
  std::string trainer_state;
};

// Everything that follows from a decision, for any process that carries it out.
struct KeptDecision {
  StepOutcome outcome;
  StepTerms terms;
  StepVote vote;
  uint32_t attempt = 0;  // Of all ranks.
  uint32_t micro_steps = 0;
  bool coverage_complete = false;
  std::vector<HyperParameters> hyper_parameters;  // As StepUpdate's, as the next.
  std::vector<int64_t> update_counts;
  // One per group, in force once it is carried out: an operator may have changed them meanwhile.
  std::vector<HyperParameters> values_after;
  std::vector<double> group_norms;
  SpeculationCounts speculation;  // This member's.
  // At the lead: by member, the number of the report it is made from.
  std::vector<uint64_t> reports;
};

// Of a step's second round.
struct SecondDecision {
  std::vector<int> left;  // Matrices whose weights do not change, ascending.
  std::string why;        // The first of those is left.
};

// The committed step whose second round is outstanding: chunks with matrices are half new, and their
// directions are kept.
struct KeptDirections {
  StepRecord record;  // For the history, once the round is over.
  bool coverage_complete = false;
  std::vector<int64_t> update_counts;    // As StepUpdate's.
  bool is_by_service = false;            // Ranks are awaited no more: the service makes O.
  std::optional<SecondDecision> second;  // Its O is kept, and counts. Absent: it does not.
};

// A part of a step that all of the member's ranks have sealed, and that only the lead ends.
struct KeptReport {
  uint64_t number = 0;
  uint32_t attempt = 0;
  uint32_t micro_steps = 0;
  std::optional<StepVote> vote;  // That the ranks sealed with, if it is one.
};

// A load in progress.
struct KeptLoad {
  std::string path;
  bool weights_only = false;
  uint64_t loads = 0;  // JobRecord::loads with it.
  std::string sha256;  // CheckpointIndex::sha256. With several members another one is not loaded.
};

// A write of state in progress.
struct KeptWrite {
  StateWrite write;
  std::string memory;  // The memory of its values; empty: none.
};

// A step that was undone.
struct UndoneStep {
  uint64_t step = 0;      // 0: none was.
  Generation generation;  // In which it was undone.
  uint64_t loads = 0;     // JobRecord::loads with it.
};

struct JobRecord {
  Generation generation = 1;
  uint64_t committed_step = 0;
  std::vector<HyperParameters> hyper_parameters;  // One per group, in force.
  std::vector<int64_t> update_counts;             // By parameter; 0 for a frozen one.
  std::string trainer_state;                      // Of the last committed step.
  StepHistory history;
  std::string resumed_uid;  // Of the job whose checkpoint was loaded last; empty: none.
  // In a derived job: the uids of its ancestors, the latest first, at most kMostAncestors.
  std::vector<std::string> ancestors;
  std::optional<PreviousState> previous;  // Absent: no step can be undone.
  uint64_t epoch = 1;                     // Of the current or next step.
  bool closed = false;
  std::string closing;  // Why the job is closed at all members, which is not done yet; empty: no.
  // A later epoch in which the job's name has gone on elsewhere; 0: none. Then this part serves nothing.
  uint64_t superseded_by = 0;
  // Loads begun, and undos, so far. At a member that does not lead: that of the lead which it has
  // ended last.
  uint64_t loads = 0;
  std::optional<KeptLoad> loading;
  std::string torn_by;  // The load that did not end; empty: the state is complete.
  // By group: changes of UpdateGroup during a step; they follow its overrides.
  std::vector<HyperParameterOverrides> later_changes;
  std::optional<KeptDecision> decision;      // Of the step that is being carried out.
  std::optional<KeptDirections> directions;  // Absent: no second round is outstanding.
  // With several members. At the lead: that of the last step, until the next one's, which says that
  // all members have carried it out. At another member: what it has told the lead of its part.
  std::optional<KeptDecision> last_decision;
  std::optional<KeptReport> prepared;
  uint64_t reports = 0;   // Made so far.
  std::string lost_part;  // Why this generation's step cannot be kept; the lead is asked to end it.
  bool undid_update = false;  // The last undo was of an applied step: chunks go back, too.
  UndoneStep undone;          // The last one.
  std::optional<KeptWrite> writing;
  uint64_t state_writes = 0;  // By the ranks, since the job was created.
  StepVote last_vote;         // Of the last committed step. Not kept for a later process.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_JOB_RECORD_H_
