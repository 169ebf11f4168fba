#include "cpu_optimizer_service/job/core/gate.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"

namespace ballast {
namespace {

// A row per admission, a column per phase. What the counts add to it is in Ask().
constexpr Answer kGrant = Answer::kGranted;
constexpr Answer kWait = Answer::kWaits;
constexpr Answer kClos = Answer::kClosed;
constexpr Answer kLoad = Answer::kLoading;
constexpr Answer kBusy = Answer::kChanging;
constexpr Answer kNone = Answer::kNoStep;
constexpr Answer kHas = Answer::kHasStep;
constexpr Answer kLate = Answer::kDecided;
constexpr Answer kGone = Answer::kAborted;

constexpr std::array<std::array<Answer, kPhases>, kAdmissions> kTable = {{
    // The first four: from the last seal on, and again from the last vote on, the engine works on
    // the step with the listeners and the memory that ranks have then. So ranks come and go before
    // or after that.
    // idle    open    reported sealed  deciding updating directions clearing loading closed
    {kGrant, kGrant, kGrant, kWait, kWait, kWait, kGrant, kWait, kLoad, kClos},  // kAttach
    {kGrant, kGrant, kGrant, kWait, kWait, kWait, kGrant, kWait, kLoad, kClos},  // kOpenStream
    {kGrant, kGrant, kGrant, kWait, kWait, kWait, kGrant, kWait, kLoad, kClos},  // kQuietRank
    {kGrant, kGrant, kGrant, kWait, kWait, kWait, kGrant, kWait, kLoad, kClos},  // kRankMemory
    // Nothing writes committed state before the decision is made. A sealed step only waits for
    // readers.
    {kGrant, kGrant, kGrant, kGrant, kWait, kWait, kWait, kWait, kWait, kClos},  // kSnapshot
    {kGrant, kGrant, kGrant, kGrant, kWait, kWait, kWait, kWait, kWait, kClos},  // kRead
    // Its caller cannot wait and asks again. In updating it is for chunks that are at the new step
    // already.
    {kGrant, kGrant, kGrant, kBusy, kBusy, kGrant, kGrant, kBusy, kLoad, kClos},    // kReadNow
    {kGrant, kGrant, kGrant, kWait, kWait, kGrant, kGrant, kWait, kLoad, kClos},    // kDiscard
    {kGrant, kGrant, kGrant, kGrant, kGrant, kGrant, kGrant, kWait, kLoad, kClos},  // kSupersede
    // Up to the decision's record: a decision that is being made finds its step gone (kUpdate).
    {kNone, kGrant, kGrant, kGrant, kGrant, kLate, kGrant, kNone, kLoad, kClos},  // kAbort
    {kGrant, kHas, kHas, kHas, kHas, kLate, kGrant, kWait, kLoad, kClos},         // kUndo
    {kGrant, kWait, kWait, kWait, kWait, kWait, kWait, kWait, kLoad, kClos},      // kWrite
    // The engine's own, as kReplaceState: each is for one phase, and in every other one the step
    // that it was for has been given up.
    {kGone, kGone, kGone, kGrant, kGone, kGone, kGone, kGone, kGone, kClos},  // kDecide
    {kGone, kGone, kGone, kGone, kGrant, kGone, kGone, kGone, kGone, kClos},  // kUpdate
    {kGone, kGone, kGone, kGone, kGone, kGone, kGone, kGrant, kGone, kClos},  // kFinishClear
    // Loading and closing give up a step that still waits for ranks or readers. One that is being
    // decided comes to its end before.
    {kGrant, kGrant, kGrant, kGrant, kWait, kWait, kGrant, kWait, kWait, kClos},  // kLoad
    {kGone, kGone, kGone, kGone, kGone, kGone, kGone, kGone, kGrant, kClos},      // kReplaceState
    {kGrant, kGrant, kGrant, kGrant, kWait, kWait, kGrant, kWait, kWait, kClos},  // kClose
    // Words come in their order. Each finds its step where nothing works on it.
    {kGrant, kGrant, kGrant, kWait, kWait, kWait, kGrant, kWait, kWait, kClos},  // kHear
}};

// Torn state can be closed, and replaced by a load; everything else would use it.
bool NeedsWholeState(Admission admission) {
  switch (admission) {
    case Admission::kOpenStream:
    case Admission::kQuietRank:
    case Admission::kRankMemory:
    case Admission::kSnapshot:
    case Admission::kRead:
    case Admission::kReadNow:
    case Admission::kUndo:
    case Admission::kWrite:
      return true;
    default:
      return false;
  }
}

}  // namespace

std::string_view Name(Phase phase) {
  constexpr std::array<std::string_view, kPhases> kNames = {
      "idle",     "open",       "reported", "sealed",  "deciding",
      "updating", "directions", "clearing", "loading", "closed"};
  return kNames[static_cast<int>(phase)];
}

std::string Gate::ToString() const {
  return absl::StrCat(std::string(ballast::Name(state_.phase)), state_.torn ? ", torn" : "",
                      state_.deciding ? ", a decision runs" : "", "; ", state_.readers,
                      " readers, ", state_.adding, " contributions being added, ", state_.computing,
                      " sums and updates being computed; ", waiting_.size(), " calls wait");
}

std::string_view Name(Admission admission) {
  constexpr std::array<std::string_view, kAdmissions> kNames = {
      "attach", "open stream",   "quiet rank", "rank memory", "snapshot",
      "read",   "read now",      "discard",    "supersede",   "abort",
      "undo",   "write",         "decide",     "update",      "finish clear",
      "load",   "replace state", "close",      "hear"};
  return kNames[static_cast<int>(admission)];
}

Answer Ask(Admission admission, const GateState& state, const RankUnderWay& rank) {
  const Answer answer = kTable[static_cast<int>(admission)][static_cast<int>(state.phase)];
  if (answer != Answer::kGranted) return answer;
  if (state.torn && NeedsWholeState(admission)) return Answer::kTorn;
  bool waits = false;
  switch (admission) {
    case Admission::kQuietRank:
      // The older stream's thread adds without the lock. The new stream is told what the rank has
      // delivered, and that must count what is being added.
      waits = rank.adding > 0;
      break;
    case Admission::kDiscard:
      // In other phases there is nothing to take back, which is the call's to say.
      waits = (state.phase == Phase::kOpen || state.phase == Phase::kReported) &&
              (rank.adding > 0 || rank.computing > 0);
      // The lead opens the part again, or has decided it.
      waits = waits || (state.follows && state.phase == Phase::kReported);
      break;
    case Admission::kSupersede:
      waits = rank.superseded > 0;
      break;
    case Admission::kRead:
      // Readers that come after the seal let its decision pass, or they could hold it back for
      // ever.
      waits = state.phase == Phase::kSealed && state.readers > 0;
      break;
    case Admission::kUndo:
    case Admission::kWrite:
    case Admission::kDecide:
    case Admission::kReplaceState:
      // These readers have pinned nothing, and what follows writes where they read.
      waits = state.readers > 0;
      break;
    case Admission::kUpdate:
      // The decision needs all sums, and it publishes or drops the versions that provisional
      // updates still write.
      waits = state.computing > 0;
      break;
    case Admission::kFinishClear:
      waits = state.deciding || state.adding > 0 || state.computing > 0;
      break;
    default:
      break;
  }
  return waits ? Answer::kWaits : Answer::kGranted;
}

uint64_t Gate::Enter(Admission admission, int rank, Turn turn) {
  // A call that may go now goes before those that wait. In the middle of a section this lets what
  // has begun go on first; the others get their turns at the section's end.
  if (const Answer answer = Ask(admission, rank); answer != Answer::kWaits) {
    std::move(turn)(answer);
    return 0;
  }
  waiting_.push_back({++last_number_, admission, rank, std::move(turn)});
  return last_number_;
}

void Gate::Cancel(uint64_t number) {
  const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                  [&](const Waiting& waiting) { return waiting.number == number; });
  if (found == waiting_.end()) return;
  Turn turn = std::move(found->turn);
  waiting_.erase(found);
  std::move(turn)(std::nullopt);
}

void Gate::GiveTurns() {
  // From the front again after each turn: it may have changed the answers of those before it.
  for (size_t i = 0; i < waiting_.size();) {
    const Answer answer = Ask(waiting_[i].admission, waiting_[i].rank);
    if (answer == Answer::kWaits) {
      ++i;
      continue;
    }
    Turn turn = std::move(waiting_[i].turn);
    waiting_.erase(waiting_.begin() + static_cast<ptrdiff_t>(i));
    std::move(turn)(answer);
    i = 0;
  }
}

void Gate::Move(Phase from, Phase to) {
  Check(state_.phase == from, "a job moves only from the phase before");
  state_.phase = to;
}

void Gate::BeginStep() { Move(Phase::kIdle, Phase::kOpen); }
void Gate::Seal() { Move(Phase::kOpen, Phase::kSealed); }

void Gate::StartDeciding() {
  Move(Phase::kSealed, Phase::kDeciding);
  state_.deciding = true;
}

void Gate::AwaitLead() {
  Move(Phase::kDeciding, Phase::kReported);
  state_.deciding = false;
}

void Gate::GoOn() { Move(Phase::kReported, Phase::kSealed); }
void Gate::Reopen() { Move(Phase::kReported, Phase::kOpen); }
void Gate::Decide() { Move(Phase::kDeciding, Phase::kUpdating); }

void Gate::ResumeUpdating() { Move(Phase::kIdle, Phase::kUpdating); }

void Gate::Commit() {
  Move(Phase::kUpdating, Phase::kIdle);
  state_.deciding = false;
}

void Gate::AwaitDirections() {
  Check(state_.phase == Phase::kUpdating || state_.phase == Phase::kIdle,
        "directions are awaited after the first round");
  state_.phase = Phase::kDirections;
  state_.deciding = false;
}

void Gate::EndDirections() { Move(Phase::kDirections, Phase::kUpdating); }

void Gate::EndDeciding() {
  Check(state_.phase == Phase::kClearing && state_.deciding,
        "a decision ends without its commit only when its step is cleared");
  state_.deciding = false;
}

void Gate::StartClearing() {
  // `deciding` stays as it is: a decision's task may still read gradients, and kFinishClear waits
  // until that says EndDeciding. The phases up to kDeciding are those before the decision.
  Check(state_.phase <= Phase::kDeciding || state_.phase == Phase::kDirections,
        "only an undecided step is cleared");
  state_.phase = Phase::kClearing;
}

void Gate::FinishClearing() { Move(Phase::kClearing, Phase::kIdle); }
void Gate::StartLoading() { Move(Phase::kIdle, Phase::kLoading); }

void Gate::FinishLoading(bool torn) {
  Move(Phase::kLoading, Phase::kIdle);
  state_.torn = torn;
}

void Gate::Close() {
  Check(state_.phase == Phase::kIdle, "a job is closed between steps");
  state_.phase = Phase::kClosed;
}

void Gate::StopReading() {
  Check(state_.readers > 0, "a reader stops once");
  --state_.readers;
}

void Gate::StartAdding(int rank) {
  ++ranks_[rank].adding;
  ++state_.adding;
}

void Gate::StopAdding(int rank) {
  Check(ranks_[rank].adding > 0, "a contribution is added once");
  --ranks_[rank].adding;
  --state_.adding;
}

void Gate::StartComputing(int rank) {
  ++ranks_[rank].computing;
  ++state_.computing;
}

void Gate::StopComputing(int rank) {
  Check(ranks_[rank].computing > 0, "what is computed ends once");
  --ranks_[rank].computing;
  --state_.computing;
}

void Gate::StopSuperseded(int rank) {
  Check(ranks_[rank].superseded > 0, "an update is superseded once");
  --ranks_[rank].superseded;
}

}  // namespace ballast
