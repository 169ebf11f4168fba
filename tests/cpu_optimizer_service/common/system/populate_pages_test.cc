#include "cpu_optimizer_service/common/system/populate_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <vector>

#include "tests/support/threads.h"

namespace ballast {
namespace {

// A file in memory that is shorter than its mapping.
class Mapping {
 public:
  Mapping(size_t file_bytes, size_t bytes) : bytes_(bytes) {
    file_ = memfd_create("populate-pages-test", MFD_CLOEXEC);
    EXPECT_EQ(ftruncate(file_, static_cast<off_t>(file_bytes)), 0);
    void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    EXPECT_NE(mapping, MAP_FAILED);
    memory_ = static_cast<std::byte*>(mapping);
  }
  ~Mapping() {
    munmap(memory_, bytes_);
    close(file_);
  }
  std::byte* memory() const { return memory_; }
  // How many pages are there.
  int64_t resident(size_t page_bytes) const {
    std::vector<unsigned char> there(bytes_ / page_bytes);
    EXPECT_EQ(mincore(memory_, bytes_, there.data()), 0);
    return std::count_if(there.begin(), there.end(), [](unsigned char page) { return page & 1; });
  }

 private:
  const size_t bytes_;
  int file_ = -1;
  std::byte* memory_ = nullptr;
};

TEST(PopulatePages, BacksEveryPageWhateverThePieces) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (const size_t piece_pages : {1, 5, 64, 1000}) {
    Mapping mapping(64 * page, 64 * page);
    ASSERT_EQ(mapping.resident(page), 0);
    const int failed = PopulatePages(mapping.memory(), 64 * page, piece_pages * page);
    if (failed == EINVAL) GTEST_SKIP() << "a kernel before 5.14";
    EXPECT_EQ(failed, 0);
    EXPECT_EQ(mapping.resident(page), 64);
  }
}

TEST(PopulatePages, SaysWhatAPieceFailedWith) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (const size_t piece_pages : {1, 64}) {
    Mapping mapping(32 * page, 64 * page);
    EXPECT_NE(PopulatePages(mapping.memory(), 64 * page, piece_pages * page), 0);
  }
}

// In a process of its own: this one is to have threads again.
TEST(PopulatePagesDeathTest, WithoutOtherThreadsTheCallersBacksAll) {
  if (!MayForbidThreads()) {
    GTEST_SKIP() << "root has no limit of threads, and can be no other user here";
  }
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto populate = [] {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    Mapping mapping(64 * page, 64 * page);
    ForbidThreads();
    const int failed = PopulatePages(mapping.memory(), 64 * page, page);
    const bool all = failed == 0 && mapping.resident(page) == 64;
    std::_Exit(all || failed == EINVAL ? 0 : 1);  // EINVAL: a kernel before 5.14.
  };
  EXPECT_EXIT(populate(), testing::ExitedWithCode(0), "");
}

TEST(PopulatePages, OfNothingIsNothing) { EXPECT_EQ(PopulatePages(nullptr, 0), 0); }

}  // namespace
}  // namespace ballast
