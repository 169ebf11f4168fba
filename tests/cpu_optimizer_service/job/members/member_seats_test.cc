// How a job with several members comes to be, and how it ends: on all of them or none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/cpu_optimizer_service/job/members/cluster.h"
#include "tests/support/sanitizers.h"

namespace ballast::member_seats_test {
namespace {

using testing::IsEmpty;

constexpr int kRanks = 4;

JobSpec Spec(int64_t elements = 3000) {
  return MakeJobSpec({.group_sizes = {{1000, 24, elements}, {700, 1, 2000}},
                      .world_size = kRanks,
                      .bucket_elements = 2048,
                      .chunk_elements = 512});
}

void ExpectNothingAt(Engine& engine) {
  EXPECT_THAT(engine.ListJobs(), IsEmpty());
  EXPECT_EQ(engine.memory().used_bytes(), 0);
}

// What is closed or given up may be freed by a thread that comes to its end.
void AwaitNothingAt(Engine& engine) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (engine.memory().used_bytes() > 0 && std::chrono::steady_clock::now() < limit) {
    std::this_thread::yield();
  }
  ExpectNothingAt(engine);
}

// ---------------------------------------------------------------- creation

TEST(MemberSeats, AreOfAllOrNone) {
  for (const std::vector<int>& homes : std::vector<std::vector<int>>{{0, 1, 1, 2}, {2, 0, 1, 1}}) {
    for (int short_one = 0; short_one < 3; ++short_one) {
      Cluster cluster(Spec(1'000'000), homes);
      const auto used =
          cluster.engine(short_one).Reserve(int64_t{252} << 20, "another job").value();
      const absl::Status created = cluster.Create();
      EXPECT_TRUE(absl::IsResourceExhausted(created)) << created;
      for (int m = 0; m < 3; ++m) {
        EXPECT_THAT(std::string(created.message()), testing::HasSubstr("host" + std::to_string(m)));
        if (m != short_one) AwaitNothingAt(cluster.engine(m));
      }
    }
    Cluster cluster(Spec(1'000'000), homes);
    EXPECT_EQ(cluster.Create(), absl::OkStatus());
  }
}

TEST(MemberSeats, AreNotTakenFromAnotherJob) {
  Cluster cluster(Spec(), {0, 1, 0, 1});
  ASSERT_TRUE(cluster.engine(1).CreateJob(Spec()).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(cluster.Create()));
  AwaitNothingAt(cluster.engine(0));
  ASSERT_EQ(cluster.engine(1).CloseJob(Spec().name), absl::OkStatus());
  EXPECT_EQ(cluster.Create(), absl::OkStatus());
}

// A process dies at a store of the creation. Either all members have the job then, or it can be
// created again.
TEST(MemberSeats, OutliveADeathWhileTheyAreMade) {
  if (!histories::CanDie()) GTEST_SKIP() << "threads cannot be stopped here";
  int found = 0;
  int again = 0;
  for (int turn = 0; turn < Repeats(40); ++turn) {
    SCOPED_TRACE(turn);
    const std::vector<int> homes =
        turn % 4 < 2 ? std::vector<int>{0, 0, 1, 1} : std::vector<int>{1, 0, 2, 2};
    const int lead = homes[0];
    const int victim = turn % 2 == 0 ? lead : homes[3];
    histories::Deaths deaths;
    Cluster cluster(Spec(), homes, turn, &deaths, victim);
    deaths.Arm(1 + turn / 4, 0);
    deaths.Expose();
    std::future<absl::Status> creating = std::async(
        std::launch::async, [&] { return cluster.engine(lead).CreateJob(Spec()).status(); });
    while (creating.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
      if (deaths.flag() != nullptr && *deaths.flag()) break;
    }
    const bool died = deaths.Hide();
    if (!died) {
      (void)creating.get();
      continue;
    }
    cluster.CutOffVictim();
    (void)creating.get();  // By a dead lead, or of a dead member.
    cluster.Restart();
    for (int m = 0; m < cluster.members(); ++m) {
      if (m == victim && m == lead) cluster.engine(m).UseDialer(cluster.dialer(m));
    }
    const bool has_job = cluster.engine(lead).FindJob(Spec().name).ok();
    if (has_job) {
      ++found;
      for (int m = 0; m < cluster.members(); ++m) cluster.Adopt(m);
      if (victim != lead) cluster.Cut(victim);
    } else {
      ++again;
      // The first call may still meet what the dead one has left.
      absl::Status created = cluster.Create();
      for (int i = 0; i < 5 && !created.ok(); ++i) created = cluster.Create();
      ASSERT_EQ(created, absl::OkStatus());
    }
    cluster.ForAll([](JobDriver& each) { each.UploadWeights(); });
    cluster.AwaitWords();
    cluster.ForAll([](JobDriver& each) { each.AttachAll(); });
    cluster.Step(1, 10);
  }
  if (!kSanitized) EXPECT_GT(again, 5);
}

// ---------------------------------------------------------------- first weights

// Ranks are taken anew and bring other weights at any time, links are cut and a process dies: the
// job begins at once everywhere, with what each rank has brought last.
TEST(MemberSeats, BeginWithTheLastFirstWeightsOfEveryRank) {
  const bool dies = histories::CanDie();
  int deaths_seen = 0;
  for (int turn = 0; turn < Repeats(60); ++turn) {
    SCOPED_TRACE(turn);
    std::mt19937 random(turn);
    const std::vector<int> homes =
        turn % 2 == 0 ? std::vector<int>{0, 1, 0, 1} : std::vector<int>{1, 0, 2, 2};
    histories::Deaths deaths;
    const int victim = dies ? homes[random() % kRanks] : -1;
    Cluster cluster(Spec(), homes, turn, &deaths, victim);
    ASSERT_EQ(cluster.Create(), absl::OkStatus());
    if (dies) deaths.Arm(1 + static_cast<int>(random() % 20), 0);
    std::vector<std::set<uint64_t>> brought(kRanks);  // By rank: what its weights may be.
    uint64_t seed = 0;
    // In the end every rank has brought some.
    for (int move = 0; move < 30 || cluster.job(homes[0]).Position().awaiting_weights; ++move) {
      ASSERT_LT(move, 500);
      const int rank = static_cast<int>(random() % kRanks);
      JobDriver& home = cluster.home(rank);
      if (random() % 4 == 0) {
        const int cut = homes[random() % kRanks];
        if (cut != cluster.lead()) cluster.Cut(cut);
      }
      const std::string process = "process" + std::to_string(++seed);
      const auto attached = home.job().Attach({.rank = rank, .process_id = process});
      ASSERT_TRUE(attached.ok()) << attached.status();
      const auto uploader = home.job().BeginFirstWeights(
          {.rank = rank, .process_id = process, .generation = attached->generation}, {});
      ASSERT_TRUE(uploader.ok()) << uploader.status();
      if (dies) deaths.Expose();
      absl::Status written;
      for (const int chunk : home.layout().chunks_of_rank(rank)) {
        if (written.ok()) written = home.Write(chunk, home.Values(chunk, seed), *uploader);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
      const bool died = dies && deaths.Hide();
      if (written.ok() && !(died && homes[rank] == victim)) brought[rank].clear();
      if (written.ok()) brought[rank].insert(seed);
      if (!written.ok()) ASSERT_EQ(ReasonOf(written), reason::kHasWeights) << written;
      if (!died) continue;
      ++deaths_seen;
      cluster.TakeOver();
    }
    deaths.Disarm();
    cluster.AwaitWords();
    for (int m = 0; m < cluster.members(); ++m) {
      ASSERT_FALSE(cluster.job(m).Position().awaiting_weights);
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      JobDriver& home = cluster.home(rank);
      std::vector<int> all(Spec().layout.parameters.size());
      std::iota(all.begin(), all.end(), 0);
      const Snapshot state = home.job().TakeSnapshot(all).value();
      std::set<uint64_t> possible = brought[rank];
      for (const int chunk : home.layout().chunks_of_rank(rank)) {
        for (auto it = possible.begin(); it != possible.end();) {
          const std::vector<float> expected = home.Values(chunk, *it);
          bool is_it = true;
          home.layout().VisitPieces(chunk, [&](const ChunkPiece& piece) {
            std::vector<float> values(piece.elements);
            state.Read(piece.parameter, Plane::kMaster, piece.parameter_offset,
                       absl::MakeSpan(values));
            is_it = is_it &&
                    std::equal(values.begin(), values.end(), expected.begin() + piece.chunk_offset);
          });
          it = is_it ? std::next(it) : possible.erase(it);
        }
      }
      EXPECT_EQ(possible.size(), 1u) << "rank " << rank;
    }
    // Each process is another one than before, which raises the generation.
    for (int i = 0; i < 2; ++i) cluster.ForAll([](JobDriver& each) { each.AttachAll(); });
    cluster.Step(1, 10);
  }
  if (dies && !kSanitized) EXPECT_GT(deaths_seen, 20);
}

TEST(MemberSeats, BeginWithOneState) {
  Cluster cluster(Spec(), {0, 0, 1, 1});
  ASSERT_EQ(cluster.Create(), absl::OkStatus());
  const FirstState state = {
      .step = 5, .update_counts = std::vector<int64_t>(Spec().layout.parameters.size(), 4)};
  const auto bring = [&](const FirstState& of_first, const FirstState& of_second) {
    for (int rank = 0; rank < kRanks; ++rank) {
      cluster.home(rank).Attach(rank);
      ASSERT_EQ(cluster.home(rank).UploadState(rank < 2 ? of_first : of_second, rank),
                absl::OkStatus());
    }
    cluster.AwaitWords();
  };
  bring(state, {});
  cluster.ForAll([](JobDriver& each) {
    const JobStatus status = each.job().Status();
    EXPECT_EQ(status.phase, JobPhase::kBroken);
    for (const int rank : each.layout().ranks()) {
      EXPECT_TRUE(absl::IsFailedPrecondition(each.listener(rank).detached()));
    }
  });
  bring(state, state);
  cluster.ForAll([](JobDriver& each) {
    EXPECT_EQ(each.job().Status().phase, JobPhase::kReady);
    EXPECT_EQ(each.job().Position().committed_step, 5u);
  });
  cluster.Step(6, 10);
}

// Of a member whose ranks own nothing no weights come.
TEST(MemberSeats, BeginWithoutWeightsOfAMemberThatHasNone) {
  const JobSpec spec = MakeJobSpec({.group_sizes = {{100}}, .world_size = kRanks});
  for (const std::vector<int>& homes : std::vector<std::vector<int>>{{0, 1, 1, 1}, {0, 1, 2, 2}}) {
    Cluster cluster(spec, homes);
    ASSERT_EQ(cluster.Create(), absl::OkStatus());
    cluster.AwaitWords();
    EXPECT_TRUE(cluster.job(1).Position().awaiting_weights);
    const FirstState state = {.step = 5, .update_counts = {4}};
    for (int rank = 0; rank < kRanks; ++rank) cluster.home(rank).Attach(rank);
    ASSERT_EQ(cluster.home(0).UploadState(state, 0), absl::OkStatus());
    cluster.AwaitWords();
    cluster.ForAll([](JobDriver& each) { EXPECT_EQ(each.job().Position().committed_step, 5u); });
    cluster.Step(6, 10);
    cluster.ForAll([](JobDriver& each) {
      EXPECT_EQ(each.job().Status().update_counts, std::vector<int64_t>{5});
    });
  }
}

// ---------------------------------------------------------------- closing

TEST(MemberSeats, AreAllClosedByTheLead) {
  const auto begun = Cluster::Begun(Spec(), {1, 0, 2, 2});
  Cluster& cluster = *begun;
  cluster.Step(1, 10);
  EXPECT_EQ(ReasonOf(cluster.engine(0).CloseJob(Spec().name)), reason::kOtherMemberLeads);
  cluster.Forget();
  EXPECT_EQ(cluster.engine(1).CloseJob(Spec().name), absl::OkStatus());
  for (int m = 0; m < 3; ++m) AwaitNothingAt(cluster.engine(m));
  EXPECT_EQ(cluster.Create(), absl::OkStatus());
}

TEST(MemberSeats, AreClosedHereAlone) {
  const auto begun = Cluster::Begun(Spec(), {1, 0, 2, 2});
  Cluster& cluster = *begun;
  const std::shared_ptr<Job> part = cluster.engine(0).FindJob(Spec().name).value();
  EXPECT_TRUE(Await<bool>([&](Done<bool> done) {
                cluster.engine(0).CloseJob(part, std::move(done), /*here=*/true);
              }).ok());
  EXPECT_THAT(cluster.engine(0).ListJobs(), IsEmpty());
  EXPECT_EQ(cluster.engine(1).ListJobs().size(), 1u);
  EXPECT_EQ(cluster.engine(2).ListJobs().size(), 1u);
}

// A member that cannot be reached is waited for, also by the lead's next process.
TEST(MemberSeats, AreClosedWhereALinkIsCut) {
  int deaths_seen = 0;
  for (int store = 0; store < 8; ++store) {  // 0: the lead lives.
    if (store > 0 && !histories::CanDie()) continue;
    SCOPED_TRACE(store);
    histories::Deaths deaths;
    const auto begun = Cluster::Begun(Spec(), {1, 0, 2, 2}, 1, &deaths, store > 0 ? 1 : -1);
    Cluster& cluster = *begun;
    cluster.Unlink(0);
    cluster.Forget();
    std::promise<absl::Status> closed;
    if (store > 0) deaths.Arm(store, 0);
    deaths.Expose();
    cluster.engine(1).CloseJob(
        cluster.engine(1).FindJob(Spec().name).value(),
        [&](const absl::StatusOr<bool>& done) { closed.set_value(done.status()); });
    cluster.AwaitWords();
    if (deaths.Hide()) {
      ++deaths_seen;
      cluster.CutOffVictim();
      cluster.Restart();
      cluster.engine(1).UseDialer(cluster.dialer(1));
      // It died before it had decided to.
      (void)cluster.engine(1).CloseJob(Spec().name);
    } else {
      AwaitNothingAt(cluster.engine(2));
      EXPECT_EQ(cluster.engine(0).ListJobs().size(), 1u);
      EXPECT_TRUE(absl::IsUnavailable(cluster.engine(1).CreateJob(Spec()).status()));
      cluster.Cut(0);
      EXPECT_EQ(closed.get_future().get(), absl::OkStatus());
    }
    for (int m = 0; m < 3; ++m) {
      SCOPED_TRACE(m);
      AwaitNothingAt(cluster.engine(m));
    }
  }
  EXPECT_TRUE(!histories::CanDie() || deaths_seen > 2);
}

// Its caller does not wait any longer; the job is closed all the same.
TEST(MemberSeats, AreClosedAlsoIfNobodyWaitsForThat) {
  const auto begun = Cluster::Begun(Spec(), {1, 0, 2, 2});
  Cluster& cluster = *begun;
  cluster.Unlink(0);
  cluster.Forget();
  absl::Status told;
  Pending closing =
      cluster.engine(1).CloseJob(cluster.engine(1).FindJob(Spec().name).value(),
                                 [&](const absl::StatusOr<bool>& done) { told = done.status(); });
  closing.Cancel();
  EXPECT_TRUE(absl::IsCancelled(told)) << told;
  cluster.Cut(0);
  for (int m = 0; m < 3; ++m) {
    if (m != 1) AwaitNothingAt(cluster.engine(m));
  }
}

// ---------------------------------------------------------------- links

class NoWords : public WordSink<MemberWord> {
 public:
  void Send(MemberWord /*word*/) override {}
};

// An address may have become another service's since the job was created.
TEST(MemberSeats, AreNotFollowedElsewhere) {
  const auto begun = Cluster::Begun(Spec(), {1, 0, 2, 2});
  Cluster& cluster = *begun;
  const auto follow = [&](int at, const Follow& as, const std::string& principal = "") {
    return cluster.engine(at).FollowLead(as, principal, std::make_shared<NoWords>()).status();
  };
  const Follow of_2 = cluster.job(1).FollowOf(2);
  EXPECT_TRUE(absl::IsUnavailable(follow(0, of_2)));
  EXPECT_TRUE(absl::IsUnavailable(follow(1, of_2)));
  EXPECT_TRUE(absl::IsPermissionDenied(follow(2, of_2, "another")));
  Follow other = of_2;
  other.spec.homes = {1, 0, 0, 2};
  EXPECT_TRUE(absl::IsUnavailable(follow(2, other)));
  cluster.Step(1, 10);
}

}  // namespace
}  // namespace ballast::member_seats_test
