// Buckets between a thread that gives passes and one that gives reductions.
#include "gpu_worker/pipeline/device_buckets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/gpu_emulator/fake_device.h"
#include "tests/gpu_worker/pipeline/scripted_passes.h"

namespace ballast::worker {
namespace {

class DeviceBucketsTest : public testing::Test {
 protected:
  // A pass whose gradients are the number of the pass, in every parameter.
  absl::Status GivePass(uint32_t micro_step, uint32_t micro_steps, int number) {
    BALLAST_RETURN_IF_ERROR(buckets_->StartPass(*compute_, micro_step, micro_steps));
    for (const int p : ScriptedBackwardOrder()) {
      BALLAST_RETURN_IF_ERROR(buckets_->BeforeGradient(*compute_, p));
      BALLAST_RETURN_IF_ERROR(buckets_->BeforeGradient(*compute_, p));
      BALLAST_RETURN_IF_ERROR(
          GiveToFakeStream(*compute_, "backward", [this, p, number] { values_[p] = number; }));
      BALLAST_RETURN_IF_ERROR(buckets_->GradientReady(*compute_, p));
    }
    return absl::OkStatus();
  }
  // Work of `communicate` that reads a bucket, and expects the pass in all of it.
  absl::Status GiveRead(int bucket, int number) {
    return GiveToFakeStream(*communicate_, "reduce", [this, bucket, number] {
      for (const int p : buckets_->order().parameters_of_bucket[bucket]) {
        EXPECT_EQ(values_[p], number) << "parameter " << p << " of bucket " << bucket;
      }
    });
  }
  absl::Status Reduce(int bucket, int number) {
    BALLAST_RETURN_IF_ERROR(buckets_->WaitReady(*communicate_, bucket));
    buckets_->StartReducing(bucket);
    BALLAST_RETURN_IF_ERROR(GiveRead(bucket, number));
    return buckets_->Release(*communicate_, bucket);
  }
  void Open(uint64_t seed) {
    buckets_.reset();
    compute_.reset();
    communicate_.reset();
    device_ = std::make_unique<FakeDevice>(FakeDeviceOptions{
        .seed = seed, .fail = [this](absl::string_view operation, absl::string_view what) {
          records_of_compute_ += operation == "record" && what == "compute";
          return absl::OkStatus();
        }});
    compute_ = device_->CreateStream("compute").value();
    communicate_ = device_->CreateStream("communicate").value();
    buckets_ =
        DeviceBuckets::Create(*device_, job_.layout, job_.buckets, ScriptedBackwardOrder()).value();
  }
  void Finish() {
    ASSERT_TRUE(compute_->Synchronize().ok());
    ASSERT_TRUE(communicate_->Synchronize().ok());
  }
  const std::vector<int>& reduction() const { return buckets_->order().reduction; }

  const TrainingJob job_ = ScriptedJob(1, DType::kBFloat16, 4);
  std::vector<int> values_ = std::vector<int>(ScriptedParameters().size(), -1);  // The device's.
  std::atomic<int> records_of_compute_ = 0;
  std::unique_ptr<FakeDevice> device_;
  std::unique_ptr<DeviceStream> compute_;
  std::unique_ptr<DeviceStream> communicate_;
  std::unique_ptr<DeviceBuckets> buckets_;
};

TEST_F(DeviceBucketsTest, NoPassWritesWhatIsStillToBeReduced) {
  for (uint64_t seed = 0; seed < 16; ++seed) {
    Open(seed);
    std::thread reductions([&] {
      for (int pass = 0; pass < 6; ++pass) {
        for (const int bucket : reduction()) ASSERT_TRUE(Reduce(bucket, pass).ok());
      }
    });
    for (int pass = 0; pass < 6; ++pass) ASSERT_TRUE(GivePass(0, 1, pass).ok());
    reductions.join();
    Finish();
  }
}

TEST_F(DeviceBucketsTest, MicroStepsThatAreSummedAreReadyWithTheLast) {
  for (uint64_t seed = 0; seed < 16; ++seed) {
    Open(seed);
    std::thread reductions([&] {
      for (const int last : {2, 5}) {
        for (const int bucket : reduction()) ASSERT_TRUE(Reduce(bucket, last).ok());
      }
    });
    for (int pass = 0; pass < 6; ++pass) ASSERT_TRUE(GivePass(pass % 3, 3, pass).ok());
    reductions.join();
    Finish();
  }
}

TEST_F(DeviceBucketsTest, StoppedNobodyWaits) {
  Open(3);
  ASSERT_TRUE(GivePass(0, 1, 0).ok());
  std::thread passes([&] {  // Nothing is reduced: the second waits.
    EXPECT_EQ(GivePass(0, 1, 1).code(), absl::StatusCode::kCancelled);
  });
  std::thread reductions([&] {
    for (const int bucket : reduction()) {
      if (!buckets_->WaitReady(*communicate_, bucket).ok()) return;
    }
    EXPECT_EQ(buckets_->WaitReady(*communicate_, reduction()[0]).code(),
              absl::StatusCode::kCancelled);
  });
  buckets_->Stop();
  passes.join();
  reductions.join();
  EXPECT_EQ(GivePass(0, 1, 1).code(), absl::StatusCode::kCancelled);
  Finish();
}

// The device has nothing to do until the reductions come, which takes them a while.
TEST_F(DeviceBucketsTest, SecondsThatTheDeviceWaitedForReductionsAreToldOnce) {
  Open(3);
  ASSERT_TRUE(GivePass(0, 1, 0).ok());
  Finish();
  records_of_compute_ = 0;
  std::thread passes([&] { ASSERT_TRUE(GivePass(0, 1, 1).ok()); });
  while (records_of_compute_ == 0) std::this_thread::yield();  // It waits for its first bucket.
  constexpr std::chrono::milliseconds kWhile(30);
  const auto end = std::chrono::steady_clock::now() + kWhile;
  while (std::chrono::steady_clock::now() < end) {
  }
  for (const int bucket : reduction()) ASSERT_TRUE(Reduce(bucket, 0).ok());
  passes.join();
  Finish();
  EXPECT_GT(buckets_->TakeWaitedSeconds().value(), 0);
  EXPECT_EQ(buckets_->TakeWaitedSeconds().value(), 0);
  for (const int bucket : reduction()) ASSERT_TRUE(Reduce(bucket, 1).ok());
  Finish();
  // All are released, and known to be.
  ASSERT_TRUE(GivePass(0, 1, 2).ok());
  Finish();
  EXPECT_EQ(buckets_->TakeWaitedSeconds().value(), 0);
}

}  // namespace
}  // namespace ballast::worker
