// What may happen to a job now, and what waits for its turn.
//
// A job is in one phase at a time:
//
//        +-------------------------- commit ----------------------------+
//        v                                                              |
//      idle --begin--> open --seal by all--> sealed --> deciding --> updating
//        ^              |^                     ^            |
//        |              |+-- a discard --+     | last vote  | votes are missing
//        |              |                +-- voting <-------+
//        |              +-- a new generation, from each of these four --+
//        |                                                              v
//        +---- cleared ---------------------------------------------- clearing
//                                      idle <--loaded-- loading <-------+----> closed
//
// A job for whose work there was no memory is broken, in whatever phase it was: it can be closed,
// and nothing else. What was under way ends, and moves it no more.
//
// Beside the phase, the gate counts what is under way outside the job's lock: readers of committed
// state, which hold back a decision, an undo, a write and a load; ranks that add gradients, sums and provisional
// updates that are computed, which a decision or a clearing waits for.
//
// A call that needs the job in a certain condition asks for an Admission. It is granted, refused
// with a reason, or waits: then its Turn is kept and called when the answer is another one. Turns
// come in the order of asking. The table of answers is Ask(), a pure function.
//
// Thread-compatible: the job's lock guards it. Nothing here blocks.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_GATE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_GATE_H_

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
  kIdle,      // Between steps.
  kOpen,      // A step has begun.
  kVoting,    // All ranks have sealed, the norm is known, and votes are missing.
  kSealed,    // All ranks have sealed; readers hold the decision back.
  kDeciding,  // Sums are finished, then the decision is made.
  kUpdating,  // Decided: chunks are updated, then the step is committed.
  kClearing,  // The undecided step is being forgotten.
  kLoading,   // A checkpoint replaces the state.
  kClosed,
};
inline constexpr int kPhases = 9;

enum class Admission : uint8_t {
  kAttach,        // A process takes a rank.
  kOpenStream,    // A rank gets a stream.
  kQuietRank,     // As kOpenStream, and the rank's older stream adds nothing any more.
  kRankMemory,    // A rank's memory is shared.
  kSnapshot,      // Chunks are pinned at the committed step.
  kRead,          // State is read where it lies.
  kReadNow,       // As kRead, for a chunk at the newest step; never waits.
  kDiscard,       // A rank takes back what it gave; nothing is being computed from that any more.
  kSupersede,     // A rank gives more of chunks; no update of what they had runs any more.
  kAbort,         // An operator aborts the step; never waits.
  kUndo,          // The last committed step is undone: nothing is read any more.
  kWrite,         // State is written between steps: nothing is read any more.
  kDecide,        // A sealed step begins to be decided.
  kUpdate,        // The decision is made: nothing is being computed any more.
  kFinishClear,   // A clearing ends: nothing of the step is under way any more.
  kLoad,          // A load clears the step.
  kReplaceState,  // A load writes: nothing is read any more.
  kClose,
};
inline constexpr int kAdmissions = 18;

std::string_view Name(Phase phase);
std::string_view Name(Admission admission);

// All that an answer depends on.
struct GateState {
  Phase phase = Phase::kIdle;
  bool broken = false;
  bool torn = false;      // State is half loaded: only a load helps.
  bool deciding = false;  // A decision's task is under way; during kClearing it ends without one.
  int64_t readers = 0;
  int64_t adding = 0;     // Contributions that are being added, of all ranks.
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
  kAborted,   // Refused: the step that was to be decided is gone.
  kBroken,    // Refused: the job is broken.
};

// Of the rank in question: contributions that are being added; sums and provisional updates that
// are computed from what it gave; and of those updates the ones that it has more for.
struct RankUnderWay {
  int64_t adding = 0;
  int64_t computing = 0;
  int64_t superseded = 0;
};
Answer Ask(Admission admission, const GateState& state, const RankUnderWay& rank = {});

class Gate {
 public:
  explicit Gate(int world_size) : ranks_(world_size) {}

  // Called once, under the job's lock: with kGranted, with the reason of a refusal, or with nullopt
  // if the caller has cancelled.
  using Turn = absl::AnyInvocable<void(std::optional<Answer>) &&>;

  const GateState& state() const { return state_; }
  Phase phase() const { return state_.phase; }
  std::string ToString() const;  // All of the state in a line, for people.
  Answer Ask(Admission admission, int rank = -1) const {
    return ballast::Ask(admission, state_, rank < 0 ? RankUnderWay() : ranks_[rank]);
  }

  // Calls the turn now, or keeps it until its answer is not kWaits; then returns a number for
  // Cancel, which is never 0.
  uint64_t Enter(Admission admission, int rank, Turn turn);
  // Gives a call its turn that still waits.
  void Cancel(uint64_t number);
  // Gives their turn to all whose answer has changed, in the order in which they came; repeats this
  // until no answer changes. The job calls it before it gives up its lock.
  void GiveTurns();

  // The moves. Each checks its precondition, and does nothing to a broken job.
  void BeginStep();               // idle -> open
  void Seal();                    // open -> sealed
  void StartDeciding();           // sealed -> deciding
  void AwaitVotes();              // deciding -> voting
  void EndVoting();               // voting -> sealed
  void Reopen();                  // voting -> open
  void Decide();                  // deciding -> updating
  void Commit();                  // updating -> idle
  void EndDeciding();             // The decision's task ends without a decision, during clearing.
  void StartClearing();           // idle, or undecided -> clearing
  void FinishClearing();          // clearing -> idle
  void StartLoading();            // idle -> loading
  void FinishLoading(bool torn);  // loading -> idle
  void Close();                   // idle, or broken -> closed
  void Break() { state_.broken = true; }

  void StartReading() { ++state_.readers; }
  void StopReading();
  void StartAdding(int rank);
  void StopAdding(int rank);
  // -1: from what all ranks gave.
  void StartComputing(int rank = -1);
  void StopComputing(int rank = -1);
  // A provisional update that is being computed from what the rank gave is in vain.
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

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_GATE_H_
