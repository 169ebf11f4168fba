// Plays a history through client sessions over EngineTransport: streams break, and no trainer may
// notice. With members their links break, too, and one of them dies.
//
// Gradients are pushed from one thread, in the history's order; what a rank does from its first
// seal on, which blocks, is done by a thread of its own.
#ifndef BALLAST_TESTS_HISTORIES_SESSION_SESSION_PLAYER_H_
#define BALLAST_TESTS_HISTORIES_SESSION_SESSION_PLAYER_H_

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "client/session/session_impl.h"
#include "tests/histories/engine/job_under_test.h"
#include "tests/histories/history.h"
#include "tests/histories/script.h"
#include "tests/histories/session/wires.h"
#include "tests/histories/tries.h"

namespace ballast::histories {

// Waiting takes no time.
class InstantClock final : public client::Clock {
 public:
  absl::Time Now() override;
  void SleepFor(absl::Duration duration) override;
  void WaitFor(Mutex& mutex, CondVar& changed, absl::Duration duration) override;

 private:
  Mutex mutex_;
  absl::Time now_ ABSL_GUARDED_BY(mutex_) = absl::FromUnixSeconds(1000);
};

// Counts the payloads that a session has not given back. Thread-safe.
class Lending {
 public:
  void Lend();
  void GiveBack();
  int lent() const;
  // False if that has not come within a minute. A payload may come back a little after the step.
  bool AwaitAllBack();

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  int lent_ ABSL_GUARDED_BY(mutex_) = 0;
};

class SessionPlayer {
 public:
  SessionPlayer(Engines& engines, const History& history);
  ~SessionPlayer();
  // OK, or the first difference from what the model says.
  absl::Status Play();

 private:
  // How the step ended for a rank.
  struct Ending {
    absl::Status status;
    std::optional<client::StepDecision> decision = std::nullopt;  // Committed, if status is OK.
    std::optional<StepNorm> norm = std::nullopt;                  // That it looked at last.
  };
  struct Rank {
    std::string process_id;
    std::unique_ptr<client::SessionImpl> session;
    std::map<int, std::vector<std::byte>> weights;  // By chunk; the trainer's memory.
    std::shared_ptr<Lending> lending = std::make_shared<Lending>();
    // In the attempt in progress:
    uint32_t try_number = 0;
    bool begun = false;
    std::vector<std::shared_ptr<std::vector<std::byte>>> buffers;
    std::vector<Call> tail;  // From the first seal on.
    Ending ending;
  };

  absl::Status OpenSession(int rank);
  absl::Status StartOver();
  absl::Status CheckWeights(int rank) const;

  // session_player.cc: an attempt up to the seals.
  absl::Status PlayAttempt(const Attempt& attempt);
  std::vector<RankFaults> PlanFaults() const;
  // At one of the next `words` words of a link.
  void PlanLinkCuts(int words);
  absl::Status PlayUpToSeals();
  absl::Status Make(const Call& call);
  absl::Status Begin(const Call& call);
  absl::Status Happen(const Event& event, size_t next_call);
  void ArmDeath(const Event& event);
  // The rank takes back what it gave and begins the next try, unless it is late or has sealed.
  absl::Status Discard(int rank, size_t next_call);
  Script& ScriptOf(const Call& call) { return tries_->script(call.try_number); }
  // What the step is, if it is decided.
  const Attempt& live() const { return tries_->attempt(live_); }

  // session_endings.cc
  // The scripts are not for several threads.
  void MakePayloads(const std::vector<Call>& calls);
  absl::Status PlaySeals();
  // Of a rank that discards, because another one has or for the norm that it has seen.
  absl::Status CatchUp(int rank);
  absl::Status Orthogonalize(int rank);
  Ending PlayTail(int rank);
  // Seals, and votes: together, or after a look at the norm. For a spike, the first rank that looks
  // discards instead.
  absl::StatusOr<client::StepDecision> SealAndVote(int rank);
  // In which try the step is decided.
  uint32_t last_try() const { return live_ + (spike_ ? 1 : 0); }
  // The step could not be kept, because of `why`, and was skipped: sessions go on, but for that of
  // `replaced`, if that is a rank.
  absl::Status CheckGivenUp(int replaced);
  bool GivesUp() const;
  absl::Status Judge(bool aborted);
  absl::Status CheckCommitted();
  bool NeverWhole(uint32_t try_number) const;
  bool NeverWhole() const { return NeverWhole(live_); }

  // abort-step, once members have heard what ranks have said.
  absl::Status Abort();
  absl::Status BreakOff();
  absl::Status BreakOffNow();
  // With members that do not die: ranks that have sent all of the live try seal, and wait.
  absl::Status BeginSeals();
  void JoinSeals();
  absl::Status AbortNow();
  absl::Status UndoNow();
  // Whether a step that is given up ends otherwise than the model says, as its lead does not know
  // at that instant whether all have begun.
  bool MayBeRedone() const;
  absl::Status TakeRank(bool restart);
  absl::Status ExpectEnded(int rank);
  bool AnyBegun() const;

  const History& history_;
  const bool small_window_;
  const bool may_die_;  // Members.
  JobUnderTest stage_;
  InstantClock clock_;
  Wires wires_;
  std::vector<Rank> ranks_;
  std::vector<std::pair<std::vector<Snapshot>, ModelState>> snapshots_;
  int processes_ = 0;

  // Of the attempt in progress.
  const Attempt* attempt_ = nullptr;
  std::unique_ptr<Tries> tries_;
  uint32_t live_ = 0;        // The highest try of any rank: all others have to come to it.
  bool live_begun_ = false;  // A rank that is in time has begun it.
  std::vector<Call> calls_;
  std::vector<bool> late_;
  bool broken_off_ = false;
  std::vector<std::thread> seals_;  // Of BeginSeals.
  int votes_otherwise_ = -1;        // The rank that does, at first.
  bool spike_ = false;              // The first rank that looks discards what it sees.
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_SESSION_SESSION_PLAYER_H_
