#include "gpu_worker/gpt/token_upload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "tests/gpu_emulator/fake_device.h"

namespace ballast::worker::token_upload_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kRows = 100;

Batch BatchOf(std::vector<int32_t> inputs, std::vector<int32_t> targets) {
  return {.sequences = 1,
          .context = static_cast<int>(inputs.size()),
          .inputs = std::move(inputs),
          .targets = std::move(targets)};
}

// `count` tokens from `first` on, each other than the one before.
Batch Counting(int32_t first, int64_t count) {
  std::vector<int32_t> inputs, targets;
  for (int64_t i = 0; i < count; ++i) {
    inputs.push_back(first + static_cast<int32_t>(i));
    targets.push_back(first + static_cast<int32_t>(i) + 1);
  }
  return BatchOf(std::move(inputs), std::move(targets));
}

// What work of the stream finds there, once that is done.
struct Found {
  std::vector<int32_t> inputs, targets, tokens, begins, rows;
};
absl::Status Find(DeviceStream& stream, const TokensOnDevice& there, int64_t rows, Found& found) {
  return GiveToFakeStream(stream, "look", [there, rows, &found] {
    const int distinct = there.rows_of_inputs.distinct_tokens;
    found.inputs.assign(there.inputs, there.inputs + rows);
    found.targets.assign(there.targets, there.targets + rows);
    found.tokens.assign(there.rows_of_inputs.tokens, there.rows_of_inputs.tokens + distinct);
    found.begins.assign(there.rows_of_inputs.begins, there.rows_of_inputs.begins + distinct + 1);
    found.rows.assign(there.rows_of_inputs.rows, there.rows_of_inputs.rows + rows);
  });
}

class TokenUploads : public testing::TestWithParam<uint64_t> {
 protected:
  FakeDevice device_{{.seed = GetParam()}};
  const std::unique_ptr<DeviceStream> compute_ = device_.CreateStream("compute").value();
  const std::unique_ptr<TokenUpload> upload_ = TokenUpload::Create(device_, kRows).value();
};
INSTANTIATE_TEST_SUITE_P(Seeds, TokenUploads, testing::Range<uint64_t>(0, 8));

TEST_P(TokenUploads, ABatchIsThereWithTheRowsOfEachToken) {
  const TokensOnDevice there =
      upload_->Upload(*compute_, BatchOf({7, 3, 7, 0, 3, 7}, {3, 7, 0, 3, 7, 1})).value();
  Found found;
  ASSERT_TRUE(Find(*compute_, there, 6, found).ok());
  ASSERT_TRUE(compute_->Synchronize().ok());
  EXPECT_THAT(found.inputs, ElementsAre(7, 3, 7, 0, 3, 7));
  EXPECT_THAT(found.targets, ElementsAre(3, 7, 0, 3, 7, 1));
  EXPECT_THAT(found.tokens, ElementsAre(0, 3, 7));
  EXPECT_THAT(found.begins, ElementsAre(0, 1, 3, 6));
  EXPECT_THAT(found.rows, ElementsAre(3, 1, 4, 0, 2, 5));
  for (const int32_t* array : {there.inputs, there.targets, there.rows_of_inputs.tokens,
                               there.rows_of_inputs.begins, there.rows_of_inputs.rows}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(array) % 256, 0) << "as memory of its own would be";
  }
}

// The caller runs ahead: its batches are gone, and the memory that they were put into is used
// again, before the device has reached them.
TEST_P(TokenUploads, UploadsOneAfterAnotherAreEachReadAsTheyWere) {
  constexpr int kUploads = 9;
  std::list<Found> found;
  for (int i = 0; i < kUploads; ++i) {
    const int64_t rows = kRows - i;
    const TokensOnDevice there = upload_->Upload(*compute_, Counting(1000 * i, rows)).value();
    ASSERT_TRUE(Find(*compute_, there, rows, found.emplace_back()).ok());
  }
  ASSERT_TRUE(compute_->Synchronize().ok());
  int i = 0;
  for (const Found& each : found) {
    const Batch batch = Counting(1000 * i, kRows - i);
    EXPECT_EQ(each.inputs, batch.inputs) << "upload " << i;
    EXPECT_EQ(each.targets, batch.targets) << "upload " << i;
    EXPECT_EQ(each.tokens, batch.inputs) << "upload " << i;
    ++i;
  }
}

TEST_P(TokenUploads, WhatWasPreparedIsUploadedIfItIsOfTheSameBatch) {
  const Batch one = BatchOf({7, 3, 7}, {3, 7, 0}), like_it = BatchOf({7, 3, 7}, {3, 7, 1});
  std::list<Found> found;
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(upload_->Prepare(one).ok());
    EXPECT_TRUE(upload_->IsPrepared(one));
    EXPECT_FALSE(upload_->IsPrepared(like_it));
    // Whatever was prepared, it is the batch that is uploaded.
    const Batch& batch = i % 2 == 0 ? one : like_it;
    const TokensOnDevice there = upload_->Upload(*compute_, batch).value();
    EXPECT_FALSE(upload_->IsPrepared(batch));
    ASSERT_TRUE(Find(*compute_, there, 3, found.emplace_back()).ok());
  }
  ASSERT_TRUE(compute_->Synchronize().ok());
  int i = 0;
  for (const Found& each : found) {
    EXPECT_THAT(each.inputs, ElementsAre(7, 3, 7));
    EXPECT_THAT(each.targets, ElementsAre(3, 7, i++ % 2));
    EXPECT_THAT(each.rows, ElementsAre(1, 0, 2));
  }
}

TEST(TokenUpload, WaitsForTheCopiesOfTheCallBeforeTheLastAlone) {
  FakeDevice device({.seed = 0});  // Does only what is waited for.
  const auto compute = device.CreateStream("compute").value();
  const auto upload = TokenUpload::Create(device, kRows).value();
  std::atomic<bool> begun = false;
  ASSERT_TRUE(GiveToFakeStream(*compute, "before", [&] { begun = true; }).ok());
  ASSERT_TRUE(upload->Upload(*compute, Counting(0, kRows)).ok());
  ASSERT_TRUE(upload->Upload(*compute, Counting(1, kRows)).ok());
  EXPECT_FALSE(begun);
  ASSERT_TRUE(upload->Upload(*compute, Counting(2, kRows)).ok());
  EXPECT_TRUE(begun);
  ASSERT_TRUE(compute->Synchronize().ok());
}

TEST(TokenUpload, HasMemoryForItsRowsAndNoMore) {
  FakeDevice device;
  const auto compute = device.CreateStream("compute").value();
  for (const int64_t rows : {1, 63, 64, 65, 1000}) {
    const auto upload = TokenUpload::Create(device, rows).value();
    EXPECT_EQ(upload->device_bytes(), device.allocated_bytes());
    // The longest: no token comes twice.
    EXPECT_TRUE(upload->Upload(*compute, Counting(0, rows)).ok());
    ASSERT_TRUE(compute->Synchronize().ok());
  }
  EXPECT_EQ(device.allocated_bytes(), 0);
}

TEST(TokenUploadDeathTest, ABatchOfMoreRowsAborts) {
  EXPECT_DEATH(
      {
        FakeDevice device;
        const auto compute = device.CreateStream("compute").value();
        const auto upload = TokenUpload::Create(device, 64).value();
        upload->Upload(*compute, Counting(0, 65)).IgnoreError();
      },
      "tokens fit the memory made for them");
}

TEST(TokenUpload, PassesOnWhatTheDeviceSays) {
  int operations = 0;
  int failing = -1;
  FakeDevice device({.fail = [&](absl::string_view operation, absl::string_view what) {
    return operations++ == failing
               ? absl::ResourceExhaustedError(absl::StrCat(operation, " for ", what))
               : absl::OkStatus();
  }});
  const auto compute = device.CreateStream("compute").value();
  const auto run = [&]() -> absl::Status {
    operations = 0;
    BALLAST_ASSIGN_OR_RETURN(const auto upload, TokenUpload::Create(device, kRows));
    absl::Status status;
    for (int i = 0; i < 3 && status.ok(); ++i) {
      status = upload->Upload(*compute, Counting(0, kRows)).status();
    }
    const int asked = std::exchange(operations, 1 << 20);
    EXPECT_TRUE(compute->Synchronize().ok());  // Before its memory goes.
    operations = asked;
    return status;
  };
  ASSERT_TRUE(run().ok());
  const int all = operations;
  ASSERT_GT(all, 10);
  for (failing = 0; failing < all; ++failing) {
    EXPECT_THAT(run().message(), HasSubstr(" for ")) << "operation " << failing << " of " << all;
    EXPECT_EQ(operations, failing + 1) << "it went on after the error";
    EXPECT_EQ(device.allocated_bytes(), 0);
  }
}

}  // namespace
}  // namespace ballast::worker::token_upload_test
