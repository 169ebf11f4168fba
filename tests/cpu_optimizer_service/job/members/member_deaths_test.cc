// Members whose processes die at any of their stores, the lead's included: the next process and the
// others go on, and the job has the bits of one host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/cpu_optimizer_service/job/members/cluster.h"
#include "tests/support/sanitizers.h"

namespace ballast::member_deaths_test {
namespace {

constexpr int kRanks = 4;
constexpr uint64_t kSteps = 3;
constexpr uint32_t kMicroSteps = 2;

JobSpec Spec() {
  return MakeJobSpec({.group_sizes = {{1000, 24, 3000}, {700, 1, 2000}},
                      .world_size = kRanks,
                      .bucket_elements = 2048,
                      .chunk_elements = 512});
}

const StepVote& Vote() {
  static const auto& vote = *new StepVote{.clipping = {.max_norm = 0.5}};
  return vote;
}

class MemberDeaths : public testing::Test {
 protected:
  // All ranks until the step is committed. They look at the norm first, or not.
  void Step(Cluster& cluster, histories::Deaths& deaths, int victim, uint64_t step, bool looks) {
    std::vector<bool> given(kRanks, false);
    std::vector<bool> voted(kRanks, !looks);
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    for (;;) {
      ASSERT_LT(std::chrono::steady_clock::now(), limit) << cluster.Describe();
      if (deaths.Hide()) {
        ++deaths_;
        cluster.TakeOver();
        for (const int rank : cluster.member(victim).layout().ranks()) {
          cluster.member(victim).Attach(rank, "", UpdateMode::kWait, nullptr,
                                        cluster.job(victim).Status().generation);
          given[rank] = false;
          voted[rank] = !looks;
        }
      }
      bool committed = true;
      for (int m = 0; m < cluster.members(); ++m) {
        committed = committed && cluster.job(m).Status().committed_step >= step;
      }
      if (committed) return;
      deaths.Expose();
      for (int rank = 0; rank < kRanks; ++rank) {
        JobDriver& home = cluster.home(rank);
        if (home.job().Status().committed_step >= step) continue;
        if (!given[rank]) given[rank] = Give(home, rank, step, looks);
        if (given[rank] && !voted[rank] && !home.listener(rank).norms().empty() &&
            home.listener(rank).norms().back().step == step) {
          voted[rank] = home.stream(rank).Vote(step, Vote()).ok();
        }
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  // Whether its seal was taken.
  static bool Give(JobDriver& home, int rank, uint64_t step, bool looks) {
    RankStream& stream = home.stream(rank);
    // As a client: what has arrived is not sent again.
    const RankPosition& position = stream.position();
    const bool begun = position.open_step == step;
    std::map<int, uint32_t> delivered;
    for (const auto& each : position.delivered) {
      if (begun) delivered[each.chunk] = each.next_micro_step;
    }
    bool ok = begun || stream.BeginStep(step, {.expected_clipping = Vote().clipping}).ok();
    for (uint32_t m = 0; m < kMicroSteps && ok; ++m) {
      for (const int chunk : home.layout().chunks_of_rank(rank)) {
        if (delivered[chunk] > m) continue;
        const auto bytes = home.Encode(chunk, home.Values(chunk, 10 * step + m));
        const absl::Span<const std::byte> piece(bytes);
        ok = ok && stream
                       .Contribute({.step = step,
                                    .chunk = chunk,
                                    .micro_step_begin = m,
                                    .micro_step_end = m + 1,
                                    .final = m + 1 == kMicroSteps,
                                    .payload = {&piece, 1}})
                       .ok();
      }
      if (begun && position.micro_steps_ended > m) continue;
      ok = ok && stream.EndMicroStep(step, m, {}).ok();
    }
    if (!ok) return false;
    const auto sealed =
        stream.Seal(step, kMicroSteps, looks ? std::nullopt : std::optional(Vote()));
    return sealed.ok() && !sealed->has_value();
  }

  int deaths_ = 0;
};

TEST_F(MemberDeaths, LeaveTheBitsOfOneHost) {
  if (!histories::CanDie()) GTEST_SKIP() << "threads cannot be stopped here";
  Engine engine({.memory_limit_bytes = int64_t{256} << 20, .threads = 2});
  JobDriver one(engine, Spec());
  one.UploadWeights();
  one.AttachAll();
  one.SetVote(Vote());
  for (uint64_t step = 1; step <= kSteps; ++step) one.Step(10 * step, kMicroSteps);
  const std::vector<std::vector<int>> homes = {
      {0, 0, 1, 1}, {0, 1, 0, 1}, {1, 0, 0, 2}, {0, 1, 2, 3}};
  std::mt19937 random(12);
  constexpr int kTurns = Repeats(120);
  for (int turn = 0; turn < kTurns; ++turn) {
    SCOPED_TRACE(turn);
    const std::vector<int>& of_ranks = homes[random() % homes.size()];
    const int victim = of_ranks[random() % kRanks];
    histories::Deaths deaths;
    const auto begun = Cluster::Begun(Spec(), of_ranks, turn, &deaths, victim);
    Cluster& cluster = *begun;
    deaths.Arm(1 + static_cast<int>(random() % 150), static_cast<int>(random() % 40));
    for (uint64_t step = 1; step <= kSteps; ++step) {
      Step(cluster, deaths, victim, step, /*looks=*/turn % 2 == 0);
      ASSERT_FALSE(HasFatalFailure());
    }
    deaths.Disarm();
    for (int m = 0; m < cluster.members(); ++m) {
      EXPECT_EQ(cluster.job(m).Status().generation, Generation(1)) << "no step was lost";
      const auto steps = cluster.job(m).Status().recent_steps;
      EXPECT_EQ(steps.back().outcome.decision.norm,
                one.listener(0).outcomes().back().decision.norm);
    }
    cluster.ExpectStateOf(one.job());
  }
  EXPECT_GE(deaths_, kTurns / 2);
}

// A begin of an attempt that a rank of another member has discarded counts for nothing, and is kept
// as such.
TEST_F(MemberDeaths, KeepWhatRanksSayBehindADiscardOfAnotherMember) {
  if (!histories::CanDie()) GTEST_SKIP() << "threads cannot be stopped here";
  for (const bool first_is_live : {false, true}) {
    histories::Deaths deaths;
    const auto begun = Cluster::Begun(Spec(), {0, 1, 1, 0}, 1, &deaths, /*victim=*/1);
    Cluster& cluster = *begun;
    const auto begin = [&](int rank, double loss_scale) {
      StepSettings settings;
      settings.scale.loss_scale = loss_scale;
      EXPECT_EQ(cluster.home(rank).stream(rank).BeginStep(1, settings), absl::OkStatus());
    };
    if (first_is_live) begin(1, 1);
    begin(0, 1);
    EXPECT_EQ(cluster.home(0).stream(0).Discard(1).status(), absl::OkStatus());
    cluster.AwaitWords();
    if (!first_is_live) begin(1, 1);
    begin(2, 2);
    deaths.Arm(1, 0);
    deaths.Expose();
    EXPECT_EQ(cluster.home(1).stream(1).EndMicroStep(1, 0, {}), absl::OkStatus());
    ASSERT_TRUE(deaths.Hide());
    cluster.TakeOver();
    cluster.AwaitWords();
    const JobStatus status = cluster.job(1).Status();
    EXPECT_EQ(status.generation, Generation(1)) << "the step is lost";
    EXPECT_TRUE(status.ranks[1].begun);
    EXPECT_TRUE(status.ranks[2].begun);
  }
}

}  // namespace
}  // namespace ballast::member_deaths_test
