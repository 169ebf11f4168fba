// Steps of a job with several members that are taken back: the last one is undone, or a lost one is
// skipped. All members do it, whichever links are cut and whoever dies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/cpu_optimizer_service/job/members/cluster.h"
#include "tests/support/messages.h"
#include "tests/support/sanitizers.h"

namespace ballast::member_undo_test {
namespace {

constexpr int kRanks = 4;

JobSpec Spec() {
  JobSpec spec = MakeJobSpec({.group_sizes = {{1000, 24, 3000}, {700, 1, 2000}},
                              .world_size = kRanks,
                              .bucket_elements = 2048,
                              .chunk_elements = 512});
  spec.groups[1].hyper_parameters.amsgrad = true;
  return spec;
}
JobSpec Undoes(UpdateMode mode = UpdateMode::kWait) {
  JobSpec spec = Spec();
  spec.keep_previous = true;
  spec.update_mode = mode;
  return spec;
}
JobSpec Skips() {
  JobSpec spec = Spec();
  spec.on_abort = OnAbort::kSkip;
  return spec;
}

const std::vector<std::vector<int>>& Homes() {
  static const auto& homes =
      *new std::vector<std::vector<int>>{{0, 0, 1, 1}, {1, 0, 0, 2}, {0, 1, 2, 3}};
  return homes;
}

StepSettings Settings(uint64_t step) {
  StepSettings settings;
  settings.overrides[0].lr = 1e-3 * static_cast<double>(step);
  settings.trainer_state = "after " + std::to_string(step);
  return settings;
}

void GiveAll(OneHost& one, uint64_t seed) {
  one->BeginAll();
  one->SendAll(seed, 0, /*final=*/true);
  one->EndMicroStepAll(0);
}

void AttachAll(Cluster& cluster) {
  for (int rank = 0; rank < kRanks; ++rank) cluster.home(rank).Attach(rank);
}

void ExpectAllAt(Cluster& cluster, uint64_t step, const Generation& generation) {
  for (int m = 0; m < cluster.members(); ++m) {
    const JobStatus status = cluster.job(m).Status();
    EXPECT_EQ(status.committed_step, step);
    EXPECT_EQ(status.generation, generation);
    EXPECT_EQ(status.undoable_step, 0u);
  }
}

// ---------------------------------------------------------------- undo

TEST(MemberUndo, GoesBackAtAllMembers) {
  for (const UpdateMode mode : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
    for (const std::vector<int>& homes : Homes()) {
      for (const bool applied : {true, false}) {
        SCOPED_TRACE(testing::PrintToString(homes));
        OneHost one(Undoes(mode));
        one->Step(10, 2, Settings(1));
        const auto begun = Cluster::Begun(Undoes(mode), homes);
        Cluster& cluster = *begun;
        cluster.Step(1, 10, 2, Settings(1));
        cluster.Step(2, 555, 2, Settings(99), {.apply = applied});
        for (int m = 0; m < cluster.members(); ++m) {
          if (m == cluster.lead()) continue;
          EXPECT_EQ(ReasonOf(cluster.job(m).UndoStep().status()), reason::kOtherMemberLeads);
        }
        Job& lead = cluster.job(cluster.lead());
        EXPECT_EQ(lead.UndoStep().value(), 2u);
        for (int rank = 0; rank < kRanks; ++rank) {
          cluster.home(rank).listener(rank).WaitForCommitOrDetach(3);
          EXPECT_EQ(ReasonOf(cluster.home(rank).listener(rank).detached()),
                    reason::kOlderGeneration);
        }
        AttachAll(cluster);
        ExpectAllAt(cluster, 1, Generation(2));
        cluster.ExpectStateOf(one->job());
        for (int m = 0; m < cluster.members(); ++m) {
          const JobStatus status = cluster.job(m).Status();
          EXPECT_EQ(status.trainer_state, "after 1");
          EXPECT_EQ(status.hyper_parameters[0].lr, 1e-3);
          EXPECT_EQ(status.recent_steps.back().outcome.step, 1u);
        }
        EXPECT_TRUE(absl::IsFailedPrecondition(lead.UndoStep().status())) << "only one";
        one->Step(20, 2, Settings(2));
        cluster.Step(2, 20, 2, Settings(2));
        cluster.ExpectStateOf(one->job());
      }
    }
  }
}

TEST(MemberUndo, IsRefusedOnceARankOfAnyMemberHasBegunTheNextStep) {
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto begun = Cluster::Begun(Undoes(), {0, 1, 2, 2});
    Cluster& cluster = *begun;
    cluster.Step(1, 10);
    ASSERT_EQ(cluster.home(rank).stream(rank).BeginStep(2, {}), absl::OkStatus());
    cluster.AwaitWords();
    EXPECT_TRUE(absl::IsFailedPrecondition(cluster.job(0).UndoStep().status()));
    ASSERT_EQ(cluster.job(0).AbortStep().value(), 2u);
    EXPECT_EQ(cluster.job(0).UndoStep().value(), 1u);
    AttachAll(cluster);
    ExpectAllAt(cluster, 0, Generation(3));
  }
}

// Its words are of the state from before: what a member reads in place it reads to the end.
TEST(MemberUndo, WaitsAtEachMemberForItsReaders) {
  const auto begun = Cluster::Begun(Undoes(), {0, 1, 2, 2});
  Cluster& cluster = *begun;
  std::atomic<bool> ended = false;
  std::vector<std::thread> readers;
  for (int m = 0; m < cluster.members(); ++m) {
    readers.emplace_back([&, &job = cluster.job(m)] {
      while (!ended) EXPECT_NE(job.StateHash(), "");
    });
  }
  for (int turn = 0; turn < 5; ++turn) {
    cluster.Step(1, turn, 1);
    EXPECT_EQ(cluster.job(0).UndoStep().value(), 1u);
    AttachAll(cluster);
  }
  ended = true;
  for (std::thread& reader : readers) reader.join();
  OneHost one(Undoes());
  cluster.ExpectStateOf(one->job());
}

TEST(MemberUndo, ReachesMembersOverLinksThatAreCut) {
  OneHost one(Undoes());
  std::mt19937 random(8);
  for (uint32_t seed = 0; seed < uint32_t{Repeats(30)}; ++seed) {
    const auto begun = Cluster::Begun(Undoes(), Homes()[seed % Homes().size()], seed);
    Cluster& cluster = *begun;
    std::optional<Cuts> cuts(std::in_place, cluster, random());
    for (uint64_t turn = 1; turn <= 3; ++turn) {
      cluster.Step(1, 100 * turn);
      // Some member may not have heard of the decision that is undone. Where one has no link, its ranks
      // may have begun the next step.
      absl::StatusOr<uint64_t> undone = absl::UnavailableError("");
      while (absl::IsUnavailable(undone.status())) {
        undone = cluster.job(cluster.lead()).UndoStep();
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      EXPECT_EQ(undone.value(), 1u);
      AttachAll(cluster);
      ExpectAllAt(cluster, 0, Generation(1 + turn));
    }
    cuts.reset();
    cluster.ExpectStateOf(one->job());
  }
}

TEST(MemberUndo, IsNotDoneWhileAMemberHasNoLink) {
  const auto begun = Cluster::Begun(Undoes(), {0, 1, 2, 2});
  Cluster& cluster = *begun;
  cluster.Step(1, 10);
  cluster.AwaitWords();
  cluster.Unlink(2);
  EXPECT_TRUE(absl::IsUnavailable(cluster.job(0).UndoStep().status()));
  cluster.Cut(2);
  cluster.AwaitWords();
  EXPECT_EQ(cluster.job(0).UndoStep().value(), 1u);
}

// A member whose link is cut hears neither of the decision nor of its end.
TEST(MemberUndo, IsOfAStepThatAMemberHasNotHeardOf) {
  OneHost one(Undoes());
  one->Step(10);
  const auto begun = Cluster::Begun(Undoes(), {0, 1, 0, 1});
  Cluster& cluster = *begun;
  cluster.Step(1, 10);
  cluster.Give(20);
  for (const int rank : {1, 3, 0}) {
    EXPECT_EQ(cluster.home(rank).SealWith(rank, 1, StepVote()), std::nullopt);
  }
  // The other member has reported.
  while (cluster.job(1).Status().phase != JobPhase::kVoting) std::this_thread::yield();
  cluster.AwaitWords();
  cluster.wires().Hold(true);
  EXPECT_EQ(cluster.home(2).SealWith(2, 1, StepVote()), std::nullopt);
  cluster.home(2).listener(2).WaitForCommit(2);
  EXPECT_EQ(cluster.job(0).UndoStep({.step = 2, .generation = 1}).value(), 2u);
  // The decision is lost with the link, and so is the undo.
  cluster.Unlink(1);
  cluster.wires().Hold(false);
  EXPECT_EQ(cluster.job(1).Status().committed_step, 1u);
  EXPECT_EQ(cluster.job(1).Status().generation, Generation(1));
  cluster.Cut(1);
  AttachAll(cluster);
  ExpectAllAt(cluster, 1, Generation(2));
  cluster.ExpectStateOf(one->job());
  one->Step(30);
  cluster.Step(2, 30);
  cluster.ExpectStateOf(one->job());
}

// Whichever process dies at whichever store. The call that names its step is repeated.
TEST(MemberUndo, IsDoneWhoeverDies) {
  if (!histories::CanDie()) GTEST_SKIP() << "threads cannot be stopped here";
  OneHost one(Undoes());
  one->Step(10);
  std::mt19937 random(5);
  int deaths_seen = 0;
  for (int turn = 0; turn < Repeats(60); ++turn) {
    const int victim = turn % 3;
    SCOPED_TRACE(turn);
    histories::Deaths deaths;
    const auto cluster = Cluster::Begun(Undoes(), {0, 1, 2, 0}, turn, &deaths, victim);
    cluster->Step(1, 10);
    cluster->Step(2, 91);
    deaths.Arm(1 + static_cast<int>(random() % 12), static_cast<int>(random() % 10));
    const auto is_undone = [&] {
      for (int m = 0; m < cluster->members(); ++m) {
        if (cluster->job(m).Status().committed_step != 1) return false;
      }
      return true;
    };
    ASSERT_NO_FATAL_FAILURE(cluster->UntilOver(
        is_undone,
        [&](Cluster::Answered answered) {
          (void)cluster->job(0).UndoStep(
              {.step = 2, .generation = 1},
              [answered](const absl::StatusOr<uint64_t>& undone) { answered(undone.status()); });
        },
        deaths_seen));
    EXPECT_EQ(cluster->job(0).UndoStep({.step = 2, .generation = 1}).value(), 2u);
    AttachAll(*cluster);
    ExpectAllAt(*cluster, 1, Generation(2));
    cluster->ExpectStateOf(one->job());
  }
  if (!kSanitized) EXPECT_GE(deaths_seen, 20);
}

// ---------------------------------------------------------------- skips

// By a new process of a rank, or an abort at any member.
TEST(MemberSkips, AreOfAllMembersOnceAllHaveBegun) {
  OneHost one(Skips());
  one->Step(10);
  GiveAll(one, 77);
  ASSERT_EQ(one->job().AbortStep().value(), 2u);
  one->Step(20);
  for (const std::vector<int>& homes : Homes()) {
    for (int by = 0; by < kRanks; ++by) {
      for (const bool aborts : {false, true}) {
        SCOPED_TRACE(testing::PrintToString(homes) + std::to_string(by));
        const auto begun = Cluster::Begun(Skips(), homes);
        Cluster& cluster = *begun;
        cluster.Step(1, 10);
        cluster.Give(77);
        for (int rank = 0; rank < kRanks; ++rank) {
          if (rank == by) continue;
          EXPECT_EQ(cluster.home(rank).SealWith(rank, 1, std::nullopt), std::nullopt);
        }
        cluster.AwaitWords();
        if (aborts) {
          EXPECT_EQ(cluster.home(by).job().AbortStep().value(), 2u);
        } else {
          const auto attached = cluster.home(by).job().Attach({.rank = by, .process_id = "other"});
          ASSERT_TRUE(attached.ok()) << attached.status();
          EXPECT_EQ(attached->committed_step, 2u);
          cluster.home(by).Attach(by, "other");
        }
        for (int rank = 0; rank < kRanks; ++rank) {
          if (rank == by && !aborts) continue;
          RecordingListener& listener = cluster.home(rank).listener(rank);
          listener.WaitForCommitOrDetach(2);
          EXPECT_EQ(listener.detached(), absl::OkStatus());
          EXPECT_EQ(listener.outcomes().back().skip_cause, SkipCause::kNotKept);
        }
        cluster.Step(3, 20);
        cluster.ExpectStateOf(one->job());
        for (int m = 0; m < cluster.members(); ++m) {
          EXPECT_EQ(cluster.job(m).Status().generation, Generation(1));
        }
      }
    }
  }
}

TEST(MemberSkips, AreNoneWhereSomeRankHasNotBegun) {
  OneHost one(Skips());
  one->Step(10);
  for (int not_begun = 0; not_begun < kRanks; ++not_begun) {
    const auto begun = Cluster::Begun(Skips(), {0, 1, 2, 1});
    Cluster& cluster = *begun;
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == not_begun) continue;
      ASSERT_EQ(cluster.home(rank).stream(rank).BeginStep(1, {}), absl::OkStatus());
    }
    cluster.AwaitWords();
    ASSERT_EQ(cluster.job(0).AbortStep().value(), 1u);
    for (int rank = 0; rank < kRanks; ++rank) {
      cluster.home(rank).listener(rank).WaitForCommitOrDetach(1);
    }
    AttachAll(cluster);
    cluster.Step(1, 10);
    cluster.ExpectStateOf(one->job());
    ExpectAllAt(cluster, 1, Generation(2));
  }
}

// A rank has begun the step, although another one has discarded its attempt meanwhile.
TEST(MemberSkips, AreOfStepsThatARankHasBegunInADiscardedAttempt) {
  const auto begun = Cluster::Begun(Skips(), {0, 0, 1, 1});
  Cluster& cluster = *begun;
  for (const int rank : {0, 1, 2}) {
    ASSERT_EQ(cluster.home(rank).stream(rank).BeginStep(1, {}), absl::OkStatus());
  }
  ASSERT_EQ(cluster.home(0).stream(0).Discard(1).status(), absl::OkStatus());
  ASSERT_EQ(cluster.home(0).stream(0).BeginStep({1, 1}, {}), absl::OkStatus());
  cluster.AwaitWords();
  ASSERT_EQ(cluster.home(3).stream(3).BeginStep(1, {}), absl::OkStatus());
  cluster.AwaitWords();
  ASSERT_EQ(cluster.job(0).AbortStep().value(), 1u);
  for (int rank = 0; rank < kRanks; ++rank) {
    cluster.home(rank).listener(rank).WaitForCommitOrDetach(1);
  }
  ExpectAllAt(cluster, 1, Generation(1));
}

TEST(MemberSkips, ReachMembersOverLinksThatAreCut) {
  OneHost one(Skips());
  one->Step(10);
  std::mt19937 random(9);
  for (uint32_t seed = 0; seed < uint32_t{Repeats(30)}; ++seed) {
    const auto begun = Cluster::Begun(Skips(), Homes()[seed % Homes().size()], seed);
    Cluster& cluster = *begun;
    cluster.Give(77);
    cluster.AwaitWords();
    std::optional<Cuts> cuts(std::in_place, cluster, random());
    // Where a link is cut just then, the lead does not know that all have begun.
    ASSERT_EQ(cluster.job(cluster.lead()).AbortStep().value(), 1u);
    for (int rank = 0; rank < kRanks; ++rank) {
      cluster.home(rank).listener(rank).WaitForCommitOrDetach(1);
    }
    const bool skipped = cluster.job(cluster.lead()).Status().committed_step == 1;
    if (!skipped) AttachAll(cluster);
    cluster.Step(skipped ? 2 : 1, 10);
    cuts.reset();
    if (!skipped) {
      cluster.ExpectStateOf(one->job());
    } else {
      OneHost skips(Skips());
      GiveAll(skips, 77);
      ASSERT_EQ(skips->job().AbortStep().value(), 1u);
      skips->Step(10);
      cluster.ExpectStateOf(skips->job());
    }
  }
}

// The step is skipped at all members, or begins anew at all.
TEST(MemberSkips, AreOfAllWhoeverDies) {
  if (!histories::CanDie()) GTEST_SKIP() << "threads cannot be stopped here";
  OneHost anew(Skips());
  anew->Step(10);
  OneHost skipped(Skips());
  GiveAll(skipped, 77);
  ASSERT_EQ(skipped->job().AbortStep().value(), 1u);
  skipped->Step(10);
  std::mt19937 random(5);
  int deaths_seen = 0;
  int skips_seen = 0;
  for (int turn = 0; turn < Repeats(60); ++turn) {
    const int victim = turn % 3;
    SCOPED_TRACE(turn);
    histories::Deaths deaths;
    const auto cluster = Cluster::Begun(Skips(), {0, 1, 2, 0}, turn, &deaths, victim);
    cluster->Give(77);
    cluster->AwaitWords();
    deaths.Arm(1 + static_cast<int>(random() % 12), static_cast<int>(random() % 10));
    const auto is_over = [&] {
      const JobStatus first = cluster->job(0).Status();
      for (int m = 0; m < cluster->members(); ++m) {
        const JobStatus status = cluster->job(m).Status();
        if (status.phase != JobPhase::kReady || status.committed_step != first.committed_step ||
            status.generation != first.generation) {
          return false;
        }
      }
      return first.committed_step == 1 || first.generation > Generation(1);
    };
    ASSERT_NO_FATAL_FAILURE(cluster->UntilOver(
        is_over,
        [&](Cluster::Answered answered) {
          (void)cluster->job(0).AbortStep(
              [answered](const absl::StatusOr<uint64_t>& ended) { answered(ended.status()); });
        },
        deaths_seen));
    AttachAll(*cluster);
    const uint64_t next = cluster->job(0).Status().committed_step + 1;
    cluster->Step(next, 10);
    skips_seen += next == 2 ? 1 : 0;
    cluster->ExpectStateOf(next == 2 ? skipped->job() : anew->job());
  }
  if (!kSanitized) EXPECT_GE(deaths_seen, 20);
  if (!kSanitized) EXPECT_GE(skips_seen, 10);
}

}  // namespace
}  // namespace ballast::member_undo_test
