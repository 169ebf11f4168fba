#include "cpu_optimizer_service/job/core/gate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace ballast {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr Admission kAllAdmissions[] = {
    Admission::kAttach,      Admission::kOpenStream, Admission::kQuietRank,
    Admission::kRankMemory,  Admission::kSnapshot,   Admission::kRead,
    Admission::kReadNow,     Admission::kDiscard,    Admission::kSupersede,
    Admission::kAbort,       Admission::kDecide,     Admission::kUpdate,
    Admission::kFinishClear, Admission::kLoad,       Admission::kReplaceState,
    Admission::kClose,       Admission::kUndo,       Admission::kWrite,
    Admission::kHear};
constexpr Phase kAllPhases[] = {
    Phase::kIdle,     Phase::kOpen,       Phase::kReported, Phase::kSealed,  Phase::kDeciding,
    Phase::kUpdating, Phase::kDirections, Phase::kClearing, Phase::kLoading, Phase::kClosed};
static_assert(std::size(kAllAdmissions) == kAdmissions && std::size(kAllPhases) == kPhases);

// What a person would say of an admission, written down once more and by other means than the
// table: as conditions on the state.
Answer Expected(Admission admission, const GateState& state, const RankUnderWay& rank) {
  const Phase phase = state.phase;
  const bool undecided = phase == Phase::kOpen || phase == Phase::kReported ||
                         phase == Phase::kSealed || phase == Phase::kDeciding;
  const bool moves_by_itself =
      phase == Phase::kDeciding || phase == Phase::kUpdating || phase == Phase::kClearing;
  const auto wait_if = [](bool waits) { return waits ? Answer::kWaits : Answer::kGranted; };
  if (phase == Phase::kClosed) return Answer::kClosed;
  switch (admission) {
    case Admission::kAttach:
    case Admission::kOpenStream:
    case Admission::kQuietRank:
    case Admission::kRankMemory:
      if (phase == Phase::kLoading) return Answer::kLoading;
      if (moves_by_itself || phase == Phase::kSealed) return Answer::kWaits;
      if (admission != Admission::kAttach && state.torn) return Answer::kTorn;
      return wait_if(admission == Admission::kQuietRank && rank.adding > 0);
    case Admission::kSnapshot:
    case Admission::kRead:
      if (moves_by_itself || phase == Phase::kDirections || phase == Phase::kLoading) {
        return Answer::kWaits;
      }
      if (state.torn) return Answer::kTorn;
      return wait_if(admission == Admission::kRead && phase == Phase::kSealed && state.readers > 0);
    case Admission::kReadNow:
      if (phase == Phase::kLoading) return Answer::kLoading;
      if (phase == Phase::kSealed || phase == Phase::kDeciding || phase == Phase::kClearing) {
        return Answer::kChanging;
      }
      return state.torn ? Answer::kTorn : Answer::kGranted;
    case Admission::kDiscard:
      if (phase == Phase::kLoading) return Answer::kLoading;
      if (phase == Phase::kReported && state.follows) return Answer::kWaits;
      if (phase == Phase::kOpen || phase == Phase::kReported)
        return wait_if(rank.adding + rank.computing > 0);
      return wait_if(phase == Phase::kSealed || phase == Phase::kDeciding ||
                     phase == Phase::kClearing);
    case Admission::kSupersede:
      if (phase == Phase::kLoading) return Answer::kLoading;
      return wait_if(phase == Phase::kClearing || rank.superseded > 0);
    case Admission::kAbort:
      if (phase == Phase::kLoading) return Answer::kLoading;
      if (phase == Phase::kUpdating) return Answer::kDecided;
      return undecided || phase == Phase::kDirections ? Answer::kGranted : Answer::kNoStep;
    case Admission::kUndo:
      if (phase == Phase::kLoading) return Answer::kLoading;
      if (phase == Phase::kUpdating) return Answer::kDecided;
      if (undecided) return Answer::kHasStep;
      if (phase == Phase::kClearing) return Answer::kWaits;
      return state.torn ? Answer::kTorn : wait_if(state.readers > 0);
    case Admission::kWrite:
      if (phase == Phase::kLoading) return Answer::kLoading;
      if (phase != Phase::kIdle) return Answer::kWaits;
      return state.torn ? Answer::kTorn : wait_if(state.readers > 0);
    case Admission::kDecide:
      return phase == Phase::kSealed ? wait_if(state.readers > 0) : Answer::kAborted;
    case Admission::kUpdate:
      return phase == Phase::kDeciding ? wait_if(state.computing > 0) : Answer::kAborted;
    case Admission::kFinishClear:
      return phase == Phase::kClearing
                 ? wait_if(state.deciding || state.adding > 0 || state.computing > 0)
                 : Answer::kAborted;
    case Admission::kReplaceState:
      return phase == Phase::kLoading ? wait_if(state.readers > 0) : Answer::kAborted;
    case Admission::kHear:
      return wait_if(moves_by_itself || phase == Phase::kSealed || phase == Phase::kLoading);
    case Admission::kLoad:
    case Admission::kClose:
      return wait_if(moves_by_itself || phase == Phase::kLoading);
  }
  return Answer::kAborted;
}

TEST(Gate, AnswersEveryAdmissionInEveryState) {
  int cases = 0;
  std::map<Answer, int> answers;
  for (const Admission admission : kAllAdmissions) {
    for (const Phase phase : kAllPhases) {
      for (int bits = 0; bits < 64; ++bits) {
        const GateState state = {.phase = phase,
                                 .torn = (bits & 1) != 0,
                                 .follows = (bits & 32) != 0,
                                 .deciding = (bits & 2) != 0,
                                 .readers = (bits & 4) != 0 ? 2 : 0,
                                 .adding = (bits & 8) != 0 ? 3 : 0,
                                 .computing = (bits & 16) != 0 ? 4 : 0};
        for (const int64_t adding : {int64_t{0}, state.adding}) {
          for (const int64_t computing : {int64_t{0}, state.computing}) {
            for (const int64_t superseded : {0, 1}) {
              const RankUnderWay rank = {
                  .adding = adding, .computing = computing, .superseded = superseded};
              const Answer answer = Ask(admission, state, rank);
              ASSERT_EQ(answer, Expected(admission, state, rank))
                  << Name(admission) << " while " << Name(phase) << ", bits " << bits;
              ++answers[answer];
              ++cases;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(cases, kAdmissions * kPhases * 512);
  EXPECT_EQ(answers.size(), 10u) << "each answer is given somewhere";
}

TEST(Gate, NamesEachPhaseAndAdmissionOnce) {
  std::map<std::string, int> names;
  for (const Admission admission : kAllAdmissions) ++names[std::string(Name(admission))];
  EXPECT_EQ(names.size(), static_cast<size_t>(kAdmissions));
  names.clear();
  for (const Phase phase : kAllPhases) ++names[std::string(Name(phase))];
  EXPECT_EQ(names.size(), static_cast<size_t>(kPhases));
}

// Calls that are recorded by the order of their turns.
class GateTurns : public testing::Test {
 protected:
  uint64_t Enter(const std::string& name, Admission admission, int rank = -1) {
    return gate_.Enter(admission, rank, [this, name](std::optional<Answer> answer) {
      turns_.push_back(!answer.has_value()           ? name + " cancelled"
                       : *answer == Answer::kGranted ? name
                                                     : name + " refused");
    });
  }
  std::vector<std::string> Turns() {
    gate_.GiveTurns();
    return std::exchange(turns_, {});
  }
  void MoveToUpdating() {
    gate_.BeginStep();
    gate_.Seal();
    gate_.StartDeciding();
    gate_.Decide();
  }

  Gate gate_{2, /*follows=*/false};
  std::vector<std::string> turns_;
};

TEST_F(GateTurns, ComeAtOnceWhereNothingIsInTheWay) {
  EXPECT_EQ(Enter("attach", Admission::kAttach), 0u);
  EXPECT_THAT(turns_, ElementsAre("attach"));
}

TEST_F(GateTurns, ComeInTheOrderOfAskingWhenTheStepIsCommitted) {
  MoveToUpdating();
  EXPECT_NE(Enter("first", Admission::kAttach), 0u);
  EXPECT_NE(Enter("second", Admission::kSnapshot), 0u);
  EXPECT_NE(Enter("third", Admission::kAttach), 0u);
  EXPECT_THAT(Turns(), IsEmpty());
  gate_.Commit();
  EXPECT_THAT(Turns(), ElementsAre("first", "second", "third"));
  EXPECT_THAT(Turns(), IsEmpty()) << "each gets one turn";
}

TEST_F(GateTurns, OfRanksComeWhileDirectionsAreOrthogonalized) {
  MoveToUpdating();
  Enter("snapshot", Admission::kSnapshot);
  Enter("attach", Admission::kAttach);
  gate_.AwaitDirections();
  EXPECT_THAT(Turns(), ElementsAre("attach"));
  gate_.StartClearing();  // A new generation.
  gate_.FinishClearing();
  gate_.AwaitDirections();
  EXPECT_THAT(Turns(), IsEmpty());
  gate_.EndDirections();
  EXPECT_THAT(Turns(), IsEmpty());
  gate_.Commit();
  EXPECT_THAT(Turns(), ElementsAre("snapshot"));
}

TEST_F(GateTurns, AreRefusedWhenTheJobIsClosedInstead) {
  MoveToUpdating();
  Enter("attach", Admission::kAttach);
  gate_.Commit();
  gate_.StartClearing();
  EXPECT_THAT(Turns(), IsEmpty());
  gate_.FinishClearing();
  gate_.Close();
  EXPECT_THAT(Turns(), ElementsAre("attach refused"));
}

TEST_F(GateTurns, CanBeCancelledWhileTheyWait) {
  MoveToUpdating();
  const uint64_t first = Enter("first", Admission::kAttach);
  Enter("second", Admission::kAttach);
  gate_.Cancel(first);
  EXPECT_THAT(turns_, ElementsAre("first cancelled"));
  gate_.Cancel(first);
  gate_.Commit();
  EXPECT_THAT(Turns(), ElementsAre("first cancelled", "second"));
  gate_.Cancel(first);
  EXPECT_THAT(Turns(), IsEmpty());
}

TEST_F(GateTurns, OfAStreamWaitForItsOwnRankOnly) {
  gate_.BeginStep();
  gate_.StartAdding(0);
  Enter("rank 0", Admission::kQuietRank, 0);
  Enter("rank 1", Admission::kQuietRank, 1);
  EXPECT_THAT(Turns(), ElementsAre("rank 1"));
  gate_.StopAdding(0);
  EXPECT_THAT(Turns(), ElementsAre("rank 0"));
}

TEST_F(GateTurns, OfADiscardWaitForWhatIsComputedFromItsOwnRankOnly) {
  gate_.BeginStep();
  gate_.StartComputing(0);
  gate_.StartComputing(0);
  Enter("rank 0", Admission::kDiscard, 0);
  Enter("rank 1", Admission::kDiscard, 1);
  EXPECT_THAT(Turns(), ElementsAre("rank 1"));
  gate_.StopComputing(0);
  EXPECT_THAT(Turns(), IsEmpty());
  gate_.StopComputing(0);
  EXPECT_THAT(Turns(), ElementsAre("rank 0"));
}

// Of what else is computed from its rank, no other updates are waited for.
TEST_F(GateTurns, OfARankThatHasMoreWaitForTheUpdatesThatItSupersedes) {
  gate_.BeginStep();
  for (int i = 0; i < 3; ++i) gate_.StartComputing(0);
  gate_.Supersede(0);
  gate_.Supersede(0);
  Enter("rank 0", Admission::kSupersede, 0);
  Enter("rank 1", Admission::kSupersede, 1);
  EXPECT_THAT(Turns(), ElementsAre("rank 1"));
  gate_.StopSuperseded(0);
  EXPECT_THAT(Turns(), IsEmpty());
  gate_.StopSuperseded(0);
  EXPECT_THAT(Turns(), ElementsAre("rank 0"));
}

TEST_F(GateTurns, OfARankThatHasMoreWaitForAClearing) {
  gate_.BeginStep();
  gate_.StartComputing(0);
  gate_.Supersede(0);
  Enter("more", Admission::kSupersede, 0);
  gate_.StartClearing();
  gate_.StopSuperseded(0);
  gate_.StopComputing(0);
  EXPECT_THAT(Turns(), IsEmpty());
  gate_.FinishClearing();
  EXPECT_THAT(Turns(), ElementsAre("more"));
}

TEST_F(GateTurns, OfAClearingWaitForAllThatIsUnderWay) {
  gate_.BeginStep();
  gate_.StartAdding(1);
  gate_.StartComputing(0);
  gate_.StartComputing(1);
  gate_.Seal();
  gate_.StartDeciding();
  gate_.StartClearing();
  Enter("cleared", Admission::kFinishClear);
  gate_.StopAdding(1);
  EXPECT_THAT(Turns(), IsEmpty());
  gate_.StopComputing(0);
  EXPECT_THAT(Turns(), IsEmpty());
  gate_.StopComputing(1);
  EXPECT_THAT(Turns(), IsEmpty()) << "the decision's task is still under way";
  gate_.EndDeciding();
  EXPECT_THAT(Turns(), ElementsAre("cleared"));
}

TEST_F(GateTurns, OfReadersLetADecisionPassThatWaitsForOthers) {
  gate_.BeginStep();
  gate_.StartReading();
  gate_.Seal();
  EXPECT_EQ(gate_.Ask(Admission::kDecide), Answer::kWaits);
  Enter("reader", Admission::kRead);
  EXPECT_THAT(Turns(), IsEmpty());
  gate_.StopReading();
  ASSERT_EQ(gate_.Ask(Admission::kDecide), Answer::kGranted);
  gate_.StartDeciding();
  EXPECT_THAT(Turns(), IsEmpty()) << "the decision comes first";
  gate_.Decide();
  gate_.Commit();
  EXPECT_THAT(Turns(), ElementsAre("reader"));
}

TEST_F(GateTurns, MayChangeWhatTheOthersAreAnswered) {
  gate_.BeginStep();
  gate_.StartAdding(0);
  gate_.StartClearing();
  Enter("attach", Admission::kAttach);
  gate_.Enter(Admission::kFinishClear, -1, [this](std::optional<Answer>) {
    turns_.push_back("cleared");
    gate_.FinishClearing();
    gate_.StartLoading();
  });
  EXPECT_THAT(Turns(), IsEmpty());
  gate_.StopAdding(0);
  // The attaching asked first, and is answered by what the clearing made of the job.
  EXPECT_THAT(Turns(), ElementsAre("cleared", "attach refused"));
}

TEST_F(GateTurns, OfALoadWaitForReaders) {
  gate_.StartReading();
  gate_.StartLoading();
  Enter("load", Admission::kReplaceState);
  EXPECT_THAT(Turns(), IsEmpty());
  gate_.StopReading();
  EXPECT_THAT(Turns(), ElementsAre("load"));
  gate_.FinishLoading(/*torn=*/true);
  Enter("snapshot", Admission::kSnapshot);
  Enter("load", Admission::kLoad);
  EXPECT_THAT(Turns(), ElementsAre("snapshot refused", "load"));
}

using GateDeathTest = testing::Test;

TEST_F(GateDeathTest, AMoveFromTheWrongPhaseEndsTheProcess) {
  const std::vector<std::function<void(Gate&)>> wrong = {
      [](Gate& gate) { gate.Seal(); },
      [](Gate& gate) { gate.StartDeciding(); },
      [](Gate& gate) { gate.Decide(); },
      [](Gate& gate) { gate.Commit(); },
      [](Gate& gate) { gate.EndDeciding(); },
      [](Gate& gate) { gate.FinishClearing(); },
      [](Gate& gate) { gate.StopReading(); },
      [](Gate& gate) { gate.StopAdding(0); },
      [](Gate& gate) { gate.StopComputing(0); },
      [](Gate& gate) { gate.StopSuperseded(0); },
      [](Gate& gate) { gate.FinishLoading(false); }};
  for (const auto& move : wrong) {
    EXPECT_DEATH(
        {
          Gate gate(1, /*follows=*/false);
          move(gate);
        },
        "internal error");
  }
}

}  // namespace
}  // namespace ballast
