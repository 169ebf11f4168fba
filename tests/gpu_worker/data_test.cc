#include "gpu_worker/data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/gpu_worker/temp_path.h"

namespace ballast::worker {
namespace {

using testing::HasSubstr;

std::string Alphabet() {
  std::string text;
  for (int i = 0; i < 200; ++i) text.push_back(static_cast<char>(i));
  return text;
}

TextData SomeData() { return TextData::FromText(Alphabet(), "alphabet", 8).value(); }

TEST(TextData, ABatchIsAFunctionOfSeedStepAndMicroStep) {
  const TextData data = SomeData();
  const auto inputs = [&](BatchPosition position) { return data.Slice(position, 4, 0, 1).inputs; };
  const BatchPosition position{.seed = 1, .step = 5, .micro_step = 1};
  const std::vector<int32_t> first = inputs(position);
  inputs({.seed = 1, .step = 6, .micro_step = 0});  // What came between does not matter.
  EXPECT_EQ(inputs(position), first);
  EXPECT_EQ(SomeData().Slice(position, 4, 0, 1).inputs, first);
  EXPECT_NE(inputs({.seed = 2, .step = 5, .micro_step = 1}), first);
  EXPECT_NE(inputs({.seed = 1, .step = 6, .micro_step = 1}), first);
  EXPECT_NE(inputs({.seed = 1, .step = 5, .micro_step = 0}), first);
}

TEST(TextData, RanksShareOutTheSameGlobalBatch) {
  const TextData data = SomeData();
  const BatchPosition position{.seed = 1, .step = 2, .micro_step = 0};
  constexpr int kSequences = 6;
  const Batch whole = data.Slice(position, kSequences, 0, 1);
  for (const int world_size : {2, 3, 4, 7}) {
    int sequences = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      const Batch slice = data.Slice(position, kSequences, rank, world_size);
      for (int i = 0; i < slice.sequences; ++i) {
        const int sample = rank + i * world_size;
        EXPECT_TRUE(std::equal(slice.inputs.begin() + 8 * i, slice.inputs.begin() + 8 * (i + 1),
                               whole.inputs.begin() + 8 * sample));
      }
      sequences += slice.sequences;
    }
    EXPECT_EQ(sequences, kSequences);
  }
}

TEST(TextData, ATargetIsTheNextByteOfTheText) {
  const Batch batch = SomeData().Slice({.seed = 3, .step = 1, .micro_step = 0}, 16, 0, 1);
  ASSERT_EQ(batch.inputs.size(), 16 * 8);
  for (size_t i = 0; i < batch.inputs.size(); ++i) {
    EXPECT_EQ(batch.targets[i], batch.inputs[i] + 1);
  }
}

TEST(TextData, AShortestTextHasOneSample) {
  const TextData data = TextData::FromText("123456789", "short", 8).value();
  const Batch batch = data.Slice({.seed = 3, .step = 1, .micro_step = 0}, 2, 0, 1);
  EXPECT_EQ(std::string(batch.targets.begin(), batch.targets.begin() + 8), "23456789");
}

TEST(TextData, SaysWhatToDoAboutAMissingOrShortText) {
  const absl::Status missing = TextData::Read("/nonexistent/text", 8).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(missing.message(), HasSubstr("/nonexistent/text"));
  EXPECT_THAT(missing.message(), HasSubstr("--text"));
  const absl::Status shorter = TextData::FromText("12345678", "f", 8).status();
  EXPECT_EQ(shorter.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(shorter.message(), HasSubstr("has 8 bytes, but --context=8 needs at least 9"));
}

TEST(TextData, ReadsTheFilesOfADirectoryInOrderAndLinksOnce) {
  const TempPath temp("text_data");
  const std::filesystem::path directory = temp.str();
  std::filesystem::create_directories(directory / "folder");
  std::ofstream(directory / "b") << "bbb";
  std::ofstream(directory / "a") << "aaa";
  std::filesystem::create_symlink("b", directory / "link");
  std::filesystem::create_symlink("nowhere", directory / "broken");
  const TextData data = TextData::Read(directory, 5).value();
  EXPECT_EQ(data.bytes(), 6);
  const Batch batch = data.Slice({.seed = 1, .step = 1, .micro_step = 0}, 1, 0, 1);
  EXPECT_EQ(std::string(batch.inputs.begin(), batch.inputs.end()), "aaabb");
}

TEST(TextData, DefaultTextIsThere) {
  EXPECT_GT(TextData::Read(kDefaultText, 128).value().bytes(), 100000);
}

}  // namespace
}  // namespace ballast::worker
