#include "client/cli/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/support/messages.h"

namespace ballast::client::cli {
namespace {

using testing::HasSubstr;

class NpyWriterTest : public testing::Test {
 protected:
  NpyWriterTest() : directory_(testing::TempDir() + "npy_writer_test." + std::to_string(getpid())) {
    std::filesystem::create_directories(directory_);
  }
  ~NpyWriterTest() override { std::filesystem::remove_all(directory_); }

  std::string Path(const std::string& name) const { return directory_ + "/" + name; }
  static std::string Contents(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    std::stringstream contents;
    contents << in.rdbuf();
    return contents.str();
  }
  size_t Files() const {
    const std::filesystem::directory_iterator files(directory_);
    return static_cast<size_t>(std::distance(begin(files), end(files)));
  }
  static std::string Bytes(const std::vector<float>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
  }

  const std::string directory_;
};

TEST(NpyHeader, IsNumPyFormatOneByteForByte) {
  const std::string expected = std::string("\x93NUMPY\x01\x00\x76\x00", 10) +
                               "{'descr': '<f4', 'fortran_order': False, 'shape': (768, 3072), }" +
                               std::string(128 - 10 - 64 - 1, ' ') + "\n";
  EXPECT_EQ(NpyHeader({768, 3072}), expected);
  EXPECT_THAT(NpyHeader({7}), HasSubstr("'shape': (7,), }"));
  EXPECT_THAT(NpyHeader({}), HasSubstr("'shape': (), }"));
  EXPECT_THAT(NpyHeader({0, 2, 3}), HasSubstr("'shape': (0, 2, 3), }"));
  EXPECT_EQ(NpyHeader({}).size() % 64, 0u);
  EXPECT_EQ(NpyHeader(std::vector<int64_t>(20, 1000000)).size() % 64, 0u);
}

TEST_F(NpyWriterTest, LeavesNothingWhenASignalEndsTheProcess) {
  auto writer = NpyWriter::Create(Path("w.npy"), {2}).value();
  ASSERT_TRUE(writer->Append(Bytes({1})).ok());
  EXPECT_EQ(Files(), 1u);
  RemoveUnfinishedFile();
  EXPECT_EQ(Files(), 0u);
  writer.reset();
  // A committed file stays.
  writer = NpyWriter::Create(Path("w.npy"), {1}).value();
  ASSERT_TRUE(writer->Append(Bytes({1})).ok());
  ASSERT_TRUE(writer->Commit().ok());
  RemoveUnfinishedFile();
  EXPECT_EQ(Files(), 1u);
}

TEST_F(NpyWriterTest, AppearsWholeOnCommit) {
  const std::string path = Path("w.npy");
  {
    auto writer = NpyWriter::Create(path, {2, 3}).value();
    ASSERT_TRUE(writer->Append(Bytes({1, 2, 3, 4})).ok());
    EXPECT_FALSE(std::filesystem::exists(path));
    ASSERT_TRUE(writer->Append(Bytes({5, 6})).ok());
    ASSERT_TRUE(writer->Commit().ok());
  }
  EXPECT_EQ(Contents(path), NpyHeader({2, 3}) + Bytes({1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(Files(), 1u);
}

TEST_F(NpyWriterTest, NumPyReadsIt) {
  if (std::system("/usr/bin/python3 -c 'import numpy' 2>/dev/null") != 0) {
    GTEST_SKIP() << "/usr/bin/python3 has no numpy";
  }
  const std::string path = Path("w.npy");
  auto writer = NpyWriter::Create(path, {2, 3}).value();
  ASSERT_TRUE(writer->Append(Bytes({1, 2, 3, 4, 5, 6.5})).ok());
  ASSERT_TRUE(writer->Commit().ok());
  const std::string program =
      "import numpy, sys; a = numpy.load(sys.argv[1]); "
      "sys.exit(not (a.shape == (2, 3) and a.dtype == numpy.float32 and a.flags.c_contiguous "
      "and a.tolist() == [[1, 2, 3], [4, 5, 6.5]]))";
  EXPECT_EQ(std::system(("/usr/bin/python3 -c '" + program + "' " + path).c_str()), 0);
}

TEST_F(NpyWriterTest, LeavesNothingAndKeepsTheOldFileWithoutCommit) {
  const std::string path = Path("w.npy");
  std::ofstream(path) << "old";
  {
    auto writer = NpyWriter::Create(path, {4}).value();
    ASSERT_TRUE(writer->Append(Bytes({1, 2})).ok());
    EXPECT_EQ(writer->Commit().code(), absl::StatusCode::kDataLoss);
  }
  EXPECT_EQ(Contents(path), "old");
  EXPECT_EQ(Files(), 1u);
}

TEST_F(NpyWriterTest, SaysInOneLineWhatIsWrongWithTheFile) {
  const absl::Status missing = NpyWriter::Create(Path("none/w.npy"), {4}).status();
  EXPECT_TRUE(Refused(missing, absl::StatusCode::kNotFound));
  const absl::Status directory = NpyWriter::Create(directory_, {4}).status();
  EXPECT_TRUE(Refused(directory, absl::StatusCode::kInvalidArgument));
}

TEST_F(NpyWriterTest, AWriteThatFailsLeavesNothing) {
  // A limit on file sizes stands for the full disk.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 1000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  {
    auto writer = NpyWriter::Create(Path("w.npy"), {1024}).value();
    const absl::Status status = writer->Append(std::string(4096, 'x'));
    EXPECT_TRUE(Refused(status, absl::StatusCode::kUnknown));
  }
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(Files(), 0u);
}

}  // namespace
}  // namespace ballast::client::cli
