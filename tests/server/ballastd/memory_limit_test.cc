#include "server/ballastd/memory_limit.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

namespace ballast::server {
namespace {

int64_t LimitOf10000BytesIn(const std::string& cgroup_limit) {
  const std::string path = testing::TempDir() + "memory_max_" + std::to_string(getpid());
  std::ofstream(path) << cgroup_limit << "\n";
  const int64_t limit_bytes = DefaultMemoryLimitBytes(10000, path);
  std::remove(path.c_str());
  return limit_bytes;
}

TEST(MemoryLimit, IsMostOfThePhysicalMemoryWithoutAControlGroup) {
  EXPECT_EQ(DefaultMemoryLimitBytes(10000, "/nonexistent/memory.max"), 8000);
  EXPECT_GT(PhysicalMemoryBytes(), 1 << 20);
}

TEST(MemoryLimit, IsMostOfTheControlGroupsIfThatIsLess) {
  EXPECT_EQ(LimitOf10000BytesIn("5000"), 4000);
  EXPECT_EQ(LimitOf10000BytesIn("20000"), 8000);
}

TEST(MemoryLimit, IgnoresAControlGroupWithoutANumber) {
  for (const char* text : {"max", "", "-1", "0", "99999999999999999999"}) {
    EXPECT_EQ(LimitOf10000BytesIn(text), 8000) << text;
  }
}

}  // namespace
}  // namespace ballast::server
