#include "cpu_optimizer_service/common/system/available_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>

#include "tests/support/address_limit.h"

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
    const std::filesystem::path path = folder_ + "/" + name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  int64_t Available() const { return AvailableMemoryBytes(files_); }

  const std::string folder_;
  const MemoryFiles files_ = {
      .meminfo = folder_ + "/meminfo", .groups_of_process = folder_ + "/self", .groups = folder_};
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

TEST_F(AvailableMemoryTest, IsWhatTheProcessSOwnGroupLeaves) {
  Write("meminfo", "MemAvailable:  700 kB\n");
  Write("self", "0::/system.slice/ballastd.service\n");
  Write("memory.max", "max\n");
  Write("memory.current", "90000\n");
  Write("system.slice/ballastd.service/memory.max", "60000\n");
  Write("system.slice/ballastd.service/memory.current", "20000\n");
  EXPECT_EQ(Available(), 40000);
}

TEST_F(AvailableMemoryTest, IsWhatTheTightestOfTheGroupsAboveLeaves) {
  Write("meminfo", "MemAvailable:  700 kB\n");
  Write("self", "0::/a/b/c\n");
  for (const char* group : {"a", "a/b", "a/b/c"}) {
    Write(std::string(group) + "/memory.max", "80000\n");
    Write(std::string(group) + "/memory.current", "10000\n");
  }
  Write("a/b/memory.current", "75000\n");  // Most of it is another's.
  EXPECT_EQ(Available(), 5000);
}

TEST_F(AvailableMemoryTest, OfVersion1IsReadInTheMemoryHierarchy) {
  Write("meminfo", "MemAvailable:  700 kB\n");
  Write("self", "11:cpu,memory:/docker/1f\n1:name=systemd:/x\n0::/\n");
  Write("memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("memory/memory.usage_in_bytes", "5000\n");
  EXPECT_EQ(Available(), 700 * 1024);
  Write("memory/docker/1f/memory.limit_in_bytes", "50000\n");
  Write("memory/docker/1f/memory.usage_in_bytes", "30000\n");
  Write("memory/docker/1f/memory.stat", "inactive_file 1\ntotal_inactive_file 2000\n");
  EXPECT_EQ(Available(), 22000);
}

// A container sees its own group as the mount, and the host's path to it.
TEST_F(AvailableMemoryTest, OfAContainerIsThatOfTheMount) {
  Write("meminfo", "MemAvailable:  700 kB\n");
  Write("self", "4:memory:/kubepods/pod7/1f\n0::/kubepods/pod7/1f\n");
  Write("memory/memory.limit_in_bytes", "50000\n");
  Write("memory/memory.usage_in_bytes", "10000\n");
  EXPECT_EQ(Available(), 40000);
}

TEST_F(AvailableMemoryTest, IsWhatTheAddressSpaceHasLeft) {
  constexpr int64_t kMore = int64_t{1} << 40;
  const ScopedAddressLimit limit(kMore);
  const int64_t available_bytes = Available();
  EXPECT_LE(available_bytes, kMore + (1 << 20));
  EXPECT_GE(available_bytes, kMore / 2);
}

TEST(AvailableMemory, OfThisMachineIsSomething) { EXPECT_GT(AvailableMemoryBytes(), 0); }

class MemoryLimitTest : public AvailableMemoryTest {
 protected:
  int64_t LimitOf10000BytesIn(const std::string& cgroup_limit) {
    Write("memory.max", cgroup_limit + "\n");
    Write("memory.current", "0\n");
    return DefaultMemoryLimitBytes(files_, 10000);
  }
};

TEST_F(MemoryLimitTest, IsMostOfThePhysicalMemoryWithoutAControlGroup) {
  EXPECT_EQ(DefaultMemoryLimitBytes(files_, 10000), 8000);
  EXPECT_GT(PhysicalMemoryBytes(), 1 << 20);
}

TEST_F(MemoryLimitTest, IsMostOfWhatTheMachineHasLeft) {
  Write("meminfo", "MemAvailable:  5 kB\n");
  EXPECT_EQ(DefaultMemoryLimitBytes(files_, 10000), 4096);
}

TEST_F(MemoryLimitTest, IsMostOfWhatTheControlGroupHasLeftIfThatIsLess) {
  EXPECT_EQ(LimitOf10000BytesIn("5000"), 4000);
  EXPECT_EQ(LimitOf10000BytesIn("20000"), 8000);
  Write("memory.current", "15000\n");
  EXPECT_EQ(DefaultMemoryLimitBytes(files_, 10000), 4000);
}

TEST_F(MemoryLimitTest, IgnoresAControlGroupWithoutANumber) {
  for (const char* text : {"max", "", "-1", "0", "99999999999999999999"}) {
    EXPECT_EQ(LimitOf10000BytesIn(text), 8000) << text;
  }
}

}  // namespace
}  // namespace ballast
