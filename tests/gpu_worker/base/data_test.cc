#include "gpu_worker/base/data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/gpu_worker/temp_path.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

std::string Alphabet() {
  std::string text;
  for (int i = 0; i < 200; ++i) text.push_back(static_cast<char>(i));
  return text;
}

// What is wrong with a token file is changed in a good one.
struct TokenFile {
  int32_t magic = 20240520;
  int32_t version = 1;
  int32_t count = 0;
  std::vector<uint16_t> tokens;
};

std::string Bytes(const TokenFile& file) {
  std::vector<int32_t> header(256);
  header[0] = file.magic;
  header[1] = file.version;
  header[2] = file.count;
  std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
  bytes.append(reinterpret_cast<const char*>(file.tokens.data()), 2 * file.tokens.size());
  return bytes;
}

TokenFile SomeTokens(uint16_t first, int32_t count) {
  TokenFile file{.count = count, .tokens = {}};
  for (int i = 0; i < count; ++i) file.tokens.push_back(first + i);
  return file;
}

TokenData SomeData() { return TokenData::FromText(Alphabet(), "alphabet", 8).value(); }

TEST(TokenData, ABatchIsAFunctionOfSeedStepAndMicroStep) {
  const TokenData data = SomeData();
  const auto inputs = [&](BatchPosition position) { return data.Slice(position, 4, 0, 1).inputs; };
  const BatchPosition position{.seed = 1, .step = 5, .micro_step = 1};
  const std::vector<int32_t> first = inputs(position);
  inputs({.seed = 1, .step = 6, .micro_step = 0});  // Earlier calls do not matter.
  EXPECT_EQ(inputs(position), first);
  EXPECT_EQ(SomeData().Slice(position, 4, 0, 1).inputs, first);
  EXPECT_NE(inputs({.seed = 2, .step = 5, .micro_step = 1}), first);
  EXPECT_NE(inputs({.seed = 1, .step = 6, .micro_step = 1}), first);
  EXPECT_NE(inputs({.seed = 1, .step = 5, .micro_step = 0}), first);
}

TEST(TokenData, RanksShareOutTheSameGlobalBatch) {
  const TokenData data = SomeData();
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

TEST(TokenData, ATargetIsTheNextByteOfTheText) {
  const Batch batch = SomeData().Slice({.seed = 3, .step = 1, .micro_step = 0}, 16, 0, 1);
  ASSERT_EQ(batch.inputs.size(), 16 * 8);
  for (size_t i = 0; i < batch.inputs.size(); ++i) {
    EXPECT_EQ(batch.targets[i], batch.inputs[i] + 1);
  }
}

TEST(TokenData, AShortestTextHasOneSample) {
  const TokenData data = TokenData::FromText("123456789", "short", 8).value();
  const Batch batch = data.Slice({.seed = 3, .step = 1, .micro_step = 0}, 2, 0, 1);
  EXPECT_EQ(std::string(batch.targets.begin(), batch.targets.begin() + 8), "23456789");
}

TEST(TokenData, SaysWhatToDoAboutAMissingOrShortText) {
  const absl::Status missing = TokenData::Read("/nonexistent/text", 8).status();
  EXPECT_TRUE(Refused(missing, absl::StatusCode::kNotFound));
  const absl::Status shorter = TokenData::FromText("12345678", "f", 8).status();
  EXPECT_TRUE(Refused(shorter, absl::StatusCode::kInvalidArgument));
}

TEST(TokenData, ReadsTheFilesOfADirectoryInOrderAndLinksOnce) {
  const TempPath temp("text_data");
  const std::filesystem::path directory = temp.str();
  std::filesystem::create_directories(directory / "folder");
  std::ofstream(directory / "b") << "bbb";
  std::ofstream(directory / "a") << "aaa";
  std::filesystem::create_symlink("b", directory / "link");
  std::filesystem::create_symlink("nowhere", directory / "broken");
  const TokenData data = TokenData::Read(directory, 5).value();
  EXPECT_TRUE(Refused(TokenData::Read(directory, 6), absl::StatusCode::kInvalidArgument));
  const Batch batch = data.Slice({.seed = 1, .step = 1, .micro_step = 0}, 1, 0, 1);
  EXPECT_EQ(std::string(batch.inputs.begin(), batch.inputs.end()), "aaabb");
}

TEST(TokenData, DefaultTextIsThere) { EXPECT_TRUE(TokenData::Read(kDefaultText, 100000).ok()); }

// A directory for files, and the error of Read for one.
class Files {
 public:
  explicit Files(const std::string& name) : temp_(name) {
    std::filesystem::create_directories(temp_.str());
  }
  std::string Write(const std::string& name, const std::string& bytes) {
    const std::string path = temp_.str() + "/" + name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  absl::Status Try(const TokenFile& file) {
    return TokenData::Read(Write("tokens.bin", Bytes(file)), 4).status();
  }
  const std::string& directory() const { return temp_.str(); }

 private:
  const TempPath temp_;
};

TEST(TokenFile, IsReadWithItsTokensAsTheyAre) {
  Files files("token_file");
  const TokenData data =
      TokenData::Read(files.Write("tokens.bin", Bytes(SomeTokens(50247, 10))), 9).value();
  EXPECT_EQ(data.vocabulary(), 50257);
  const Batch batch = data.Slice({.seed = 1, .step = 1, .micro_step = 0}, 1, 0, 1);
  for (int i = 0; i < 9; ++i) {
    EXPECT_EQ(batch.inputs[i], 50247 + i);
    EXPECT_EQ(batch.targets[i], 50248 + i);
  }
}

TEST(TokenFile, OfADirectoryFollowsTheOneBefore) {
  Files files("token_directory");
  files.Write("b.bin", Bytes(SomeTokens(3, 3)));
  files.Write("a.bin", Bytes(SomeTokens(0, 3)));
  const TokenData data = TokenData::Read(files.directory(), 5).value();
  const Batch batch = data.Slice({.seed = 1, .step = 1, .micro_step = 0}, 1, 0, 1);
  EXPECT_THAT(batch.inputs, testing::ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(batch.targets, testing::ElementsAre(1, 2, 3, 4, 5));
}

TEST(TokenFile, DoesNotGoTogetherWithText) {
  Files files("token_mixed");
  files.Write("a.bin", Bytes(SomeTokens(0, 30)));
  files.Write("b.txt", std::string(100, 'b'));
  const absl::Status mixed = TokenData::Read(files.directory(), 4).status();
  EXPECT_TRUE(Refused(mixed, absl::StatusCode::kInvalidArgument));
}

TEST(TokenFile, SaysWhatIsWrongWithABrokenOne) {
  Files files("token_broken");
  ASSERT_TRUE(files.Try(SomeTokens(0, 30)).ok());
  const auto expect_refused = [&](void (*spoil)(TokenFile&)) {
    TokenFile file = SomeTokens(0, 30);
    spoil(file);
    EXPECT_TRUE(Refused(files.Try(file), absl::StatusCode::kInvalidArgument));
  };
  expect_refused([](TokenFile& file) { file.magic = 20240801; });
  expect_refused([](TokenFile& file) { file.version = 7; });
  expect_refused([](TokenFile& file) { file.tokens.pop_back(); });
  expect_refused([](TokenFile& file) { file.tokens.push_back(0); });
  expect_refused([](TokenFile& file) { file.count = -1; });
  expect_refused([](TokenFile& file) { file.tokens[11] = 50257; });
  expect_refused([](TokenFile& file) {
    file.tokens.resize(3);
    file.count = 3;
  });

  const absl::Status text = TokenData::Read(files.Write("text.bin", "a few words"), 4).status();
  EXPECT_TRUE(Refused(text, absl::StatusCode::kInvalidArgument));
}

TEST(TokenData, BytesAreItsVocabularyUnlessAFileSaysOtherwise) {
  EXPECT_EQ(SomeData().vocabulary(), 256);
  const std::string high = "\xff\xfe\xfd\xfc\xfb";
  Files files("high_bytes");
  const TokenData data = TokenData::Read(files.Write("text", high), 4).value();
  const Batch batch = data.Slice({.seed = 1, .step = 1, .micro_step = 0}, 1, 0, 1);
  EXPECT_THAT(batch.inputs, testing::ElementsAre(255, 254, 253, 252));
}

TEST(TokenData, FingerprintsTellContentsApart) {
  const auto of = [](const std::string& text) {
    return TokenData::FromText(text, "t", 2).value().Fingerprint();
  };
  EXPECT_EQ(of("abcdef"), of("abcdef"));
  EXPECT_NE(of("abcdef"), of("abcdeg"));
  EXPECT_NE(of("abcdef"), of("bacdef"));
  EXPECT_NE(of("abcdef"), of("abcde"));
  // The same numbers, but not the same tokens.
  Files files("fingerprint");
  TokenFile file = SomeTokens('a', 6);
  EXPECT_NE(TokenData::Read(files.Write("t.bin", Bytes(file)), 2).value().Fingerprint(),
            of("abcdef"));
}

}  // namespace
}  // namespace ballast::worker
