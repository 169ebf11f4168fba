#include "cpu_optimizer_service/common/system/available_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>

namespace ballast {
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

class MemoryLimitTest : public AvailableMemoryTest {
 protected:
  int64_t LimitOf10000BytesIn(const std::string& cgroup_limit) {
    Write("memory.max", cgroup_limit + "\n");
    return DefaultMemoryLimitBytes(10000, folder_);
  }
};

TEST_F(MemoryLimitTest, IsMostOfThePhysicalMemoryWithoutAControlGroup) {
  EXPECT_EQ(DefaultMemoryLimitBytes(10000, "/nonexistent"), 8000);
  EXPECT_GT(PhysicalMemoryBytes(), 1 << 20);
}

TEST_F(MemoryLimitTest, IsMostOfTheControlGroupsIfThatIsLess) {
  EXPECT_EQ(LimitOf10000BytesIn("5000"), 4000);
  EXPECT_EQ(LimitOf10000BytesIn("20000"), 8000);
}

TEST_F(MemoryLimitTest, IgnoresAControlGroupWithoutANumber) {
  for (const char* text : {"max", "", "-1", "0", "99999999999999999999"}) {
    EXPECT_EQ(LimitOf10000BytesIn(text), 8000) << text;
  }
}

}  // namespace
}  // namespace ballast
