// First weights that come with their moments: the job goes on from what another optimizer has made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "cpu_optimizer_service/job/job.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

class JobFirstStateTest : public JobDriverTest {
 protected:
  static JobSpec Spec(int world_size, int64_t chunk_elements = 512,
                      const std::string& name = "job") {
    JobSpec spec = MakeJobSpec({.group_sizes = {{700, 24}, {600}},
                                .world_size = world_size,
                                .bucket_elements = 1024,
                                .chunk_elements = chunk_elements},
                               name);
    spec.groups[1].hyper_parameters.amsgrad = true;
    return spec;
  }
  static FirstState At(uint64_t step) {
    return {.step = step, .update_counts = std::vector<int64_t>(3, static_cast<int64_t>(step))};
  }
  static Job::Uploader Begin(JobDriver& driver, int rank, const FirstState& state) {
    return driver.job()
        .BeginFirstWeights({.rank = rank,
                            .process_id = "process" + std::to_string(rank),
                            .generation = driver.job().Status().generation},
                           state)
        .value();
  }
  static JobPhase PhaseOf(JobDriver& driver) { return driver.job().Status().phase; }
};

TEST_F(JobFirstStateTest, GoesOnAsTheJobThatItWasReadFrom) {
  JobDriver source = Make(Spec(2));
  for (const uint64_t seed : {1, 2, 3}) source.Step(seed);
  {
    const Snapshot snapshot = source.job().TakeSnapshot(std::vector<int>{0, 1, 2}).value();
    JobDriver copy(engine_, Spec(1, 256, "copy"));
    copy.AttachAll();
    const Job::Uploader uploader = Begin(
        copy, 0, {.step = snapshot.step(), .update_counts = source.job().Status().update_counts});
    for (int chunk = 0; chunk < static_cast<int>(copy.layout().chunks().size()); ++chunk) {
      EXPECT_EQ(PhaseOf(copy), JobPhase::kAwaitingWeights);
      const Chunk& of = copy.layout().chunks()[chunk];
      std::vector<float> values((of.group == 1 ? 4 : 3) * of.elements, 0.0f);
      for (const ChunkPiece& piece : copy.layout().Pieces(chunk)) {
        for (int plane = 0; plane < (of.group == 1 ? 4 : 3); ++plane) {
          snapshot.Read(piece.parameter, static_cast<Plane>(plane), piece.parameter_offset,
                        absl::MakeSpan(values).subspan(plane * of.elements + piece.chunk_offset,
                                                       piece.elements));
        }
      }
      ASSERT_TRUE(copy.Write(chunk, values, uploader).ok());
    }
  }
  JobDriver copy(engine_.FindJob("copy").value());
  EXPECT_EQ(PhaseOf(copy), JobPhase::kReady);
  EXPECT_EQ(copy.job().Status().committed_step, 3u);
  EXPECT_EQ(copy.job().StateHash(), source.job().StateHash());
  std::vector<std::byte> shard(copy.layout().chunks()[0].elements * sizeof(float));
  EXPECT_TRUE(
      copy.job().ReadShard(copy.job().Status().generation, 3, 0, absl::MakeSpan(shard)).ok());
  copy.AttachAll();
  source.Step(4);
  copy.Step(4);
  EXPECT_EQ(copy.job().Status().committed_step, 4u);
  EXPECT_EQ(copy.job().StateHash(), source.job().StateHash());
}

TEST_F(JobFirstStateTest, IsRefusedWhereNoUpdateLeavesIt) {
  JobDriver driver(engine_, Spec(1));
  driver.AttachAll();
  const Job::Uploader uploader = Begin(driver, 0, At(3));
  const int chunks = static_cast<int>(driver.layout().chunks().size());
  const int last = chunks - 1;  // Of the group with amsgrad; its end is padding.
  const auto elements = [&](int chunk) { return driver.layout().chunks()[chunk].elements; };
  const struct {
    int chunk;
    std::function<void(std::vector<float>&)> spoil;
  } kCases[] = {
      {0, [&](auto& values) { values[5] = NAN; }},
      {0, [&](auto& values) { values[elements(0) + 5] = -HUGE_VALF; }},
      {0, [&](auto& values) { values[2 * elements(0) + 5] = -1e-30f; }},
      {last, [&](auto& values) { values[3 * elements(last)] = -1; }},
      {last, [&](auto& values) { values.back() = 1; }},
      {last, [&](auto& values) { values[2 * elements(last) - 1] = NAN; }},
      {last, [&](auto& values) { values.resize(3 * elements(last)); }},
      {0, [&](auto& values) { values.resize(elements(0)); }},
      {0, [&](auto& values) { values.push_back(0); }},
  };
  for (const auto& test : kCases) {
    std::vector<float> values = driver.StateOf(test.chunk, /*moments=*/true);
    test.spoil(values);
    EXPECT_TRUE(
        Refused(driver.Write(test.chunk, values, uploader), absl::StatusCode::kInvalidArgument));
  }
  // One that is repeated counts once.
  for (const int chunk : {0, 0, 1, 2}) {
    ASSERT_TRUE(driver.Write(chunk, driver.StateOf(chunk, true), uploader).ok());
  }
  EXPECT_EQ(PhaseOf(driver), JobPhase::kAwaitingWeights);
  ASSERT_TRUE(driver.Write(3, driver.StateOf(3, true), uploader).ok());
  EXPECT_EQ(PhaseOf(driver), JobPhase::kReady);
  EXPECT_EQ(driver.Write(3, driver.StateOf(3, true), uploader).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(JobFirstStateTest, CountsThatNoRunHasAreRefused) {
  JobSpec spec = Spec(1);
  spec.layout.parameters.push_back({.name = "frozen", .shape = {4}, .trainable = false});
  JobDriver driver(engine_, spec);
  driver.AttachAll();
  const FirstState kCases[] = {
      {.step = 3, .update_counts = {3, 3, 3}},
      {.step = 3, .update_counts = {3, 3, 4, 0}},
      {.step = 3, .update_counts = {3, -1, 3, 0}},
      {.step = 3, .update_counts = {3, 3, 3, 1}},
      {.step = kMaxFirstStep + 1, .update_counts = {3, 3, 3, 0}},
      {.step = 0, .update_counts = {0, 0, 0, 0}},
  };
  for (const FirstState& state : kCases) {
    EXPECT_TRUE(Refused(driver.UploadState(state, 0), absl::StatusCode::kInvalidArgument));
  }
  EXPECT_EQ(driver.UploadState({.step = 3, .update_counts = {3, 0, 1, 0}}, 0, "nobody").code(),
            absl::StatusCode::kAborted);
  EXPECT_EQ(driver.job().Status().committed_step, 0u);
  EXPECT_TRUE(driver.UploadState({.step = 3, .update_counts = {3, 0, 1, 0}}, 0).ok());
  EXPECT_EQ(driver.job().Status().update_counts, std::vector<int64_t>({3, 0, 1, 0}));
}

TEST_F(JobFirstStateTest, OfAllRanksIsOne) {
  JobDriver driver(engine_, Spec(2));
  driver.AttachAll();
  FirstState other_counts = At(3);
  other_counts.update_counts[1] = 2;
  // Nothing has come yet, so the state of whoever begins last is the job's.
  const Job::Uploader first = Begin(driver, 0, At(5));
  Begin(driver, 1, At(3));
  const int chunk = driver.layout().chunks_of_rank(0)[0];
  EXPECT_TRUE(Refused(driver.Write(chunk, driver.StateOf(chunk, true), first),
                      absl::StatusCode::kFailedPrecondition));
  ASSERT_TRUE(driver.UploadState(At(3), 0).ok());
  // Whoever looks, or attaches, sees none of it before all is there.
  EXPECT_EQ(driver.job().Status().committed_step, 0u);
  EXPECT_THAT(driver.job().Status().update_counts, testing::ElementsAre(0, 0, 0));
  const Attachment attachment = driver.job()
                                    .Attach({.rank = 1,
                                             .process_id = "process1",
                                             .expected_committed_step = 0,
                                             .generation = driver.job().Status().generation})
                                    .value();
  EXPECT_EQ(attachment.committed_step, 0u);
  driver.Reopen(1);
  EXPECT_EQ(driver.stream(1).position().committed_step, 0u);
  for (const FirstState& other : {At(4), other_counts, FirstState()}) {
    EXPECT_TRUE(Refused(driver.UploadState(other, 1), absl::StatusCode::kFailedPrecondition));
  }
  EXPECT_EQ(PhaseOf(driver), JobPhase::kAwaitingWeights);
  ASSERT_TRUE(driver.UploadState(At(3), 1).ok());
  EXPECT_EQ(PhaseOf(driver), JobPhase::kReady);
  EXPECT_EQ(driver.job().Status().committed_step, 3u);
  EXPECT_THAT(driver.job().Status().update_counts, testing::ElementsAre(3, 3, 3));
  driver.Reopen(1);
  EXPECT_EQ(driver.stream(1).position().committed_step, 3u);
  // Of a job that has all there is nothing to begin.
  EXPECT_TRUE(driver.UploadState(At(9), 1).ok());
  EXPECT_EQ(driver.job().Status().committed_step, 3u);
}

TEST_F(JobFirstStateTest, ThatWasGivenUpLeavesNoMoments) {
  JobDriver driver(engine_, Spec(2));
  driver.AttachAll();
  ASSERT_TRUE(driver.UploadState(At(3), 0).ok());
  driver.DetachAll();
  for (const int rank : {0, 1}) driver.Attach(rank, "new" + std::to_string(rank));
  for (const int rank : {0, 1}) {
    ASSERT_TRUE(driver.UploadState({}, rank, "new" + std::to_string(rank)).ok());
  }
  JobDriver plain = Make(Spec(2, 512, "plain"));
  EXPECT_EQ(driver.job().Status().committed_step, 0u);
  EXPECT_EQ(driver.job().StateHash(), plain.job().StateHash());
}

TEST_F(JobFirstStateTest, OfAnEarlierSessionOfTheSameProcessIsForgotten) {
  JobDriver driver(engine_, Spec(2));
  driver.AttachAll();
  ASSERT_TRUE(driver.UploadState(At(5), 0).ok());  // Rank 1 fails, and both try again.
  driver.DetachAll();
  driver.AttachAll();
  ASSERT_TRUE(driver.UploadState(At(3), 1).ok());
  EXPECT_EQ(PhaseOf(driver), JobPhase::kAwaitingWeights) << "rank 0 has not uploaded since";
  ASSERT_TRUE(driver.UploadState(At(3), 0).ok());
  EXPECT_EQ(PhaseOf(driver), JobPhase::kReady);
}

TEST_F(JobFirstStateTest, FromAnEarlierSessionOfTheSameProcessIsRefused) {
  JobDriver driver(engine_, Spec(2));
  driver.AttachAll();
  const Job::Uploader earlier = Begin(driver, 0, {});  // Its messages are on their way.
  driver.AttachAll();
  const Job::Uploader current = Begin(driver, 0, {});
  const absl::Span<const int> chunks = driver.layout().chunks_of_rank(0);
  const std::vector<float> mine = driver.StateOf(chunks[0], false);
  std::vector<float> other = mine;
  other[0] += 1;
  ASSERT_TRUE(driver.Write(chunks[0], mine, current).ok());
  const std::string hash = driver.job().StateHash();
  EXPECT_EQ(driver.Write(chunks[0], other, earlier).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(driver.job().StateHash(), hash);
  EXPECT_TRUE(driver.Write(chunks[1], driver.StateOf(chunks[1], false), current).ok());
}

}  // namespace
}  // namespace ballast
