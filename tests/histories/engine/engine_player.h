// Plays a history on the engine itself: the calls of all ranks from one thread, in the order that
// the history gives them.
#ifndef BALLAST_TESTS_HISTORIES_ENGINE_ENGINE_PLAYER_H_
#define BALLAST_TESTS_HISTORIES_ENGINE_ENGINE_PLAYER_H_

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/status.h"
#include "tests/cpu_optimizer_service/job/heap_rank_memory.h"
#include "tests/histories/engine/job_under_test.h"
#include "tests/histories/engine/recording_listener.h"
#include "tests/histories/history.h"
#include "tests/histories/script.h"
#include "tests/histories/tries.h"

namespace ballast::histories {

// A call that was under way when the service died: what it had come to, by what its rank is told.
struct UnderWay {
  int rank = -1;
  std::function<void(const RankPosition&)> adopt;
};

class EnginePlayer {
 public:
  EnginePlayer(Engines& engines, const History& history);
  // OK, or the first difference from what the model says.
  absl::Status Play();

 private:
  struct Rank {
    std::string process_id;
    Generation generation;
    std::unique_ptr<RankStream> stream;
    std::shared_ptr<RecordingListener> ear;
    bool away = false;
    int64_t vote_refusals = 0;  // That its ear has been told of.
    // What it shares with the engine, if anything, and whether its stream takes weights there.
    std::shared_ptr<const HeapRankMemory> memory;
    bool weights_in_place = false;
    // In the attempt in progress:
    uint32_t try_number = 0;
    bool begun = false;  // That try, as what follows.
    bool sealed = false;
    uint32_t micro_steps_ended = 0;
  };
  struct OpenSnapshot {
    Snapshot snapshot;
    ModelState state;
  };

  // engine_player.cc: an attempt from end to end.
  absl::Status PlayAttempt(const Attempt& attempt);
  absl::Status PlayCalls();
  absl::Status Finish();
  // Votes, and waits until all have been told what came of it.
  absl::Status AwaitDecision();
  // engine_directions.cc: while ranks give O.
  absl::Status PlayDirections();
  absl::Status Disturb(int kind, int rank, int chunk);
  bool IsAliveToTheEnd();
  absl::Status ReadDirections();  // And makes O of them.
  absl::Status Give(int chunk);
  absl::Status StartRoundAgain();
  absl::Status FinishCommit();
  absl::Status FinishRefused();
  // The step could not be kept, and was skipped, because of `why`. `replaced`: a rank that has no
  // stream now, or -1.
  absl::Status FinishGivenUp(int replaced);
  bool GivesUp() const;
  absl::Status BreakOff(End end);
  absl::Status AbortNow(bool at_decision);
  absl::Status UndoNow();
  absl::Status TakeRank(bool restart);
  absl::Status StartOver();
  absl::Status LeaveAttempt();
  // Takes the rank again and opens a stream; `over`: while the old one lives.
  absl::Status Open(int rank, bool over, const UnderWay& under_way = {});

  // engine_memory.cc: memory in common. Whatever the engine must not read any more is poisoned, so
  // that reading it all the same shows in the state.
  bool Shares(int rank) const;
  absl::Status GiveMemory(int rank);
  // The rank's process has died, or another attempt begins without it: nobody reads it from now on.
  void LoseMemory(int rank);
  // Its process lets go of it in mid-step: what the step has taken there stays until that is over.
  void DropMemory(int rank);
  // The step is over: gradients are nobody's any more.
  absl::Status PoisonGradients();
  absl::Status CheckWeightsInPlace(int rank);
  bool GoesInPlace(const Call& call) const;

  // engine_deaths.cc
  void ArmDeath(const Event& event);
  // Whether the service has died in these calls: what came of them is then nobody's.
  bool DiesIn(const std::function<void()>& calls);
  // The next service's process, at which all ranks open their streams again. `may_be_decided`: it
  // may have carried out the step (carried_out_).
  absl::Status TakeOver(bool may_be_decided, const UnderWay& under_way = {});
  absl::Status SealAll();
  // The first weights; the service may die in them, too.
  absl::Status UploadWeights();
  absl::Status WriteState();
  absl::Status BringWrite(const StateWrite& write);
  // engine_derive.cc: the job without some parameters, and then with all again.
  absl::Status DeriveJob();
  absl::Status BringDerived(const JobSpec& without, const JobSpec& with, const std::string& uid);
  absl::Status BringBack(Job& job);
  // The call, and the same again if the service dies in it.
  template <typename Call>
  auto Survive(const UnderWay& under_way, const Call& call) -> decltype(call()) {
    if (!mortal_) return call();
    decltype(call()) result = absl::UnknownError("not called yet");
    if (!DiesIn([&] { result = call(); })) return result;
    BALLAST_RETURN_IF_ERROR(TakeOver(/*may_be_decided=*/false, under_way));
    return call();
  }

  // engine_calls.cc: one call, and what it should say.
  absl::Status Make(const Call& call);
  absl::Status Begin(const Call& call);
  absl::Status Contribute(const Call& call);
  absl::Status EndMicroStep(const Call& call);
  absl::Status Seal(const Call& call, uint32_t micro_steps);
  // engine_votes.cc: what the ranks do when they have sealed.
  absl::Status PlayVotes();
  absl::Status LookAtNorm(int rank);
  bool SpikeIsDue() const;
  absl::Status DiscardForSpike();
  // All votes were void.
  absl::Status VoteAgain();
  absl::Status VoteWrongly(const Event& event);
  StepVote VoteOf(int rank) const;
  std::optional<StepVote> VoteWithSeal(int rank) const;

  absl::Status Repeat(const Call& call);
  // Of a call of a try that its rank has discarded.
  absl::Status RepeatDiscarded(const Call& call);
  absl::Status Discard(int rank);
  StepAttempt At(int rank) const { return {step_, ranks_[rank].try_number}; }
  Script& ScriptOf(const Call& call) const { return tries_->script(call.try_number); }
  // What the step is, if it is decided now.
  const Attempt& live() const { return tries_->attempt(live_); }
  absl::Status ExpectAborted(RankStream& stream, int rank);
  Contribution MakeContribution(const Call& call);
  std::optional<ModelRefusal> WhatIsMissing(int rank, uint32_t micro_steps) const;
  bool AllSealed() const;

  // engine_events.cc
  absl::Status Happen(const Event& event, size_t next_call);
  absl::Status Cut(const Event& event);
  absl::Status SendWrong(const Event& event);
  absl::Status TellWaiting();
  absl::Status CheckPosition(int rank) const;

  const History& history_;
  const bool may_die_;
  JobUnderTest stage_;
  std::vector<Rank> ranks_;
  std::deque<std::unique_ptr<RankStream>> ghosts_;  // Streams of older generations.
  std::vector<OpenSnapshot> snapshots_;
  std::vector<std::shared_ptr<const HeapRankMemory>> dropped_;  // In this attempt.
  std::deque<std::shared_ptr<const HeapRankMemory>> lost_;      // Poisoned.
  int processes_ = 0;
  Generation generation_ = 1;

  // Of the attempt in progress.
  const Attempt* attempt_ = nullptr;
  std::unique_ptr<Tries> tries_;
  uint64_t step_ = 0;
  bool mortal_ = false;           // Whether the service may die in the calls made now.
  uint64_t taken_over_step_ = 0;  // By a service after a death, in this attempt or one before;
  bool carried_out_ = false;      // or carried out by it: all ranks are away.
  bool in_directions_ = false;    // Its ranks are to give O, or have done so.
  bool first_round_taken_over_ = false;  // By a service after a death.
  // Of O, by VaryOrthogonal: what ranks give now, and what is to count.
  int given_variant_ = 0, variant_ = 0;
  std::vector<std::vector<uint16_t>> orthogonal_;  // By chunk; empty: none is to be given.
  bool open_ = false;                              // Some rank has begun it.
  bool whole_ = false;                             // The last seal has been taken.
  bool refused_ = false;      // A seal has been refused for good: the last one,
  bool hopeless_ = false;     // or that of a rank which will never have one taken.
  int votes_otherwise_ = -1;  // The rank that does; none any more, once it was told.
  uint32_t live_ = 0;         // The highest try of any rank: all others have to come to it.
  bool live_begun_ = false;   // A rank has begun it.
  std::vector<Call> calls_;
  size_t next_call_ = 0;
  std::vector<uint32_t> next_micro_step_;  // By chunk, as the ledger should have it.
  std::vector<int> payloads_;              // By chunk, taken in this attempt.
  std::vector<std::pair<size_t, Call>> repeats_;
  std::vector<std::pair<size_t, int>> returns_;
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_ENGINE_ENGINE_PLAYER_H_
