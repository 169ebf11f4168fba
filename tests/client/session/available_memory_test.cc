#include "client/session/available_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>

namespace ballast::client {
namespace {

class AvailableMemoryTest : public testing::Test {
 protected:
  AvailableMemoryTest() : folder_(testing::TempDir() + "available_memory_test") {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
  }
  ~AvailableMemoryTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ + "/" + name) << text;
  }
  int64_t Available() const { return AvailableMemoryBytes(folder_ + "/meminfo", folder_); }

  const std::string folder_;
};

TEST_F(AvailableMemoryTest, IsWhatTheKernelSaysWhereNoControlGroupLimitsIt) {
  EXPECT_EQ(Available(), std::numeric_limits<int64_t>::max());
  Write("meminfo", "MemTotal:  900 kB\nMemFree:  10 kB\nMemAvailable:  700 kB\n");
  EXPECT_EQ(Available(), 700 * 1024);
  Write("memory.max", "max\n");
  Write("memory.current", "5000\n");
  EXPECT_EQ(Available(), 700 * 1024);
}

TEST_F(AvailableMemoryTest, IsWhatIsLeftUnderTheControlGroupSLimitIfThatIsLess) {
  Write("meminfo", "MemAvailable:  700 kB\n");
  Write("memory.max", "60000\n");
  Write("memory.current", "50000\n");
  EXPECT_EQ(Available(), 10000);
  Write("memory.stat", "anon 1\ninactive_file 3000\nactive_file 7\n");
  EXPECT_EQ(Available(), 13000);
  Write("memory.current", "70000\n");
  EXPECT_EQ(Available(), 0);
  Write("memory.max", "100000000\n");
  EXPECT_EQ(Available(), 700 * 1024);
}

TEST(AvailableMemory, OfThisMachineIsSomething) { EXPECT_GT(AvailableMemoryBytes(), 0); }

}  // namespace
}  // namespace ballast::client
