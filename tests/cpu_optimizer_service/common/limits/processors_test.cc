#include "cpu_optimizer_service/common/limits/processors.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <thread>

namespace ballast {
namespace {

class ProcessorsTest : public testing::Test {
 protected:
  ProcessorsTest() : folder_(testing::TempDir() + "processors_test") {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
  }
  ~ProcessorsTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& text) {
    const std::filesystem::path path = folder_ + "/" + name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  // On a host of 128.
  UsableProcessors Found() const { return FindUsableProcessors(files_, {128, "128 of the host"}); }

  const std::string folder_;
  const ControlGroupFiles files_ = {.groups_of_process = folder_ + "/self", .groups = folder_};
};

TEST_F(ProcessorsTest, AreAllWhereNoControlGroupHasAQuota) {
  EXPECT_EQ(Found().count, 128);
  for (const char* text :
       {"max 100000", "", "0 100000", "-1 100000", "200000 0", "200000", "x y"}) {
    Write("cpu.max", text);
    EXPECT_EQ(Found().count, 128) << text;
    EXPECT_EQ(Found().bound, "128 of the host") << text;
  }
}

TEST_F(ProcessorsTest, AreWhatTheQuotaPaysForRoundedUp) {
  Write("cpu.max", "1600000 100000\n");
  EXPECT_EQ(Found().count, 16);
  EXPECT_EQ(Found().bound, "CPU quota of 16 in " + folder_);
  Write("cpu.max", "150000 100000\n");
  EXPECT_EQ(Found().count, 2);
  EXPECT_EQ(Found().bound, "CPU quota of 1.5 in " + folder_);
  Write("cpu.max", "1000 100000\n");
  EXPECT_EQ(Found().count, 1);
  Write("cpu.max", "12850000 100000\n");
  EXPECT_EQ(Found().count, 128);
}

TEST_F(ProcessorsTest, AreWhatTheSmallestQuotaFromTheProcessSGroupToTheRootPaysFor) {
  Write("self", "0::/kubepods/pod7/1f\n");
  Write("kubepods/cpu.max", "9600000 100000\n");
  Write("kubepods/pod7/cpu.max", "400000 50000\n");
  Write("kubepods/pod7/1f/cpu.max", "max 100000\n");
  Write("kubepods/another/cpu.max", "100000 100000\n");
  EXPECT_EQ(Found().count, 8);
  EXPECT_EQ(Found().bound, "CPU quota of 8 in " + folder_ + "/kubepods/pod7");
  Write("kubepods/pod7/1f/cpu.max", "300000 100000\n");
  EXPECT_EQ(Found().count, 3);
}

// A container sees its own group as the mount. With a namespace for control groups its path is "/",
// or leads above the mount; without one it is the host's.
TEST_F(ProcessorsTest, OfAContainerAreThoseOfTheMount) {
  Write("cpu.max", "500000 100000\n");
  for (const char* path : {"/", "/../sibling", "/kubepods/pod7/1f"}) {
    Write("self", std::string("0::") + path + "\n");
    EXPECT_EQ(Found().count, 5) << path;
  }
}

TEST_F(ProcessorsTest, OfVersion1AreReadInTheFolderOfTheController) {
  Write("self", "11:memory:/docker/1f\n4:cpu,cpuacct:/docker/1f\n0::/\n");
  Write("memory/docker/1f/cpu.cfs_quota_us", "100000\n");
  Write("cpu/cpu.cfs_quota_us", "-1\n");
  Write("cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(Found().count, 128);
  Write("cpu/docker/1f/cpu.cfs_quota_us", "650000\n");
  Write("cpu/docker/1f/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(Found().count, 7);
  std::filesystem::rename(folder_ + "/cpu", folder_ + "/cpu,cpuacct");
  EXPECT_EQ(Found().count, 7);
}

TEST(Processors, OfABoundThreadAreThoseItIsBoundTo) {
  const UsableProcessors before = ProcessorsInAffinityMask();
  EXPECT_GE(before.count, 1);
  std::thread([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_EQ(ProcessorsInAffinityMask().count, 1);
    // What it starts is bound as well.
    std::thread([] { EXPECT_EQ(UsableProcessorCount(), 1); }).join();
  }).join();
  EXPECT_EQ(ProcessorsInAffinityMask().count, before.count);
}

}  // namespace
}  // namespace ballast
