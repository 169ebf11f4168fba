// A job over several members against the same job on one host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <future>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/cpu_optimizer_service/job/members/cluster.h"
#include "tests/support/messages.h"
#include "tests/support/sanitizers.h"

namespace ballast {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr int kRanks = 4;

// Buckets cut parameters, and with them blocks of the norm, anywhere among ranks.
JobSpec Buckets() {
  JobSpec spec = MakeJobSpec({.group_sizes = {{1000, 24, 3000}, {700, 1, 2000}},
                              .world_size = kRanks,
                              .bucket_elements = 2048,
                              .chunk_elements = 512});
  spec.groups[1].hyper_parameters.weight_decay = 0.3;
  return spec;
}

JobSpec Mesh() {
  JobSpec spec = Buckets();
  spec.layout.partitions.clear();
  spec.layout.mesh = {{"shards", kRanks}};
  for (ParameterSpec& parameter : spec.layout.parameters) parameter.placements = {{0}};
  return spec;
}

const std::vector<std::vector<int>>& Homes() {
  static const auto& homes = *new std::vector<std::vector<int>>{
      {0, 0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1}, {1, 0, 0, 2}, {0, 1, 2, 3}, {3, 1, 0, 2}};
  return homes;
}

// For what is played by every rank at several points.
const std::vector<std::vector<int>>& FewHomes() {
  static const auto& homes =
      *new std::vector<std::vector<int>>{{0, 0, 1, 1}, {1, 0, 0, 2}, {0, 1, 2, 3}};
  return homes;
}

// Without votes: none; all but the rank after `by`; all.
void SealSome(Cluster& cluster, int by, int when) {
  for (int rank = 0; rank < kRanks && when > 0; ++rank) {
    const bool seals = rank != (by + 1) % kRanks || when == 2;
    if (seals) EXPECT_EQ(cluster.home(rank).SealWith(rank, 1, std::nullopt), std::nullopt);
  }
}

void ExpectSame(const StepOutcome& came, const StepOutcome& expected) {
  EXPECT_EQ(came.step, expected.step);
  EXPECT_EQ(came.decision.apply, expected.decision.apply);
  EXPECT_TRUE(came.decision.norm == expected.decision.norm ||
              (std::isnan(came.decision.norm) && std::isnan(expected.decision.norm)));
  EXPECT_EQ(came.decision.clip_coefficient, expected.decision.clip_coefficient);
  EXPECT_EQ(came.decision.multipliers, expected.decision.multipliers);
  EXPECT_EQ(came.skip_reason, expected.skip_reason);
  EXPECT_EQ(came.skip_cause, expected.skip_cause);
  EXPECT_EQ(came.unused_parameters, expected.unused_parameters);
}

TEST(JobMembers, HaveTheBitsOfOneHostForAnyHomesOfRanks) {
  for (const bool mesh : {false, true}) {
    for (const UpdateMode mode : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
      JobSpec spec = mesh ? Mesh() : Buckets();
      spec.update_mode = mode;
      OneHost one(spec);
      std::vector<StepOutcome> expected;
      const StepVote clips = {.clipping = {.max_norm = 0.5}};
      one->SetVote(clips);
      for (uint64_t step = 1; step <= 4; ++step) expected.push_back(one->Step(10 * step, 2));
      for (const std::vector<int>& homes : Homes()) {
        SCOPED_TRACE(testing::PrintToString(homes));
        const auto begun = Cluster::Begun(spec, homes);
        Cluster& cluster = *begun;
        for (uint64_t step = 1; step <= 4; ++step) {
          ExpectSame(cluster.Step(step, 10 * step, 2, {.expected_clipping = clips.clipping}, clips),
                     expected[step - 1]);
        }
        cluster.ExpectStateOf(one->job());
      }
    }
  }
}

// A non-finite gradient, a scale that makes the state overflow: trials (eps 0) and their reasons.
TEST(JobMembers, SkipForTheReasonOfOneHost) {
  JobSpec spec = Mesh();
  for (GroupSpec& group : spec.groups) group.hyper_parameters.eps = 0;
  OneHost one(spec);
  const float inf = std::numeric_limits<float>::infinity();
  const auto give = [&](JobDriver& each, float value, const StepSettings& settings) {
    each.BeginAll(settings);
    each.SendAllWith(value, 1, 1500, 7, 0);
    each.EndMicroStepAll(0);
  };
  const StepSettings huge = {.scale = {.loss_scale = 1e-37}};
  give(*one, inf, {});
  one->SealAll(1);
  give(*one, 1, huge);
  one->SealAll(1);
  one->Step(3);
  const std::vector<StepOutcome> expected = one->listener(0).outcomes();
  ASSERT_EQ(expected[0].skip_cause, SkipCause::kGradient);
  ASSERT_EQ(expected[1].skip_cause, SkipCause::kState);
  ASSERT_TRUE(expected[2].decision.apply);
  for (const std::vector<int>& homes : Homes()) {
    SCOPED_TRACE(testing::PrintToString(homes));
    const auto begun = Cluster::Begun(spec, homes);
    Cluster& cluster = *begun;
    cluster.ForAll([&](JobDriver& each) { give(each, inf, {}); });
    cluster.Seal(1, StepVote());
    ExpectSame(cluster.AwaitCommit(1), expected[0]);
    cluster.ForAll([&](JobDriver& each) { give(each, 1, huge); });
    cluster.Seal(1, StepVote());
    ExpectSame(cluster.AwaitCommit(2), expected[1]);
    ExpectSame(cluster.Step(3, 3), expected[2]);
    cluster.ExpectStateOf(one->job());
  }
}

TEST(JobMembers, VoteAfterTheNormOfAll) {
  OneHost one(Buckets());
  one->BeginAll();
  one->SendAll(5, 0);
  one->EndMicroStepAll(0);
  const StepNorm expected = one->SealToLook(1);
  const StepVote vote = {.clipping = {.max_norm = expected.norm / 2}};
  one->VoteAll(vote);
  for (const std::vector<int>& homes : Homes()) {
    SCOPED_TRACE(testing::PrintToString(homes));
    const auto begun = Cluster::Begun(Buckets(), homes);
    Cluster& cluster = *begun;
    cluster.Give(5);
    cluster.Seal(1, std::nullopt);
    for (int rank = 0; rank < kRanks; ++rank) {
      RecordingListener& listener = cluster.home(rank).listener(rank);
      listener.WaitForNorm(1);
      EXPECT_EQ(listener.norms().back().norm, expected.norm);
      EXPECT_EQ(listener.norms().back().group_norms, expected.group_norms);
    }
    // One votes otherwise first. Those that are told vote again: the ranks of its home, or all where
    // it has a home alone.
    for (int rank = 0; rank < kRanks; ++rank) {
      cluster.home(rank).Vote(rank, rank == 2 ? StepVote{.apply = false} : vote);
    }
    const bool is_alone = std::ranges::count(homes, homes[2]) == 1;
    for (int rank = 0; rank < kRanks; ++rank) {
      if (!is_alone && homes[rank] != homes[2]) continue;
      RecordingListener& listener = cluster.home(rank).listener(rank);
      listener.WaitForVoteRefusals(1);
      EXPECT_EQ(ReasonOf(listener.vote_refusals().back()), reason::kVoteAgain);
    }
    for (int rank = 0; rank < kRanks; ++rank) cluster.home(rank).Vote(rank, vote);
    ExpectSame(cluster.AwaitCommit(1), one->listener(0).outcomes().back());
    cluster.ExpectStateOf(one->job());
  }
}

// All ranks have voted, rank 2 otherwise than the others, and have heard that.
void VoteAndBeRefused(Cluster& cluster) {
  cluster.Give(5);
  cluster.Seal(1, std::nullopt);
  for (int rank = 0; rank < kRanks; ++rank) cluster.home(rank).listener(rank).WaitForNorm(1);
  for (int rank = 0; rank < kRanks; ++rank) {
    cluster.home(rank).Vote(rank, rank == 2 ? StepVote{.apply = false} : StepVote());
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    cluster.home(rank).listener(rank).WaitForVoteRefusals(1);
  }
}

// A reopened stream brings the refused vote, in its seal and behind it, and then the rank's next one.
TEST(JobMembers, ARefusedVoteMayComeOnceMore) {
  OneHost one(Buckets());
  one->Step(5);
  for (const std::vector<int>& homes : {std::vector<int>{0, 0, 0, 0}, {0, 0, 1, 0}}) {
    SCOPED_TRACE(testing::PrintToString(homes));
    const auto begun = Cluster::Begun(Buckets(), homes);
    Cluster& cluster = *begun;
    VoteAndBeRefused(cluster);
    const StepVote other = {.apply = false};
    RankStream& stream = cluster.home(2).stream(2);
    EXPECT_EQ(stream.Seal(1, 1, other, /*refusals_heard=*/0).value(), std::nullopt);
    EXPECT_EQ(stream.Vote(1, other, /*refusals_heard=*/0), absl::OkStatus());
    EXPECT_EQ(stream.Vote(1, StepVote(), /*refusals_heard=*/1), absl::OkStatus());
    for (const int rank : {0, 1, 3}) cluster.home(rank).Vote(rank, StepVote());
    ExpectSame(cluster.AwaitCommit(1), one->listener(0).outcomes().back());
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_THAT(cluster.home(rank).listener(rank).vote_refusals(), testing::SizeIs(1));
    }
    cluster.ExpectStateOf(one->job());
  }
}

// Refusals of an older stream do not count.
TEST(JobMembers, AVoteCountsOnAStreamThatWasToldNoRefusal) {
  const auto begun = Cluster::Begun(Buckets(), {0, 0, 1, 0});
  Cluster& cluster = *begun;
  VoteAndBeRefused(cluster);
  for (const int rank : {1, 2}) {
    cluster.home(rank).Reopen(rank);
    EXPECT_EQ(cluster.home(rank).stream(rank).Vote(1, StepVote(), /*refusals_heard=*/0),
              absl::OkStatus());
  }
  for (const int rank : {0, 3}) cluster.home(rank).Vote(rank, StepVote());
  EXPECT_TRUE(cluster.AwaitCommit(1).decision.apply);
}

// Each rank of each member, before its seal and after it, before the norm and after it.
TEST(JobMembers, ADiscardByOneRankIsFollowedByAll) {
  OneHost one(Buckets());
  one->Step(5);
  for (const std::vector<int>& homes : FewHomes()) {
    for (int by = 0; by < kRanks; ++by) {
      for (const int when : {0, 1, 2}) {
        SCOPED_TRACE(testing::PrintToString(homes) + std::to_string(by) + std::to_string(when));
        const auto begun = Cluster::Begun(Buckets(), homes);
        Cluster& cluster = *begun;
        cluster.Give(77);
        SealSome(cluster, by, when);
        if (when == 2) cluster.home(by).listener(by).WaitForNorm(1);
        for (int i = 0; i < kRanks; ++i) {
          const int rank = (by + i) % kRanks;
          ASSERT_TRUE(cluster.home(rank).Discard(rank));
        }
        ExpectSame(cluster.Step(1, 5), one->listener(0).outcomes().back());
        cluster.ExpectStateOf(one->job());
      }
    }
  }
}

// The want, and behind it the report of the attempt, come on a new link. Others are faster than the
// member whose rank discards.
TEST(JobMembers, AReportDoesNotCountForTheAttemptAfterIt) {
  OneHost one(Buckets());
  one->Step(5);
  const auto begun = Cluster::Begun(Buckets(), {0, 0, 1, 1});
  Cluster& cluster = *begun;
  JobDriver& asking = cluster.member(1);
  cluster.Give(77);
  for (const int rank : {2, 3}) EXPECT_EQ(asking.SealWith(rank, 1, StepVote()), std::nullopt);
  while (asking.job().Status().phase != JobPhase::kVoting) std::this_thread::yield();
  cluster.wires().Hold(true);
  std::promise<bool> discarded;
  (void)asking.stream(3).Discard(
      1, [&](absl::StatusOr<bool> done) { discarded.set_value(done.value()); });
  cluster.Cut(1);
  cluster.wires().Hold(false);
  ASSERT_TRUE(discarded.get_future().get());
  asking.SetAttempt(3, {1, 1});
  const auto redo = [&](JobDriver& home, int rank) {
    if (home.at(rank).attempt == 0) ASSERT_TRUE(home.Discard(rank));
    home.Begin(rank);
    home.SendOf(rank, 5, 0);
    home.EndMicroStep(rank, 0);
    EXPECT_EQ(home.SealWith(rank, 1, StepVote()), std::nullopt);
  };
  for (const int rank : {0, 1}) redo(cluster.home(rank), rank);
  while (cluster.member(0).job().Status().phase != JobPhase::kVoting) std::this_thread::yield();
  for (const int rank : {2, 3}) redo(asking, rank);
  ExpectSame(cluster.AwaitCommit(1), one->listener(0).outcomes().back());
  cluster.ExpectStateOf(one->job());
}

TEST(JobMembers, WhatIsUnusedIsSoByTheRanksOfAll) {
  JobSpec spec = Buckets();
  spec.unused_policy = UnusedPolicy::kSkip;
  // Parameter 0 is used by rank 3 alone, parameter 4 by none.
  const auto used = [](int rank) {
    return UsedParameters{
        .all = false,
        .parameters = rank == 3 ? std::vector<int>{0, 1, 2, 3, 5} : std::vector<int>{1, 2, 3, 5}};
  };
  const auto give = [&](JobDriver& each, bool at_4) {
    each.BeginAll();
    for (int chunk = 0; chunk < static_cast<int>(each.layout().chunks().size()); ++chunk) {
      std::vector<float> values = each.Values(chunk, 9);
      each.layout().VisitPieces(chunk, [&](const ChunkPiece& piece) {
        if (piece.parameter == 4 && !at_4) {
          std::fill_n(values.begin() + piece.chunk_offset, piece.elements, 0.0f);
        }
      });
      ASSERT_TRUE(each.Send(chunk, values, 0).ok());
    }
    for (const int rank : each.layout().ranks()) each.EndMicroStep(rank, 0, used(rank));
  };
  OneHost one(spec);
  give(*one, false);
  one->SealAll(1);
  const StepOutcome expected = one->listener(0).outcomes().back();
  ASSERT_THAT(expected.unused_parameters, ElementsAre("p4"));
  for (const std::vector<int>& homes : Homes()) {
    SCOPED_TRACE(testing::PrintToString(homes));
    const auto begun = Cluster::Begun(spec, homes);
    Cluster& cluster = *begun;
    cluster.ForAll([&](JobDriver& each) { give(each, false); });
    cluster.Seal(1, StepVote());
    ExpectSame(cluster.AwaitCommit(1), expected);
    cluster.ExpectStateOf(one->job());
    // The member that has its gradient finds it.
    cluster.ForAll([&](JobDriver& each) { give(each, true); });
    std::optional<SealRefusal> at_once;
    for (int rank = 0; rank < kRanks; ++rank) {
      at_once = cluster.home(rank).SealWith(rank, 1, StepVote());
    }
    if (cluster.members() == 1) {
      ASSERT_TRUE(at_once.has_value());
      continue;
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      cluster.home(rank).listener(rank).WaitForRefusals(1);
      EXPECT_EQ(ReasonOf(cluster.home(rank).listener(rank).refusals().back()),
                reason::kAbortAndRedo);
    }
  }
}

TEST(JobMembers, SealTheSameNumberOfMicroSteps) {
  const auto begun = Cluster::Begun(Buckets(), {0, 0, 1, 1});
  Cluster& cluster = *begun;
  cluster.ForAll([](JobDriver& each) { each.BeginAll(); });
  for (int rank = 0; rank < kRanks; ++rank) {
    JobDriver& home = cluster.home(rank);
    for (uint32_t m = 0; m < (rank < 2 ? 1u : 2u); ++m) {
      home.SendOf(rank, 4 + m, m);
      home.EndMicroStep(rank, m);
    }
    EXPECT_EQ(home.SealWith(rank, rank < 2 ? 1 : 2, StepVote()), std::nullopt);
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    cluster.home(rank).listener(rank).WaitForRefusals(1);
    EXPECT_EQ(ReasonOf(cluster.home(rank).listener(rank).refusals().back()),
              reason::kSendAndSealAgain);
  }
  // Those that were behind send it; the others seal again.
  for (const int rank : {0, 1}) {
    cluster.home(rank).SendOf(rank, 5, 1);
    cluster.home(rank).EndMicroStep(rank, 1);
  }
  cluster.Seal(2, StepVote());
  OneHost one(Buckets());
  one->Step(4, 2);
  ExpectSame(cluster.AwaitCommit(1), one->listener(0).outcomes().back());
  cluster.ExpectStateOf(one->job());
}

// One begins before its member is told, the other after it.
TEST(JobMembers, BeginWithTheSameSettings) {
  const auto begun = Cluster::Begun(Buckets(), {0, 0, 1, 1});
  Cluster& cluster = *begun;
  cluster.member(0).BeginAll();
  const StepSettings other = {.scale = {.loss_scale = 2}};
  cluster.home(2).Begin(2, other);
  RecordingListener& told = cluster.home(2).listener(2);
  told.WaitForCommitOrDetach(1);
  EXPECT_TRUE(
      Refused(told.detached(), absl::StatusCode::kFailedPrecondition, reason::kOtherSettings));
  EXPECT_TRUE(Refused(cluster.home(3).stream(3).BeginStep(1, other),
                      absl::StatusCode::kFailedPrecondition, reason::kOtherSettings));
  EXPECT_TRUE(cluster.home(0).listener(0).detached().ok());
}

// Wherever it has its home, and however far the step is: every rank begins it anew.
TEST(JobMembers, ANewProcessOfARankRaisesTheGenerationOfAll) {
  OneHost one(Buckets());
  one->Step(3);
  one->Step(5);
  for (const std::vector<int>& homes : FewHomes()) {
    for (int by = 0; by < kRanks; ++by) {
      for (const int when : {0, 1, 2}) {
        SCOPED_TRACE(testing::PrintToString(homes) + std::to_string(by) + std::to_string(when));
        const auto begun = Cluster::Begun(Buckets(), homes);
        Cluster& cluster = *begun;
        cluster.Step(1, 3);
        cluster.Give(77);
        SealSome(cluster, by, when);
        const auto attached = cluster.home(by).job().Attach({.rank = by, .process_id = "other"});
        ASSERT_TRUE(attached.ok()) << attached.status();
        EXPECT_EQ(attached->generation, Generation(2));
        EXPECT_EQ(attached->committed_step, 1u);
        for (int rank = 0; rank < kRanks; ++rank) {
          RecordingListener& listener = cluster.home(rank).listener(rank);
          listener.WaitForCommitOrDetach(2);
          EXPECT_EQ(ReasonOf(listener.detached()), reason::kOlderGeneration);
        }
        for (int rank = 0; rank < kRanks; ++rank) {
          cluster.home(rank).Attach(rank, rank == by ? "other" : "");
        }
        cluster.ForAll(
            [](JobDriver& each) { EXPECT_EQ(each.job().Status().generation, Generation(2)); });
        ExpectSame(cluster.Step(2, 5), one->listener(0).outcomes().back());
        cluster.ExpectStateOf(one->job());
      }
    }
  }
}

// Whichever member is asked, also where no rank of the lead has begun.
TEST(JobMembers, AnAbortAtOneIsOneOfAll) {
  OneHost one(Buckets());
  one->Step(5);
  for (const std::vector<int>& homes : Homes()) {
    for (const bool lead_is_idle : {false, true}) {
      const int count = 1 + *std::max_element(homes.begin(), homes.end());
      for (int asked = 0; asked < count; ++asked) {
        SCOPED_TRACE(testing::PrintToString(homes) + std::to_string(asked));
        const auto begun = Cluster::Begun(Buckets(), homes);
        Cluster& cluster = *begun;
        if (lead_is_idle && (count == 1 || asked != cluster.lead())) continue;
        for (int m = 0; m < count; ++m) {
          if (lead_is_idle && m == cluster.lead()) continue;
          cluster.member(m).BeginAll();
          cluster.member(m).SendAll(77, 0);
        }
        if (lead_is_idle) cluster.AwaitWords();
        EXPECT_EQ(cluster.member(asked).job().AbortStep().value(), 1u);
        for (int rank = 0; rank < kRanks; ++rank) {
          cluster.home(rank).listener(rank).WaitForCommitOrDetach(1);
          cluster.home(rank).Attach(rank);
        }
        ExpectSame(cluster.Step(1, 5), one->listener(0).outcomes().back());
        cluster.ExpectStateOf(one->job());
      }
    }
  }
}

// At any instant of a step, links end with what is on them.
TEST(JobMembers, GoOnWhereLinksWereCutAtAnyInstant) {
  const StepVote clips = {.clipping = {.max_norm = 0.5}};
  OneHost one(Buckets());
  one->SetVote(clips);
  for (uint64_t step = 1; step <= 3; ++step) one->Step(10 * step, 2);
  std::mt19937 random(6);
  for (uint32_t seed = 0; seed < uint32_t{Repeats(20)}; ++seed) {
    const auto begun = Cluster::Begun(Buckets(), Homes()[1 + seed % 5], seed);
    Cluster& cluster = *begun;
    std::optional<Cuts> cuts(std::in_place, cluster, random());
    std::vector<StepOutcome> outcomes;
    for (uint64_t step = 1; step <= 3; ++step) {
      outcomes.push_back(
          cluster.Step(step, 10 * step, 2, {.expected_clipping = clips.clipping}, clips));
    }
    cuts.reset();
    const std::vector<StepOutcome> expected = one->listener(0).outcomes();
    for (size_t i = 0; i < outcomes.size(); ++i) ExpectSame(outcomes[i], expected[i]);
    cluster.ExpectStateOf(one->job());
  }
}

// An operator changes a group at the lead, between steps and during one.
TEST(JobMembers, ChangeHyperParametersWithTheLead) {
  for (const UpdateMode mode : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
    JobSpec spec = Buckets();
    spec.update_mode = mode;
    OneHost one(spec);
    const auto begun = Cluster::Begun(spec, {1, 0, 0, 2});
    Cluster& cluster = *begun;
    Job& lead = cluster.job(cluster.lead());
    EXPECT_EQ(ReasonOf(cluster.job(0).UpdateGroup(0, {.lr = 0.5}).status()),
              reason::kOtherMemberLeads);
    for (uint64_t step = 1; step <= 3; ++step) {
      const HyperParameterOverrides between = {.lr = 0.01 * static_cast<double>(step)};
      ASSERT_TRUE(one->job().UpdateGroup(0, between).ok());
      ASSERT_TRUE(lead.UpdateGroup(0, between).ok());
      const HyperParameterOverrides during = {.weight_decay = 0.1 * static_cast<double>(step)};
      one->BeginAll();
      one->SendAll(10 * step, 0, true);
      one->EndMicroStepAll(0);
      ASSERT_TRUE(one->job().UpdateGroup(1, during).ok());
      cluster.Give(10 * step);
      ASSERT_TRUE(lead.UpdateGroup(1, during).ok());
      for (int rank = 0; rank < kRanks; ++rank) {
        EXPECT_EQ(one->SealWith(rank, 1, StepVote()), std::nullopt);
      }
      cluster.Seal(1, StepVote());
      one->listener(0).WaitForCommit(step);
      cluster.AwaitCommit(step);
    }
    cluster.ExpectStateOf(one->job());
    cluster.ForAll([&](JobDriver& each) {
      EXPECT_EQ(each.job().Status().hyper_parameters, one->job().Status().hyper_parameters);
    });
  }
}

TEST(JobMembers, SayWhomAStepWaitsFor) {
  const auto begun = Cluster::Begun(Buckets(), {1, 0, 0, 2});
  Cluster& cluster = *begun;
  cluster.Give(10);
  cluster.Unlink(0);
  for (const int rank : {0, 3}) {
    EXPECT_EQ(cluster.home(rank).SealWith(rank, 1, StepVote()), std::nullopt);
  }
  const JobStatus status = [&] {
    JobStatus now = cluster.job(1).Status();
    // Until the sums are there it works on its own part.
    while (now.phase != JobPhase::kVoting || now.waits_for.empty()) now = cluster.job(1).Status();
    return now;
  }();
  EXPECT_THAT(status.waits_for, testing::HasSubstr("host0"));
  EXPECT_FALSE(status.members[0].is_linked);
  EXPECT_TRUE(status.members[2].is_linked);
  EXPECT_EQ(status.member, 1);
  EXPECT_TRUE(status.members[0].waited_for);
  EXPECT_FALSE(status.members[2].waited_for);
  for (int member = 0; member < 3; ++member) {
    EXPECT_EQ(status.members[member].memory_bytes,
              cluster.job(member).Status().memory.total_bytes());
  }
  EXPECT_TRUE(cluster.job(1).SecondsSinceFirstSeal().has_value());
  cluster.AwaitWords();
  cluster.job(1).TellWaiting();
  cluster.AwaitWords();
  for (const int rank : {0, 3}) {
    EXPECT_THAT(cluster.home(rank).listener(rank).waiting(), ElementsAre(1, 2)) << rank;
  }
  // A member that has no link knows that of itself.
  for (const int rank : {1, 2}) {
    EXPECT_EQ(cluster.home(rank).SealWith(rank, 1, StepVote()), std::nullopt);
  }
  while (cluster.job(0).Status().waits_for.empty()) std::this_thread::yield();
  cluster.job(0).TellWaiting();
  EXPECT_THAT(cluster.home(1).listener(1).waiting(), ElementsAre(0));
  cluster.Cut(0);
  cluster.AwaitCommit(1);
  EXPECT_EQ(cluster.job(1).Status().waits_for, "");
}

}  // namespace
}  // namespace ballast
