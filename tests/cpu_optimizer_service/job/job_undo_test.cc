// Undo: a job that keeps the state before its last step goes back to it, and to nothing else.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/engine.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

class UndoTest : public JobDriverTest {
 protected:
  static JobSpec Spec(const std::string& name, UpdateMode mode = UpdateMode::kWait) {
    JobSpec spec = MakeJobSpec(
        {.group_sizes = {{1000, 24, 3000}, {700}}, .world_size = 2, .chunk_elements = 512}, name);
    spec.groups[1].hyper_parameters.amsgrad = true;
    spec.update_mode = mode;
    spec.keep_previous = true;
    return spec;
  }
  // Of all chunks, as their ranks read them.
  static std::vector<std::vector<std::byte>> Weights(Job& job) {
    const JobStatus status = job.Status();
    std::vector<std::vector<std::byte>> weights;
    for (int chunk = 0; chunk < static_cast<int>(job.layout().chunks().size()); ++chunk) {
      const Chunk& place = job.layout().chunks()[chunk];
      const DType dtype = job.spec().groups[place.group].return_dtype;
      weights.emplace_back(place.elements * SizeBytes(dtype));
      const absl::Status read = job.ReadShard(status.generation, status.committed_step, chunk,
                                              absl::MakeSpan(weights.back()));
      EXPECT_TRUE(read.ok()) << read;
    }
    return weights;
  }
  static StepSettings Settings(uint64_t step) {
    StepSettings settings;
    settings.overrides[0].lr = 1e-3 * static_cast<double>(step);
    settings.trainer_state = absl::StrCat("after ", step);
    return settings;
  }
};

// What is told of a job, but for what only counts up.
std::string Told(const JobStatus& status) {
  std::string told = absl::StrCat(status.committed_step, " ", status.trainer_state);
  for (const HyperParameters& values : status.hyper_parameters) {
    absl::StrAppend(&told, " lr ", values.lr);
  }
  for (const int64_t count : status.update_counts) absl::StrAppend(&told, " ", count);
  for (const StepRecord& record : status.recent_steps) {
    absl::StrAppend(&told, " ", record.outcome.step, ":", record.outcome.decision.norm);
  }
  return told;
}

TEST_F(UndoTest, GoesBackOneStepExactlyAndTheStepIsDoneAgainWithTheSameBits) {
  for (const UpdateMode mode : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
    for (const uint64_t last : {1, 4}) {
      SCOPED_TRACE(absl::StrCat("mode ", static_cast<int>(mode), ", ", last, " steps"));
      JobDriver driver = Make(Spec(absl::StrCat("j", static_cast<int>(mode), last), mode));
      JobDriver never = Make(Spec(absl::StrCat("n", static_cast<int>(mode), last), mode));
      for (uint64_t step = 1; step < last; ++step) {
        driver.Step(step, 2, Settings(step));
        never.Step(step, 2, Settings(step));
      }
      const std::string told = Told(driver.job().Status());
      const std::string hash = driver.job().StateHash();
      const auto weights = Weights(driver.job());
      driver.Step(555, 2, Settings(99));
      EXPECT_NE(driver.job().StateHash(), hash);
      EXPECT_NE(Weights(driver.job()), weights);
      EXPECT_EQ(driver.job().Status().undoable_step, last);

      EXPECT_EQ(driver.job().UndoStep().value(), last);
      EXPECT_EQ(driver.job().StateHash(), hash);
      EXPECT_EQ(Weights(driver.job()), weights);
      const JobStatus status = driver.job().Status();
      EXPECT_EQ(Told(status), told);
      EXPECT_EQ(status.generation, Generation(2));
      EXPECT_EQ(status.undoable_step, 0u);
      EXPECT_EQ(status.applied_steps, last) << "counts since the job's creation stay";

      driver.AttachAll();
      driver.Step(last, 2, Settings(last));
      never.Step(last, 2, Settings(last));
      EXPECT_EQ(driver.job().StateHash(), never.job().StateHash());
      EXPECT_EQ(Weights(driver.job()), Weights(never.job()));
      EXPECT_EQ(Told(driver.job().Status()), Told(never.job().Status()));
      EXPECT_EQ(driver.job().UndoStep().value(), last) << "the step that was done anew";
      EXPECT_EQ(driver.job().StateHash(), hash);
    }
  }
}

TEST_F(UndoTest, EndsTheStreamsOfAllRanksWithItsReason) {
  JobDriver driver = Make(Spec("told"));
  driver.Step(1);
  ASSERT_TRUE(driver.job().UndoStep().ok());
  for (const int rank : {0, 1}) {
    EXPECT_TRUE(Refused(driver.listener(rank).detached(), absl::StatusCode::kAborted,
                        reason::kOlderGeneration));
    EXPECT_EQ(driver.stream(rank).BeginStep(1, {}).code(), absl::StatusCode::kAborted);
    const auto again = driver.job().Attach({.rank = rank, .process_id = "again"}).value();
    EXPECT_EQ(again.committed_step, 0u);
    EXPECT_FALSE(again.awaiting_weights);
  }
}

TEST_F(UndoTest, IsRefusedWhereThereIsNothingToUndo) {
  JobDriver driver = Make(Spec("nothing"));
  EXPECT_TRUE(Refused(driver.job().UndoStep(), absl::StatusCode::kFailedPrecondition));
  driver.Step(1);
  ASSERT_TRUE(driver.job().UndoStep().ok());
  const std::string hash = driver.job().StateHash();
  EXPECT_TRUE(Refused(driver.job().UndoStep(), absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(driver.job().StateHash(), hash);
  EXPECT_EQ(driver.job().Status().generation, Generation(2)) << "a refusal changes nothing";

  JobSpec spec = Spec("keeps_none");
  spec.keep_previous = false;
  JobDriver other = Make(spec);
  other.Step(1);
  EXPECT_TRUE(Refused(other.job().UndoStep(), absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(other.job().Status().undoable_step, 0u);
}

// By a client that has lost the first answer, at any time.
TEST_F(UndoTest, ThatNamesItsStepIsDoneOnceHoweverOftenItIsAskedFor) {
  JobDriver driver = Make(Spec("repeated"));
  driver.Step(1);
  const std::string hash = driver.job().StateHash();
  driver.Step(2);
  EXPECT_TRUE(Refused(driver.job().UndoStep({.step = 1, .generation = 1}),
                      absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(Refused(driver.job().UndoStep({.step = 2, .generation = 2}),
                      absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(driver.job().Status().generation, Generation(1)) << "a refusal changes nothing";
  const Job::UndoRequest request = {.step = 2, .generation = 1};
  for (int time = 0; time < 2; ++time) {
    EXPECT_EQ(driver.job().UndoStep(request).value(), 2u);
    EXPECT_EQ(driver.job().StateHash(), hash);
    EXPECT_EQ(driver.job().Status().generation, Generation(2));
  }
  driver.AttachAll();
  driver.Begin(0);
  EXPECT_EQ(driver.job().UndoStep(request).value(), 2u) << "also when the step has begun again";
  ASSERT_TRUE(driver.job().AbortStep().ok());
  driver.AttachAll();
  driver.Step(3);
  const std::string again = driver.job().StateHash();
  EXPECT_EQ(driver.job().UndoStep(request).value(), 2u);
  EXPECT_EQ(driver.job().StateHash(), again) << "what came after it stays";
  EXPECT_EQ(driver.job().UndoStep({.step = 2, .generation = 3}).value(), 2u);
  EXPECT_EQ(driver.job().StateHash(), hash);
}

// Asks for an undo as soon as its step is decided, on the thread that is about to update.
class UndoingListener : public RecordingListener {
 public:
  explicit UndoingListener(Job& job) : job_(job) {}
  void OnDecision(const StepOutcome& outcome, absl::Span<const int> dropped_chunks) override {
    undone = job_.UndoStep();
    RecordingListener::OnDecision(outcome, dropped_chunks);
  }
  std::optional<absl::StatusOr<uint64_t>> undone;

 private:
  Job& job_;
};

TEST_F(UndoTest, IsRefusedOnceTheNextStepHasBegunAndPossibleAgainWhenThatIsAborted) {
  for (const UpdateMode mode : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
    JobDriver driver = Make(Spec(absl::StrCat("open", static_cast<int>(mode)), mode));
    const std::string hash = driver.job().StateHash();
    driver.Step(1);
    driver.Begin(0);
    EXPECT_TRUE(Refused(driver.job().UndoStep(), absl::StatusCode::kFailedPrecondition));
    driver.Begin(1);
    driver.SendAll(7, 0, /*final=*/true);
    if (mode == UpdateMode::kSpeculate) driver.listener(0).WaitForProvisional(1);
    driver.EndMicroStepAll(0);
    driver.SealToLook(1);
    EXPECT_TRUE(Refused(driver.job().UndoStep(),
                        absl::StatusCode::kFailedPrecondition));  // While votes are awaited.
    ASSERT_TRUE(driver.job().AbortStep().ok());
    EXPECT_EQ(driver.job().UndoStep().value(), 1u);
    EXPECT_EQ(driver.job().StateHash(), hash);
  }
}

TEST_F(UndoTest, IsRefusedFromTheDecisionToTheCommit) {
  JobDriver driver = Make(Spec("decided"));
  driver.Step(1);
  const auto listener = std::make_shared<UndoingListener>(driver.job());
  driver.Attach(0, "process0", UpdateMode::kWait, listener);
  driver.Step(2);
  ASSERT_TRUE(listener->undone.has_value());
  EXPECT_TRUE(Refused(*listener->undone, absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(driver.job().Status().committed_step, 2u);
}

TEST_F(UndoTest, WaitsForNobodyWhoHoldsVersionsAndLeavesThemToThem) {
  JobDriver driver = Make(Spec("held"));
  std::vector<int> parameters(driver.layout().spec().parameters.size());
  std::iota(parameters.begin(), parameters.end(), 0);
  const auto weights = [&](const Snapshot& snapshot) {
    std::vector<float> read(1000);
    snapshot.Read(0, Plane::kMaster, 0, absl::MakeSpan(read));
    return read;
  };
  driver.Step(1);
  const Snapshot at_1 = driver.job().TakeSnapshot(parameters).value();
  const std::vector<float> weights_1 = weights(at_1);
  driver.Step(2);
  const Snapshot at_2 = driver.job().TakeSnapshot(parameters).value();
  const std::vector<float> weights_2 = weights(at_2);
  ASSERT_TRUE(driver.job().UndoStep().ok());
  EXPECT_EQ(weights(driver.job().TakeSnapshot(parameters).value()), weights_1);
  driver.AttachAll();
  for (uint64_t seed = 10; seed < 15; ++seed) driver.Step(seed);
  EXPECT_EQ(weights(at_1), weights_1);
  EXPECT_EQ(weights(at_2), weights_2);
}

TEST_F(UndoTest, IsRefusedAtCreationWhereThePreviousVersionDoesNotFit) {
  JobSpec spec = Spec("large");
  const Layout layout = Layout::Create(spec.layout).value();
  const MemoryNeed need = NeedOf(spec, layout);
  EXPECT_GE(need.previous_bytes, need.state_bytes);
  spec.keep_previous = false;
  EXPECT_EQ(NeedOf(spec, layout).total_bytes(), need.total_bytes() - need.previous_bytes);
  Engine engine({.memory_limit_bytes = need.total_bytes() - 1, .threads = 2});
  spec.keep_previous = true;
  EXPECT_TRUE(Refused(engine.CreateJob(spec), absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(engine.memory().used_bytes(), 0);
  spec.keep_previous = false;
  EXPECT_TRUE(engine.CreateJob(spec).ok());
}

// Where there is room for one more version only, it is for the undo.
TEST_F(UndoTest, AJobThatFindsNoRoomToSpeculateCanStillUndo) {
  JobSpec spec = Spec("narrow", UpdateMode::kSpeculate);
  const MemoryNeed need = NeedOf(spec, Layout::Create(spec.layout).value());
  Engine engine({.memory_limit_bytes = need.total_bytes() - need.speculation_bytes, .threads = 2});
  JobDriver driver(engine, spec);
  driver.UploadWeights();
  driver.AttachAll();
  EXPECT_EQ(driver.job().Status().memory.speculation_bytes, 0);
  EXPECT_EQ(driver.job().Status().memory.previous_bytes, need.previous_bytes);
  const std::string hash = driver.job().StateHash();
  driver.Step(1);
  EXPECT_EQ(driver.job().UndoStep().value(), 1u);
  EXPECT_EQ(driver.job().StateHash(), hash);
}

}  // namespace
}  // namespace ballast
