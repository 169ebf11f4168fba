#include "cpu_optimizer_service/host/huge_pages.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kSmaps[] =
    "7f0000000000-7f0010000000 rw-p 00000000 00:00 0 \n"
    "Size:             262144 kB\n"
    "Rss:              200000 kB\n"
    "AnonHugePages:    150000 kB\n"
    "VmFlags: rd wr mr mw me ac sd hg\n"
    "7f0010000000-7f0020000000 rw-p 00000000 00:00 0  [anon: x-y z]\n"
    "Rss:              200000 kB\n"
    "AnonHugePages:         0 kB\n"
    "7f0030000000-7f0040000000 rw-p 00000000 00:00 0\n"
    "Rss:                   0 kB\n"
    "AnonHugePages:         0 kB\n";

TEST(HugePages, ShareIsOfThePresentMemoryOfTheMappingsThatOverlap) {
  EXPECT_EQ(HugePageShare(kSmaps, 0x7f0000000000, 0x7f0010000000), 0.75);
  EXPECT_EQ(HugePageShare(kSmaps, 0x7f000ffff000, 0x7f0010000001), 0.375);
  EXPECT_EQ(HugePageShare(kSmaps, 0x7f0010000000, 0x7f0010001000), 0.0);
}

TEST(HugePages, ShareIsUnknownWhereNothingIsPresentOrSaid) {
  EXPECT_EQ(HugePageShare(kSmaps, 0x7f0030000000, 0x7f0040000000), std::nullopt);
  EXPECT_EQ(HugePageShare(kSmaps, 0x7f0040000000, 0x7f0050000000), std::nullopt);
  EXPECT_EQ(HugePageShare("", 0, 1), std::nullopt);
  EXPECT_EQ(HugePageShare("junk\n-\nRss: x kB\n7f-80 rw\nRss: 12\nRss: x kB\n", 0, 0xff),
            std::nullopt);
}

TEST(HugePages, APoolGivesWhatIsFreeAndNotPromisedAndWhatItMayAdd) {
  const std::string pools = testing::TempDir() + "/pools";
  const std::string pool = pools + "/hugepages-2048kB/";
  std::filesystem::create_directories(pool);
  const auto write = [&](const char* name, int pages) {
    std::ofstream(pool + name) << pages << "\n";
  };
  EXPECT_EQ(HugePagePoolBytes(2 << 20, pools), std::nullopt);
  write("free_hugepages", 10);
  EXPECT_EQ(HugePagePoolBytes(2 << 20, pools), 20 << 20);
  write("resv_hugepages", 3);
  EXPECT_EQ(HugePagePoolBytes(2 << 20, pools), 14 << 20);
  write("nr_overcommit_hugepages", 8);
  write("surplus_hugepages", 6);
  EXPECT_EQ(HugePagePoolBytes(2 << 20, pools), 18 << 20);
  EXPECT_EQ(HugePagePoolBytes(1 << 30, pools), std::nullopt);
  write("nr_overcommit_hugepages", 0);
  write("resv_hugepages", 11);
  EXPECT_EQ(HugePagePoolBytes(2 << 20, pools), 0);
  std::filesystem::remove_all(pools);
}

TEST(HugePages, WarningNamesTheMemoryAndTheSetting) {
  EXPECT_EQ(HugePageWarning(std::nullopt, "job a state"), "");
  EXPECT_EQ(HugePageWarning(0.9, "job a state"), "");
  EXPECT_THAT(HugePageWarning(0.25, "job a state"),
              AllOf(HasSubstr("job a state got 25%"), HasSubstr("transparent_hugepage/enabled")));
}

}  // namespace
}  // namespace ballast
