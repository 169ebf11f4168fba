// What may happen to a job now, and what waits for its turn.
//
// A job is in one phase at a time:
//
//        +-------------------------- commit ----------------------------+
//        v                                                              |
//      idle --begin--> open --seal by all--> sealed --> deciding --> updating <--> directions
//        ^              |^                     ^            |
//        |              |+-- a discard --+     | last vote  | votes, or members, are missing
//        |              |                +- reported <------+
//        |              +-- a new generation, from each of these four --+
//        |                                                              v
//        +---- cleared ---------------------------------------------- clearing
//                                      idle <--loaded-- loading <-------+----> closed
//
// A new generation also clears what ranks have given in directions, and then goes back there. Only in
// directions is the step committed, and its end still to come.
//
// Beside the phase, the gate counts work outside the job's lock. Readers of committed state hold
// back a decision, an undo, a write and a load. A decision or a clearing waits for ranks that add
// gradients, and for running sums and provisional updates.
//
// A call that needs the job in a certain condition asks for an Admission. It is granted, refused
// with a reason, or waits: then its Turn is kept and called when the answer changes. Turns come in
// the order of asking. The table of answers is Ask(), a pure function.
//
// Thread-compatible: the job's lock guards it. Nothing here blocks.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_GATE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_GATE_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

namespace ballast {

enum class Phase : uint8_t {
  kIdle,        // Between steps.
  kOpen,        // A step has begun.
  kReported,    // All ranks have sealed, the sums are known, and votes or members are missing.
  kSealed,      // All ranks have sealed; readers hold the decision back.
  kDeciding,    // Sums are finished, then the decision is made.
  kUpdating,    // Decided: chunks are updated, then the step is committed.
  kDirections,  // The second round waits for what ranks make of their directions.
  kClearing,    // The undecided step is being dropped.
  kLoading,     // A checkpoint replaces the state.
  kClosed,
};
inline constexpr int kPhases = 10;

enum class Admission : uint8_t {
  kAttach,        // A process takes a rank.
  kOpenStream,    // A rank gets a stream.
  kQuietRank,     // As kOpenStream, and the rank's older stream has stopped adding.
  kRankMemory,    // A rank's memory is shared.
  kSnapshot,      // Chunks are pinned at the committed step.
  kRead,          // State is read in place.
  kReadNow,       // As kRead, for a chunk at the newest step; never waits.
  kDiscard,       // A rank takes back what it gave, and no computation of that runs.
  kSupersede,     // A rank gives more for chunks, and no update of their earlier gradients runs.
  kAbort,         // An operator aborts the step; never waits.
  kUndo,          // The last committed step is undone, without readers.
  kWrite,         // State is written between steps, without readers.
  kDecide,        // A sealed step begins to be decided.
  kUpdate,        // The decision is made, without running computations.
  kFinishClear,   // A clearing ends: nothing of the step is in progress.
  kLoad,          // A load clears the step.
  kReplaceState,  // A load writes, without readers.
  kClose,
  kHear,  // A word of the job's lead is taken.
};
inline constexpr int kAdmissions = 19;

std::string_view Name(Phase phase);
std::string_view Name(Admission admission);

// All that an answer depends on.
struct GateState {
  Phase phase = Phase::kIdle;
  bool torn = false;      // State is half loaded: only a load helps.
  bool follows = false;   // Another member leads: it alone ends a reported part.
  bool deciding = false;  // A decision's task is running; during kClearing it ends without a
                          // decision.
  int64_t readers = 0;
  int64_t adding = 0;     // Contributions being added, of all ranks.
  int64_t computing = 0;  // Sums and provisional updates.
};

enum class Answer : uint8_t {
  kGranted,
  kWaits,
  kClosed,    // Refused: the job is closed.
  kLoading,   // Refused: a checkpoint is being loaded.
  kTorn,      // Refused: the state is half loaded.
  kChanging,  // Refused: committed state is about to change; try again.
  kNoStep,    // Refused: no undecided step is in progress.
  kHasStep,   // Refused: an undecided step is in progress.
  kDecided,   // Refused: the step in progress is decided.
  kAborted,   // Refused: the step to be decided is gone.
};

// A rank's work in progress: contributions being added; sums and provisional updates computed from
// its gradients; among these updates, those with newer gradients.
struct RankUnderWay {
  int64_t adding = 0;
  int64_t computing = 0;
  int64_t superseded = 0;
};
Answer Ask(Admission admission, const GateState& state, const RankUnderWay& rank = {});

class Gate {
 public:
  Gate(int world_size, bool follows) : ranks_(world_size) { state_.follows = follows; }

  // Called once, under the job's lock: with kGranted, with the reason of a refusal, or with nullopt
  // if the caller has cancelled.
  using Turn = absl::AnyInvocable<void(std::optional<Answer>) &&>;

  const GateState& state() const { return state_; }
  Phase phase() const { return state_.phase; }
  std::string ToString() const;  // All of the state in a line, for people.
  Answer Ask(Admission admission, int rank = -1) const {
    return ballast::Ask(admission, state_, rank < 0 ? RankUnderWay() : ranks_[rank]);
  }

  // Calls the turn now. Or keeps it until its answer is not kWaits, and returns a number for
  // Cancel, which is never 0.
  uint64_t Enter(Admission admission, int rank, Turn turn);
  // Calls the turn of a waiting call.
  void Cancel(uint64_t number);
  // Calls all turns whose answer has changed, in the order of arrival, until no answer changes. The
  // job calls it before it releases its lock.
  void GiveTurns();

  // The moves. Each checks its precondition.
  void BeginStep();               // idle -> open
  void Seal();                    // open -> sealed
  void StartDeciding();           // sealed -> deciding
  void AwaitLead();               // deciding -> reported
  void GoOn();                    // reported -> sealed
  void Reopen();                  // reported -> open
  void Decide();                  // deciding -> updating
  void Commit();                  // updating -> idle
  void ResumeUpdating();          // idle -> updating, of a step that an earlier process decided
  void AwaitDirections();         // updating, or idle -> directions
  void EndDirections();           // directions -> updating
  void EndDeciding();             // The decision's task ends without a decision, during clearing.
  void StartClearing();           // idle, undecided, or directions -> clearing
  void FinishClearing();          // clearing -> idle
  void StartLoading();            // idle -> loading
  void FinishLoading(bool torn);  // loading -> idle
  void Close();                   // idle -> closed

  void StartReading() { ++state_.readers; }
  void StopReading();
  void StartAdding(int rank);
  void StopAdding(int rank);
  void StartComputing(int rank);
  void StopComputing(int rank);
  // A running provisional update of the rank's gradients is useless.
  void Supersede(int rank) { ++ranks_[rank].superseded; }
  void StopSuperseded(int rank);

 private:
  struct Waiting {
    uint64_t number = 0;
    Admission admission = Admission::kAttach;
    int rank = -1;
    Turn turn;
  };

  void Move(Phase from, Phase to);

  GateState state_;
  std::vector<RankUnderWay> ranks_;
  uint64_t last_number_ = 0;
  std::deque<Waiting> waiting_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_GATE_H_
