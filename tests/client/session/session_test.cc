// One suite for the session on every transport, against a real service.
#include "client/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/connect.h"
#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/reason.h"
#include "tests/client/job_for_tests.h"
#include "tests/client/session/rank_for_tests.h"
#include "tests/client/session/reference_run.h"
#include "tests/support/messages.h"
#include "tests/support/service_for_tests.h"

namespace ballast::client {
namespace {

std::string NameOf(const std::tuple<Way, Traffic>& way) {
  return Name(std::get<Way>(way)) + Name(std::get<Traffic>(way));
}

class SessionTest : public testing::TestWithParam<std::tuple<Way, Traffic>> {
 protected:
  // Ranks in threads; each is joined once before `body` is called.
  void Train(const JobSpec& job, const std::function<void(RankForTests&, int rank)>& body) {
    ForEachRank(job.layout.world_size, [&](int rank) {
      auto self = Join(job, rank);
      ASSERT_TRUE(self.ok()) << self.status();
      body(**self, rank);
    });
  }

  absl::StatusOr<std::unique_ptr<RankForTests>> Join(const JobSpec& job, int rank,
                                                     SessionOptions options = {}) {
    return RankForTests::Join(service_.NewChannel(), job, rank, std::move(options),
                              std::get<Traffic>(GetParam()));
  }

  ServiceForTests service_{std::get<Way>(GetParam()),
                           {.seal_deadline_seconds = 0.05, .seal_reminder_seconds = 0.05}};
};

TEST_P(SessionTest, WeightsAreThoseOfTheReferenceForEveryWorldSize) {
  constexpr uint32_t kMicroSteps = 2;
  constexpr uint64_t kSteps = 3;
  for (int world_size : {1, 2, 3}) {
    const JobSpec job = SmallJob("world-" + std::to_string(world_size), world_size);
    const StepSettings settings{.scale = {.loss_scale = 4, .divisors = {8, 16}}};
    Train(job, [&](RankForTests& self, int rank) {
      ReferenceRun reference(job);
      EXPECT_EQ(self.Difference(reference), "");  // The first weights.
      for (uint64_t step = 1; step <= kSteps; ++step) {
        const auto decision = self.Step(kMicroSteps, settings);
        ASSERT_TRUE(decision.ok()) << decision.status();
        const Decision expected = reference.Step(step, kMicroSteps, settings.scale);
        EXPECT_EQ(decision->step, step);
        EXPECT_TRUE(decision->applied);
        EXPECT_EQ(decision->norm, expected.norm);
        EXPECT_EQ(decision->clip_coefficient, expected.clip_coefficient);
        EXPECT_EQ(self.Difference(reference), "") << "at step " << step;
        EXPECT_EQ(self.session().committed_step(), step);
      }
      const std::map<int, std::string> received = self.memory();
      EXPECT_TRUE(self.session().ReadWeights().ok());
      EXPECT_EQ(self.memory(), received);
    });
  }
}

TEST_P(SessionTest, SavedStateGoesOnWithAnotherWorldSize) {
  const std::string directory =
      absl::StrCat(testing::TempDir(), "session_test.", NameOf(GetParam()), ".", getpid());
  const JobSpec two = SmallJob("two", 2);
  ReferenceRun reference(two);
  for (uint64_t step = 1; step <= 3; ++step) reference.Step(step, 1, {});
  Train(two, [&](RankForTests& self, int rank) {
    ASSERT_TRUE(self.Step(1, {}).ok());
    ASSERT_TRUE(self.Step(1, {}).ok());
    if (rank != 0) return;
    const absl::Status saved = self.session().SaveCheckpoint(directory);
    ASSERT_TRUE(saved.ok()) << saved;
  });
  const JobSpec three = SmallJob("three", 3);
  Train(three, [&](RankForTests& self, int rank) {});
  {
    auto loader = Join(three, 0);
    ASSERT_TRUE(loader.ok()) << loader.status();
    const absl::Status loaded = (*loader)->session().LoadCheckpoint(directory);
    ASSERT_TRUE(loaded.ok()) << loaded;
    EXPECT_FALSE((*loader)->session().BeginStep({}).ok());
  }
  Train(three, [&](RankForTests& self, int rank) {
    EXPECT_EQ(self.session().committed_step(), 2u);
    ASSERT_TRUE(self.Step(1, {}).ok());
    EXPECT_EQ(self.Difference(reference), "");
  });
  std::filesystem::remove_all(directory);
}

TEST_P(SessionTest, AnUndoneStepIsAsIfItNeverHadBeen) {
  JobSpec job = SmallJob("undone", 2);
  job.keep_previous = true;
  ReferenceRun reference(job);
  reference.Step(1, 1, {});
  std::vector<std::unique_ptr<RankForTests>> ranks(2);
  ForEachRank(2, [&](int rank) {
    ranks[rank] = Join(job, rank).value();
    ASSERT_TRUE(ranks[rank]->Step(1, {}).ok());
    ASSERT_TRUE(ranks[rank]->Step(3, {.scale = {.loss_scale = 0.5}}).ok());
    EXPECT_NE(ranks[rank]->Difference(reference), "");
  });
  const absl::StatusOr<uint64_t> undone = ranks[1]->session().UndoStep();
  ASSERT_TRUE(undone.ok()) << undone.status();
  EXPECT_EQ(*undone, 2u);
  EXPECT_TRUE(absl::IsAborted(ranks[1]->session().BeginStep({})));
  ForEachRank(2, [&](int rank) {
    absl::Status ended;  // Of rank 0 as soon as its stream has brought the news.
    while (ended.ok()) ended = ranks[rank]->session().ReadWeights();
    EXPECT_TRUE(absl::IsAborted(ended)) << ended;
  });
  ranks.clear();
  ReferenceRun again(job);
  again.Step(1, 1, {});
  again.Step(2, 1, {});
  Train(job, [&](RankForTests& self, int rank) {
    EXPECT_EQ(self.session().committed_step(), 1u);
    EXPECT_EQ(self.Difference(reference), "");
    if (rank == 0) {
      EXPECT_TRUE(absl::IsFailedPrecondition(self.session().UndoStep().status()));
    }
    ASSERT_TRUE(self.Step(1, {}).ok());
    EXPECT_EQ(self.Difference(again), "");
  });
}

// The first state once more, after a step: the next one is as if that one had never been.
TEST_P(SessionTest, StateThatAllRanksWriteIsWhatTheyGoOnFrom) {
  const JobSpec job = SmallJob("written", 2);
  StateWrite write = {.planes = {Plane::kMaster, Plane::kExpAvg, Plane::kExpAvgSq}};
  for (size_t p = 0; p < job.layout.parameters.size(); ++p) {
    if (job.layout.parameters[p].trainable) write.parameters.push_back(static_cast<int>(p));
  }
  write.update_counts.assign(write.parameters.size(), 0);
  const auto first_state = [&](RankForTests& self, absl::Duration limit) {
    return self.session().WriteState(write, limit, [&](int chunk, absl::Span<float> out) {
      const Chunk& of = self.session().layout().chunks()[chunk];
      for (int64_t i = 0; i < of.elements; ++i) {
        out[i] = FirstWeight(self.session().layout(), of.group, of.begin + i);
      }
    });
  };
  ForEachRank(2, [&](int rank) {
    auto self = Join(job, rank).value();
    ASSERT_TRUE(self->Step(1, {}).ok());
    const absl::Status written = first_state(*self, absl::Seconds(60));
    ASSERT_TRUE(written.ok()) << written;
    ASSERT_TRUE(self->session().ReadWeights().ok());
    ReferenceRun reference(job);
    EXPECT_EQ(self->Difference(reference), "");
    ASSERT_TRUE(self->Step(1, {}).ok());
    reference.Step(2, 1, {});
    EXPECT_EQ(self->Difference(reference), "");
    if (rank == 1) return;
    const absl::Status alone = first_state(*self, absl::Milliseconds(50));
    EXPECT_TRUE(Refused(alone, absl::StatusCode::kDeadlineExceeded)) << alone;
  });
}

// "new" is no part of the first chunks, which no rank sends.
TEST_P(SessionTest, ADerivedJobGoesOnWithOtherParameters) {
  const JobSpec before = SmallJob("derived", 2);
  JobSpec after = before;
  after.layout.parameters.push_back({.name = "new", .shape = {500}, .group = 0});
  after.layout.partitions =
      PartitionsOf(MakeBuckets(FlatElements(after.layout), 2, 2 * kBlockElements), 2);
  std::atomic<int> sent = 0;
  ForEachRank(2, [&](int rank) {
    auto self = Join(before, rank).value();
    ASSERT_TRUE(self->Step(1, {}).ok());
    SessionOptions options = {
        .job = after, .rank = rank, .derive_from_uid = self->session().job_uid()};
    const auto session = Session::Open(service_.NewChannel(), options).value();
    EXPECT_TRUE(session->awaiting_weights());
    EXPECT_EQ(session->committed_step(), 1u);
    const Layout& layout = session->layout();
    ASSERT_TRUE(session
                    ->UploadWeights([&](int chunk, absl::Span<float> out) {
                      ++sent;
                      bool is_new = false;
                      for (const ChunkPiece& piece : layout.Pieces(chunk)) {
                        is_new |= piece.parameter == 3;
                        // What the job has counts for nothing here.
                        std::fill_n(out.begin() + piece.chunk_offset, piece.elements, 0.5f);
                      }
                      EXPECT_TRUE(is_new);
                    })
                    .ok());
    const absl::Status read = session->ReadWeights();
    ASSERT_TRUE(read.ok()) << read;
    EXPECT_EQ(session->committed_step(), 1u);
    EXPECT_EQ(session->ReadCounts().value().applied_steps, 1u);
    ASSERT_TRUE(session->BeginStep({}).ok());
    EXPECT_FALSE(self->Step(1, {}).ok());  // Its stream ends, now or soon.
  });
  EXPECT_GE(sent, 2);
  EXPECT_LE(sent, 3);
}

TEST_P(SessionTest, AJobDescribedOtherwiseIsRefused) {
  auto self = Join(SmallJob("same", 1), 0);
  ASSERT_TRUE(self.ok()) << self.status();
  JobSpec other = SmallJob("same", 1);
  other.layout.parameters[1].name = "h.0.renamed";
  const absl::Status status = Join(other, 0).status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kFailedPrecondition, reason::kOtherDescription))
      << status;
}

TEST_P(SessionTest, AJobThatDoesNotFitIsRefused) {
  JobSpec job = SmallJob("large", 1);
  job.layout.parameters[0].shape = {1 << 28};
  job.layout.chunk_elements = kMaxChunkElements;
  job.layout.partitions = PartitionsOf(MakeBuckets(FlatElements(job.layout), 1, 1 << 20), 1);
  const absl::Status status = Join(job, 0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
}

TEST_P(SessionTest, ASealThatWaitsTooLongNamesTheRankThatIsMissing) {
  const JobSpec job = SmallJob("slow", 2);
  SessionOptions options;
  options.seal_timeout = absl::Milliseconds(300);
  std::vector<std::unique_ptr<RankForTests>> ranks(2);
  ForEachRank(2, [&](int rank) {
    ranks[rank] = Join(job, rank, options).value();
    ASSERT_TRUE(ranks[rank]->session().BeginStep({}).ok());
    ASSERT_TRUE(ranks[rank]->PushAll(1, [](int, uint32_t) { return true; }).ok());
  });
  // On a busy machine the service may not have read rank 0's own seal by then.
  absl::Status status;
  do {
    status = ranks[0]->session().Seal(1, SmallVote()).status();
    ASSERT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  } while (absl::StrContains(status.message(), "not sealed: rank 0"));
  EXPECT_TRUE(Refused(status, absl::StatusCode::kDeadlineExceeded));
  ForEachRank(2, [&](int rank) {
    Session& session = ranks[rank]->session();
    absl::Status sealed;
    do {
      sealed = session.Seal(1, SmallVote()).status();
    } while (absl::IsDeadlineExceeded(sealed));
    EXPECT_TRUE(sealed.ok()) << sealed;
    absl::Status received;
    do {
      received = session.ReceiveWeights();
    } while (absl::IsDeadlineExceeded(received));
    EXPECT_TRUE(received.ok()) << received;
  });
}

TEST_P(SessionTest, AnEmptyJobDoesNotPassForTheOneThatWasJoined) {
  const JobSpec job = SmallJob("came-back-empty", 1);
  SessionOptions options;
  options.process_id = "p";
  auto rank = Join(job, 0, options).value();
  ASSERT_TRUE(rank->Step(1, {}).ok());
  options.rejoin = true;
  options.job_uid = rank->session().job_uid();
  rank.reset();
  rank = Join(job, 0, options).value();
  EXPECT_EQ(rank->session().committed_step(), 1u);
  rank.reset();
  ASSERT_TRUE(service_.engine().CloseJob(job.name).ok());
  EXPECT_EQ(Join(job, 0, options).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(service_.engine().FindJob(job.name).ok());
  // Another job of its name is not joined either.
  rank = Join(job, 0).value();
  EXPECT_EQ(Join(job, 0, options).status().code(), absl::StatusCode::kNotFound);
}

TEST_P(SessionTest, AServiceThatGoesAwayEndsTheSessionAndReleasesEveryPayload) {
  const JobSpec job = SmallJob("gone", 2);
  SessionOptions options;
  options.reconnect_timeout = absl::Milliseconds(200);  // The service does not come back.
  std::vector<std::unique_ptr<RankForTests>> ranks(2);
  ForEachRank(2, [&](int rank) { ranks[rank] = Join(job, rank, options).value(); });
  std::atomic<int> released = 0;
  const std::vector<std::byte> payload(512);
  ASSERT_TRUE(ranks[0]->session().BeginStep({}).ok());
  const int first = ranks[0]->chunks()[0];
  ASSERT_TRUE(ranks[0]->PushAll(1, [&](int chunk, uint32_t) { return chunk != first; }).ok());
  GradientPush push;
  push.chunk = first;
  push.payload = payload;
  push.released = [&] { ++released; };
  ASSERT_TRUE(ranks[0]->session().Push(push).ok());
  std::thread stopper([&] { service_.server().Shutdown(0); });
  // Rank 1 never seals.
  const absl::Status status = ranks[0]->session().Seal(1, SmallVote()).status();
  stopper.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(ranks[0]->session().Seal(1, SmallVote()).status(), status);
  // Over an in-process channel, a call to a destroyed service would crash.
  EXPECT_EQ(ranks[0]->session().ReadCounts().status(), status);
  ranks.clear();
  EXPECT_EQ(released, 1);
}

// Over payloads and over shared memory, in both update modes: one state.
TEST_P(SessionTest, TheStateIsThatOfEveryOtherTransport) {
  for (const UpdateMode mode : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
    for (const uint32_t micro_steps : {1u, 3u}) {
      JobSpec job = SmallJob("hash", 2);
      job.update_mode = mode;
      job.max_micro_steps = micro_steps;
      std::string of_payloads;
      for (const Traffic traffic : {Traffic::kPayloads, std::get<Traffic>(GetParam())}) {
        job.name = absl::StrCat("hash-", Name(traffic), "-", micro_steps, "-",
                                mode == UpdateMode::kWait ? "wait" : "speculate");
        if (service_.engine().FindJob(job.name).ok()) continue;
        ForEachRank(2, [&](int rank) {
          auto self = RankForTests::Join(service_.NewChannel(), job, rank, {}, traffic).value();
          ReferenceRun reference(job);
          for (uint64_t step = 1; step <= 4; ++step) {
            // Clipped at every other step, so that speculated updates are dropped there.
            const StepSettings settings{.scale = {.loss_scale = step % 2 == 0 ? 1.0 : 1e4}};
            const auto decision = self->Step(micro_steps, settings);
            ASSERT_TRUE(decision.ok()) << decision.status();
            EXPECT_EQ(decision->norm, reference.Step(step, micro_steps, settings.scale).norm);
            EXPECT_EQ(self->Difference(reference), "") << "at step " << step;
          }
        });
        const std::string hash = service_.engine().FindJob(job.name).value()->StateHash();
        if (of_payloads.empty()) of_payloads = hash;
        EXPECT_EQ(hash, of_payloads) << job.name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ways, SessionTest,
    testing::Combine(testing::Values(Way::kTcp, Way::kUnixSocket, Way::kInProcess),
                     testing::Values(Traffic::kPayloads, Traffic::kInPlace, Traffic::kCopied)),
    [](const auto& info) { return NameOf(info.param); });

TEST(Connect, RefusesAtOnceWhatIsNoAddress) {
  for (const char* address : {"", "host", "host:", ":7070", "host:port", "host:70000", "host:0",
                              "::1:7070", "unix:", "unix:relative"}) {
    const absl::Status status = Connect(address, absl::InfiniteDuration()).status();
    EXPECT_TRUE(Refused(status, absl::StatusCode::kInvalidArgument)) << address;
  }
  for (const char* address : {"localhost:7070", "[::1]:7070", "unix:/run/ballast.sock"}) {
    EXPECT_TRUE(CheckAddress(address).ok()) << address;
  }
}

TEST(Connect, RefusesAPathThatNoSocketCanHave) {
  const std::string longest = "unix:/" + std::string(106, 'p');
  EXPECT_TRUE(CheckAddress(longest).ok());
  const absl::Status status = CheckAddress(longest + "p");
  EXPECT_TRUE(Refused(status, absl::StatusCode::kInvalidArgument));
}

TEST(Connect, SaysThatNothingAnswers) {
  const auto channel = Connect("unix:/nonexistent/ballast.sock", absl::Milliseconds(100));
  EXPECT_TRUE(Refused(channel.status(), absl::StatusCode::kUnavailable));
}

}  // namespace
}  // namespace ballast::client
