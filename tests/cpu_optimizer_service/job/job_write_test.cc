// Planes that are written between steps: whole or not at all, by all ranks or by an operator.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/engine.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

class JobWriteTest : public JobDriverTest {
 protected:
  static JobSpec Spec(const std::string& name = "job") {
    JobSpec spec = MakeJobSpec({.group_sizes = {{700, 24, 1500}, {600}},
                                .world_size = 2,
                                .bucket_elements = 1024,
                                .chunk_elements = 512},
                               name);
    spec.groups[1].hyper_parameters.amsgrad = true;
    return spec;
  }
  // All state by (parameter, plane).
  using State = std::map<std::pair<int, int>, std::vector<float>>;
  static State Read(Job& job) {
    State state;
    const int parameters = static_cast<int>(job.spec().layout.parameters.size());
    for (int p = 0; p < parameters; ++p) {
      const Snapshot snapshot = job.TakeSnapshot(std::vector<int>{p}).value();
      for (int plane = 0; plane < kMaxPlanes; ++plane) {
        if (!snapshot.has_plane(p, static_cast<Plane>(plane))) continue;
        std::vector<float>& values = state[{p, plane}];
        values.resize(job.layout().place(p).elements);
        snapshot.Read(p, static_cast<Plane>(plane), 0, absl::MakeSpan(values));
      }
    }
    return state;
  }
  // With what WriteState has written there.
  static State With(State state, const JobDriver& driver, const StateWrite& write, uint64_t seed) {
    for (const int chunk : ChunksOf(write, driver.layout())) {
      const std::vector<float> values = driver.Written(write, chunk, seed);
      const int64_t elements = driver.layout().chunks()[chunk].elements;
      for (const ChunkPiece& piece : driver.layout().Pieces(chunk)) {
        if (!std::count(write.parameters.begin(), write.parameters.end(), piece.parameter)) {
          continue;
        }
        for (size_t i = 0; i < write.planes.size(); ++i) {
          std::copy_n(values.begin() + i * elements + piece.chunk_offset, piece.elements,
                      state.at({piece.parameter, static_cast<int>(write.planes[i])}).begin() +
                          piece.parameter_offset);
        }
      }
    }
    return state;
  }
  // A part that is to be told later what became of it.
  struct Told {
    std::optional<absl::Status> status;
    Done<bool> done() {
      return [this](absl::StatusOr<bool> result) { status = result.status(); };
    }
  };
};

TEST_F(JobWriteTest, ChangesWhatItNamesAndNothingElse) {
  for (const UpdateMode mode : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
    for (const bool keep_previous : {false, true}) {
      for (const bool pinned : {false, true}) {
        JobSpec spec = Spec();
        spec.update_mode = mode;
        spec.keep_previous = keep_previous;
        JobDriver driver = Make(spec);
        for (const uint64_t seed : {1, 2}) driver.Step(seed);
        const State before = Read(driver.job());
        std::optional<Snapshot> held;
        if (pinned) held = driver.job().TakeSnapshot(std::vector<int>{0, 1, 2, 3}).value();
        const StateWrite moments =
            driver.NextWrite({Plane::kExpAvg, Plane::kExpAvgSq}, {1, 2}, {0, 1});
        driver.WriteState(moments, 70);
        State expected = With(before, driver, moments, 70);
        EXPECT_EQ(Read(driver.job()), expected);
        const StateWrite weights = driver.NextWrite({Plane::kMaster}, {0});
        driver.WriteState(weights, 80);
        expected = With(expected, driver, weights, 80);
        EXPECT_EQ(Read(driver.job()), expected);
        const StateWrite amsgrad = driver.NextWrite({Plane::kMaxExpAvgSq}, {3});
        driver.WriteState(amsgrad, 90);
        EXPECT_EQ(Read(driver.job()), With(expected, driver, amsgrad, 90));
        if (pinned) {  // What is pinned stays as it was.
          std::vector<float> values(driver.layout().place(0).elements);
          held->Read(0, Plane::kMaster, 0, absl::MakeSpan(values));
          EXPECT_EQ(values, (before.at({0, 0})));
        }
        const JobStatus status = driver.job().Status();
        EXPECT_EQ(status.update_counts, (std::vector<int64_t>{2, 0, 1, 2}));
        EXPECT_EQ(status.committed_step, 2u);
        EXPECT_EQ(status.state_writes, 3u);
        EXPECT_EQ(status.generation, Generation(1));
        // The next step goes on from that, and the one before it cannot be undone any more.
        EXPECT_FALSE(driver.job().UndoStep().ok());
        driver.Step(3);
        EXPECT_EQ(driver.job().Status().committed_step, 3u);
        if (keep_previous) {
          EXPECT_TRUE(driver.job().UndoStep().ok());
          EXPECT_EQ(Read(driver.job()), With(expected, driver, amsgrad, 90));
        }
        held.reset();
        ASSERT_TRUE(engine_.CloseJob("job").ok());
      }
    }
  }
}

TEST_F(JobWriteTest, ShowsNothingUntilAllRanksHaveEnded) {
  JobDriver driver = Make(Spec());
  driver.Step(1);
  const std::string before = driver.job().StateHash();
  const StateWrite write = driver.NextWrite({Plane::kExpAvg}, {0, 2});
  Told first;
  ASSERT_TRUE(driver.WriteState(write, 0, 70, first.done()).ok());
  EXPECT_FALSE(first.status.has_value());
  EXPECT_EQ(driver.job().StateHash(), before);
  EXPECT_TRUE(driver.job().Status().ranks[0].writes_state);
  EXPECT_FALSE(driver.job().Status().ranks[1].writes_state);
  // Who goes on without it, or writes something else, is told so.
  EXPECT_TRUE(Refused(driver.stream(1).BeginStep(2, {}), absl::StatusCode::kFailedPrecondition,
                      reason::kOtherSettings));
  EXPECT_TRUE(
      Refused(first.status.value(), absl::StatusCode::kFailedPrecondition, reason::kOtherSettings));
  Told again_first;
  ASSERT_TRUE(driver.WriteState(write, 0, 70, again_first.done()).ok());
  Told other;
  StateWrite differs = write;
  differs.parameters = {0};
  EXPECT_TRUE(Refused(driver.WriteState(differs, 1, 70, other.done()),
                      absl::StatusCode::kFailedPrecondition, reason::kOtherSettings));
  Told second;
  ASSERT_TRUE(driver.WriteState(write, 1, 70, second.done()).ok());
  EXPECT_TRUE(again_first.status.value().ok());
  EXPECT_TRUE(second.status.value().ok());
  EXPECT_NE(driver.job().StateHash(), before);
  // A rank whose answer was lost is answered the same, and nothing is written again.
  driver.Step(2);
  const std::string after = driver.job().StateHash();
  Told again;
  ASSERT_TRUE(driver.WriteState(write, 0, 71, again.done()).ok());
  EXPECT_TRUE(again.status.value().ok());
  EXPECT_EQ(driver.job().StateHash(), after);
  EXPECT_TRUE(Refused(
      driver.WriteState({.step = 1, .number = 2, .planes = {Plane::kExpAvg}, .parameters = {0}}, 0,
                        70, again.done()),
      absl::StatusCode::kFailedPrecondition, reason::kOtherStep));
  // Once a rank has begun the step it is too late.
  ASSERT_TRUE(driver.stream(0).BeginStep(3, {}).ok());
  EXPECT_TRUE(
      Refused(driver.WriteState(driver.NextWrite({Plane::kExpAvg}, {0}), 1, 70, again.done()),
              absl::StatusCode::kFailedPrecondition, reason::kOtherSettings));
}

TEST_F(JobWriteTest, OfARankThatIsGoneIsGivenUp) {
  JobDriver driver = Make(Spec());
  driver.Step(1);
  const std::string before = driver.job().StateHash();
  const StateWrite write = driver.NextWrite({Plane::kExpAvg}, {0, 2});
  const int64_t used = engine_.memory().used_bytes();
  // Its caller has gone.
  Told gone;
  const auto writer =
      driver.job()
          .BeginStateWrite(
              {.rank = 1, .process_id = "process1", .generation = driver.job().Status().generation},
              {.step = 1, .number = 1, .planes = {}, .parameters = {0}, .update_counts = {0}})
          .value();
  const Pending pending = driver.job().EndStateWrite(writer, gone.done());
  pending.Cancel();
  EXPECT_EQ(gone.status.value().code(), absl::StatusCode::kCancelled);
  // Another session of its process, and another process.
  Told first;
  ASSERT_TRUE(driver.WriteState(write, 0, 70, first.done()).ok());
  EXPECT_GT(engine_.memory().used_bytes(), used);
  driver.Attach(0);
  EXPECT_TRUE(Refused(first.status.value(), absl::StatusCode::kAborted, reason::kOlderGeneration));
  Told second;
  ASSERT_TRUE(driver.WriteState(write, 0, 70, second.done()).ok());
  driver.Attach(0, "another");
  EXPECT_TRUE(Refused(second.status.value(), absl::StatusCode::kAborted, reason::kOlderGeneration));
  EXPECT_EQ(engine_.memory().used_bytes(), used);
  EXPECT_EQ(driver.job().StateHash(), before);
  // The job goes on without it.
  driver.Attach(1);
  driver.Step(2);
  EXPECT_EQ(driver.job().Status().committed_step, 2u);
  EXPECT_EQ(driver.job().Status().state_writes, 0u);
}

TEST_F(JobWriteTest, ByAnOperatorWaitsForTheStepInProgress) {
  JobDriver driver = Make(Spec());
  driver.Step(1);
  const State before = Read(driver.job());
  StateWrite write = {.planes = {Plane::kExpAvg}, .parameters = {2}};
  const std::vector<float> values(1500, 0.25f);
  ASSERT_TRUE(driver.stream(0).BeginStep(2, {}).ok());
  std::shared_ptr<StateWriting> writing = driver.job().PrepareStateWrite(write).value();
  for (const int64_t begin : {0, 1000}) {
    ASSERT_TRUE(
        writing
            ->WriteRange(2, Plane::kExpAvg, begin, absl::MakeConstSpan(values).subspan(begin, 1000))
            .ok());
  }
  std::optional<absl::StatusOr<uint64_t>> told;
  (void)driver.job().CommitStateWrite(
      writing, [&](absl::StatusOr<uint64_t> step) { told = std::move(step); });
  EXPECT_FALSE(told.has_value());
  EXPECT_EQ(Read(driver.job()), before);
  ASSERT_TRUE(driver.job().AbortStep().ok());
  EXPECT_EQ(told.value().value(), 1u);
  State expected = before;
  expected[{2, 1}] = values;
  EXPECT_EQ(Read(driver.job()), expected);
  EXPECT_EQ(driver.job().Status().state_writes, 0u);  // The ranks count their own.
}

TEST_F(JobWriteTest, WhatCanNeverWorkIsRefused) {
  JobSpec spec = Spec();
  spec.layout.parameters[1].trainable = false;
  JobDriver driver = Make(spec);
  driver.Step(1);
  const StateWrite good = driver.NextWrite({Plane::kExpAvg}, {0});
  const auto with = [&](auto change) {
    StateWrite write = good;
    change(write);
    return write;
  };
  const StateWrite kCases[] = {
      with([](StateWrite& w) { w.parameters = {}; }),
      with([](StateWrite& w) { w.planes = {}; }),
      with([](StateWrite& w) {
        w.parameters = {2, 0};
      }),
      with([](StateWrite& w) {
        w.planes = {Plane::kExpAvg, Plane::kExpAvg};
      }),
      with([](StateWrite& w) { w.parameters = {4}; }),
      with([](StateWrite& w) { w.parameters = {-1}; }),
      with([](StateWrite& w) { w.parameters = {1}; }),
      with([](StateWrite& w) { w.planes = {Plane::kMaxExpAvgSq}; }),
      with([](StateWrite& w) {
        w.update_counts = {1, 1};
      }),
      with([](StateWrite& w) { w.update_counts = {2}; }),
      with([](StateWrite& w) { w.update_counts = {-1}; }),
  };
  Told told;
  for (const StateWrite& write : kCases) {
    EXPECT_TRUE(
        Refused(driver.WriteState(write, 0, 70, told.done()), absl::StatusCode::kInvalidArgument));
  }
  const auto holder = RankHolder{
      .rank = 0, .process_id = "process0", .generation = driver.job().Status().generation};
  const StateWrite squares = driver.NextWrite({Plane::kExpAvgSq}, {0});
  const int chunk = ChunksOf(squares, driver.layout()).front();
  const int rank = driver.layout().chunks()[chunk].rank;
  ASSERT_EQ(rank, 0);
  const auto writer = driver.job().BeginStateWrite(holder, squares).value();
  const auto write = [&](std::vector<float> values) {
    const absl::Span<const std::byte> piece(reinterpret_cast<const std::byte*>(values.data()),
                                            values.size() * sizeof(float));
    return driver.job().WriteStateChunk(writer, chunk, {&piece, 1});
  };
  std::vector<float> values(driver.layout().chunks()[chunk].elements, 1.0f);
  for (const float bad : {-1.0f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    values[7] = bad;
    EXPECT_TRUE(Refused(write(values), absl::StatusCode::kInvalidArgument));
  }
  values[7] = 1;
  EXPECT_EQ(write(std::vector<float>(3)).code(), absl::StatusCode::kInvalidArgument);
  (void)driver.job().EndStateWrite(writer, told.done());
  EXPECT_EQ(told.status.value().code(), absl::StatusCode::kInvalidArgument);  // Chunks are missing.
  EXPECT_TRUE(write(values).ok());
  EXPECT_EQ(write(values).code(), absl::StatusCode::kInvalidArgument);  // It has come already.
}

TEST_F(JobWriteTest, ThatDoesNotFitIsRefusedWithSizes) {
  Engine engine({.memory_limit_bytes = int64_t{200} << 10, .threads = 1});
  JobDriver driver(engine, MakeJobSpec({.group_sizes = {{7000}}, .chunk_elements = 512}));
  driver.UploadWeights();
  driver.AttachAll();
  Told told;
  EXPECT_TRUE(Refused(
      driver.WriteState(driver.NextWrite({Plane::kMaster, Plane::kExpAvg, Plane::kExpAvgSq}, {0}),
                        0, 70, told.done()),
      absl::StatusCode::kResourceExhausted));
  driver.Step(1);
}

}  // namespace
}  // namespace ballast
