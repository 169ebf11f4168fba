#include "cpu_optimizer_service/state/safetensors.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace ballast {
namespace {

constexpr int64_t kMostHeaderBytes = 1 << 20;

class SafetensorsTest : public testing::Test {
 protected:
  ~SafetensorsTest() override { std::filesystem::remove(path_); }
  void Write(const std::string& header, const std::string& data) {
    const uint64_t size = header.size();
    std::ofstream file(path_, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&size), 8);
    file << header << data;
  }
  absl::StatusCode OpenCode() {
    return SafetensorsFile::Open(PosixFileSystem(), path_, kMostHeaderBytes).status().code();
  }

  const std::string path_ =
      testing::TempDir() + "/safetensors_test_" + std::to_string(getpid()) + ".safetensors";
};

TEST_F(SafetensorsTest, ReadsWhatItWroteAndWritesTheFormat) {
  const std::vector<TensorEntry> tensors = {{.name = "h.0/w", .shape = {2, 3}, .elements = 6},
                                            {.name = "empty", .shape = {0}, .elements = 0},
                                            {.name = "scalar", .shape = {}, .elements = 1}};
  const auto value = [](int tensor, int64_t i) { return static_cast<float>(100 * tensor + i); };
  const WrittenFile written =
      WriteSafetensors(PosixFileSystem(), path_, tensors,
                       [&](int tensor, int64_t offset, absl::Span<float> out) {
                         for (size_t i = 0; i < out.size(); ++i) out[i] = value(tensor, offset + i);
                       })
          .value();
  EXPECT_EQ(written.size_bytes, static_cast<int64_t>(std::filesystem::file_size(path_)));
  const SafetensorsFile file =
      SafetensorsFile::Open(PosixFileSystem(), path_, kMostHeaderBytes).value();
  EXPECT_EQ(file.Examine(true).value().crc32, written.crc32);
  ASSERT_NE(file.Find("h.0/w"), nullptr);
  EXPECT_EQ(file.Find("h.0/w")->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(file.Find("none"), nullptr);
  std::vector<float> out(4);
  ASSERT_TRUE(file.Read("h.0/w", 2, absl::MakeSpan(out)).ok());
  EXPECT_EQ(out, (std::vector<float>{2, 3, 4, 5}));
  EXPECT_EQ(file.Read("h.0/w", 3, absl::MakeSpan(out)).code(), absl::StatusCode::kOutOfRange);

  std::ifstream raw(path_, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(raw)), std::istreambuf_iterator<char>());
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), 8);
  EXPECT_EQ(header_bytes % 8, 0u);
  EXPECT_EQ(bytes.substr(8, 60), R"({"h.0/w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]})");
  float last = 0;
  std::memcpy(&last, bytes.data() + bytes.size() - 4, 4);
  EXPECT_EQ(last, 200);
}

TEST_F(SafetensorsTest, HostileHeadersAreDataLoss) {
  for (const char* header :
       {"", "[]", "{", R"({"a": 1})",
        R"({"a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}})",
        R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}})",
        R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}})",
        R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}})",
        R"({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})",
        R"({"a": {"dtype": "F32", "shape": [9223372036854775807, 9], "data_offsets": [0, 4]}})",
        R"({"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}})",
        R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}})"}) {
    Write(header, std::string(8, '\0'));
    EXPECT_EQ(OpenCode(), absl::StatusCode::kDataLoss) << header;
  }
  Write(
      R"({"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})",
      std::string(8, '\0'));
  EXPECT_EQ(OpenCode(), absl::StatusCode::kOk);
}

}  // namespace
}  // namespace ballast
