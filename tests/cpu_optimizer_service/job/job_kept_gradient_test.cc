// A gradient whose place is lent, and which a later process must find all the same.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "gtest/gtest.h"
#include "tests/cpu_optimizer_service/host/keeper_for_two.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

// Has no memory for one gradient more.
class KeeperWithoutRoom final : public KeeperForTwo {
 public:
  absl::StatusOr<FileDescriptor> MakeFile(const std::string& name, int64_t bytes) override {
    if (absl::StrContains(name, "gradient of chunk")) {
      return absl::ResourceExhaustedError("the system has no memory");
    }
    return KeeperForTwo::MakeFile(name, bytes);
  }
};

// Has not taken its weights.
class SlowListener final : public RecordingListener {
 public:
  void OnWeights(uint64_t step, int chunk, WeightBuffer shard) override {
    MutexLock lock(mutex_);
    held_.push_back(std::move(shard));
  }
  size_t Release() {
    MutexLock lock(mutex_);
    return std::exchange(held_, {}).size();
  }

 private:
  Mutex mutex_;
  std::vector<WeightBuffer> held_ ABSL_GUARDED_BY(mutex_);
};

TEST(JobKeptGradient, IsNotTakenWhileThereIsNoPlaceInWhichItOutlivesTheProcess) {
  KeeperWithoutRoom keeper;
  NamedMemory memory(keeper);
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 2, .named_memory = &memory});
  JobDriver driver(engine, MakeJobSpec({.group_sizes = {{1000}}}));
  driver.UploadWeights();
  const auto slow = std::make_shared<SlowListener>();
  driver.Attach(0, "", UpdateMode::kWait, slow);
  driver.Step(1);
  driver.BeginAll();
  // The client sends it again.
  EXPECT_TRUE(Refused(driver.Send(0, driver.Values(0, 2), 0), absl::StatusCode::kUnavailable));
  EXPECT_EQ(driver.job().Status().ranks[0].chunks_complete, 0);
  EXPECT_GE(slow->Release(), 1u);
  EXPECT_EQ(driver.Send(0, driver.Values(0, 2), 0).value(), ContributionResult::kAdded);
  driver.EndMicroStepAll(0);
  driver.SealAll(1);

  Engine twin({.memory_limit_bytes = int64_t{64} << 20, .threads = 2});
  JobDriver undisturbed(twin, MakeJobSpec({.group_sizes = {{1000}}}));
  undisturbed.UploadWeights();
  undisturbed.AttachAll();
  for (const int seed : {1, 2}) undisturbed.Step(seed);
  EXPECT_EQ(driver.job().StateHash(), undisturbed.job().StateHash());
}

}  // namespace
}  // namespace ballast
