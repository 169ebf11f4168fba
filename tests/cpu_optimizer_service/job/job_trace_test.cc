#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <map>
#include <set>
#include <string>
#include <thread>

#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

bool Always() { return true; }

// A trace that is being taken by a thread of its own.
class TraceInTheBackground {
 public:
  TraceInTheBackground(Job& job, uint32_t steps, std::function<bool()> still_wanted = Always)
      : trace_(std::async(std::launch::async, [this, &job, steps, still_wanted] {
          return job.TraceSteps(steps, [&] { return wanted_.load() && still_wanted(); });
        })) {}
  ~TraceInTheBackground() { wanted_ = false; }

  // The first steps that begin after this are traced.
  void AwaitStart(Job& job, uint64_t first_step) {
    const int64_t limit_ns = TraceNow() + int64_t{30} * 1'000'000'000;
    while (!job.trace().wants(first_step) && TraceNow() < limit_ns) std::this_thread::yield();
    ASSERT_TRUE(job.trace().wants(first_step));
  }
  Trace Take() { return trace_.get().value(); }

 private:
  std::atomic<bool> wanted_ = true;
  std::future<absl::StatusOr<Trace>> trace_;
};

std::map<TraceEventKind, int> CountKinds(const Trace& trace, uint64_t step) {
  std::map<TraceEventKind, int> counts;
  for (const TraceEvent& event : trace.events) {
    if (event.step == step) ++counts[event.kind];
  }
  return counts;
}

class JobTraceTest : public JobDriverTest, public testing::WithParamInterface<UpdateMode> {
 protected:
  JobSpec Spec() const {
    JobSpec spec =
        MakeJobSpec({.group_sizes = {{3000, 24}, {1000}}, .world_size = 2, .chunk_elements = 512});
    spec.update_mode = GetParam();
    return spec;
  }

  // A step of two micro-steps. In speculate mode every chunk has a provisional update.
  void Step(JobDriver& driver) {
    driver.BeginAll();
    for (uint32_t m = 0; m < 2; ++m) {
      driver.SendAll(10 * driver.next_step() + m, m, m == 1);
      driver.EndMicroStepAll(m);
    }
    for (int rank = 0; GetParam() == UpdateMode::kSpeculate && rank < 2; ++rank) {
      driver.listener(rank).WaitForProvisional(driver.layout().chunks_of_rank(rank).size());
    }
    driver.SealAll(2);
  }
};

TEST_P(JobTraceTest, ShowsWhatHappensToEveryChunkOfTheNextSteps) {
  JobDriver driver = Make(Spec());
  const int chunks = static_cast<int>(driver.layout().chunks().size());
  Step(driver);
  TraceInTheBackground background(driver.job(), 3);
  ASSERT_NO_FATAL_FAILURE(background.AwaitStart(driver.job(), 2));
  for (int step = 2; step <= 5; ++step) Step(driver);
  const Trace trace = background.Take();
  EXPECT_EQ(trace.dropped_events, 0u);
  std::set<uint64_t> steps;
  for (const TraceEvent& event : trace.events) steps.insert(event.step);
  EXPECT_EQ(steps, (std::set<uint64_t>{2, 3, 4}));
  for (const uint64_t step : steps) {
    int64_t begun_ns = 0;
    int64_t decided_ns = 0;
    int64_t committed_ns = 0;
    std::map<TraceEventKind, std::map<int, int>> counts;  // By chunk.
    for (const TraceEvent& event : trace.events) {
      if (event.step != step) continue;
      ++counts[event.kind][event.chunk];
      if (event.kind == TraceEventKind::kBegun) begun_ns = event.begin_ns;
      if (event.kind == TraceEventKind::kDecided) decided_ns = event.end_ns;
      if (event.kind == TraceEventKind::kCommitted) committed_ns = event.end_ns;
    }
    const std::map<int, int> once = {{-1, 1}};
    EXPECT_EQ(counts[TraceEventKind::kBegun], once);
    EXPECT_EQ(counts[TraceEventKind::kDecided], once);
    EXPECT_EQ(counts[TraceEventKind::kCommitted], once);
    EXPECT_LE(begun_ns, decided_ns);
    EXPECT_LE(decided_ns, committed_ns);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      EXPECT_EQ(counts[TraceEventKind::kArrived][chunk], 2) << "chunk " << chunk;
      EXPECT_EQ(counts[TraceEventKind::kSummed][chunk], 1) << "chunk " << chunk;
      const bool ahead = GetParam() == UpdateMode::kSpeculate;
      EXPECT_EQ(counts[TraceEventKind::kSpeculated][chunk], ahead ? 1 : 0) << "chunk " << chunk;
      EXPECT_EQ(counts[TraceEventKind::kUpdated][chunk], ahead ? 0 : 1) << "chunk " << chunk;
    }
    for (const TraceEvent& event : trace.events) {
      if (event.step != step) continue;
      EXPECT_LE(begun_ns, event.begin_ns);
      EXPECT_LE(event.begin_ns, event.end_ns);
      EXPECT_LE(event.end_ns, committed_ns);
      if (event.kind == TraceEventKind::kSpeculated) EXPECT_LE(event.end_ns, decided_ns);
      if (event.kind == TraceEventKind::kUpdated) EXPECT_GE(event.begin_ns, decided_ns);
    }
  }
  EXPECT_FALSE(driver.job().trace().wants(4));
}

TEST_P(JobTraceTest, BeginsAfterTheStepThatIsOpen) {
  JobDriver driver = Make(Spec());
  driver.BeginAll();
  TraceInTheBackground background(driver.job(), 1);
  ASSERT_NO_FATAL_FAILURE(background.AwaitStart(driver.job(), 2));
  driver.SendAll(1, 0, /*final=*/true);
  driver.EndMicroStepAll(0);
  driver.SealAll(1);
  Step(driver);
  const Trace trace = background.Take();
  EXPECT_EQ(CountKinds(trace, 1).size(), 0u);
  EXPECT_EQ(CountKinds(trace, 2)[TraceEventKind::kCommitted], 1);
}

TEST_P(JobTraceTest, ShowsEveryAttemptAtAStep) {
  JobDriver driver = Make(Spec());
  TraceInTheBackground background(driver.job(), 1);
  ASSERT_NO_FATAL_FAILURE(background.AwaitStart(driver.job(), 1));
  driver.BeginAll();
  ASSERT_TRUE(driver.Send(0, driver.Values(0, 7), 0).ok());
  ASSERT_TRUE(driver.job().AbortStep().ok());
  driver.DetachAll();
  driver.AttachAll();
  Step(driver);
  std::map<TraceEventKind, int> counts = CountKinds(background.Take(), 1);
  EXPECT_EQ(counts[TraceEventKind::kBegun], 2);
  EXPECT_EQ(counts[TraceEventKind::kCommitted], 1);
  const int chunks = static_cast<int>(driver.layout().chunks().size());
  EXPECT_EQ(counts[TraceEventKind::kArrived], 2 * chunks + 1);
}

INSTANTIATE_TEST_SUITE_P(Modes, JobTraceTest,
                         testing::Values(UpdateMode::kWait, UpdateMode::kSpeculate),
                         [](const auto& info) {
                           return info.param == UpdateMode::kWait ? "Wait" : "Speculate";
                         });

using JobTraceEndTest = JobDriverTest;

TEST_F(JobTraceEndTest, EndsWithWhatThereIsWhenTheJobIsClosed) {
  JobDriver driver = Make(MakeJobSpec({}));
  TraceInTheBackground background(driver.job(), 2);
  ASSERT_NO_FATAL_FAILURE(background.AwaitStart(driver.job(), 1));
  driver.Step(1);
  ASSERT_TRUE(engine_.CloseJob("job").ok());
  EXPECT_EQ(CountKinds(background.Take(), 1)[TraceEventKind::kCommitted], 1);
  EXPECT_EQ(driver.job().TraceSteps(1, Always).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(JobTraceEndTest, EndsWithWhatThereIsWhenItIsNoLongerWanted) {
  JobDriver driver = Make(MakeJobSpec({}));
  std::atomic<bool> wanted = true;
  TraceInTheBackground background(driver.job(), 1000, [&] { return wanted.load(); });
  ASSERT_NO_FATAL_FAILURE(background.AwaitStart(driver.job(), 1));
  driver.Step(1);
  driver.BeginAll();
  wanted = false;
  const Trace trace = background.Take();
  EXPECT_EQ(CountKinds(trace, 1)[TraceEventKind::kCommitted], 1);
  EXPECT_EQ(CountKinds(trace, 2)[TraceEventKind::kBegun], 1);
  EXPECT_FALSE(driver.job().trace().wants(2));
}

TEST_F(JobTraceEndTest, OneAtATimeAndTheMemoryComesBack) {
  JobDriver driver = Make(MakeJobSpec({}));
  const int64_t used_bytes = engine_.memory().used_bytes();
  {
    TraceInTheBackground background(driver.job(), 1);
    ASSERT_NO_FATAL_FAILURE(background.AwaitStart(driver.job(), 1));
    EXPECT_EQ(driver.job().TraceSteps(1, Always).status().code(),
              absl::StatusCode::kResourceExhausted);
    EXPECT_GT(engine_.memory().used_bytes(), used_bytes);
    driver.Step(1);
    EXPECT_EQ(CountKinds(background.Take(), 1)[TraceEventKind::kCommitted], 1);
  }
  EXPECT_EQ(engine_.memory().used_bytes(), used_bytes);
}

TEST(JobTrace, IsRefusedWhereMemoryHasNoRoomForIt) {
  const JobSpec spec = MakeJobSpec({});
  const int64_t job_bytes = NeedOf(spec, Layout::Create(spec.layout).value()).total_bytes();
  Engine engine({.memory_limit_bytes = job_bytes + 100, .threads = 1});
  JobDriver driver(engine, spec);
  driver.UploadWeights();
  driver.AttachAll();
  EXPECT_TRUE(Refused(driver.job().TraceSteps(1, Always), absl::StatusCode::kResourceExhausted));
  driver.Step(1);
}

TEST_F(JobTraceEndTest, CountsEventsThatFindNoRoom) {
  constexpr uint32_t kMicroSteps = 60;  // Far more than a job of any number is reckoned with.
  JobDriver driver = Make(MakeJobSpec({.group_sizes = {{256}}}));
  ASSERT_EQ(driver.layout().chunks().size(), 1u);
  TraceInTheBackground background(driver.job(), 1);
  ASSERT_NO_FATAL_FAILURE(background.AwaitStart(driver.job(), 1));
  driver.Step(1, kMicroSteps);
  const Trace trace = background.Take();
  EXPECT_GT(trace.dropped_events, 0u);
  // Arrivals, sums, update; begun, decided, committed.
  EXPECT_EQ(trace.events.size() + trace.dropped_events, kMicroSteps + 2 + 3);
}

}  // namespace
}  // namespace ballast
