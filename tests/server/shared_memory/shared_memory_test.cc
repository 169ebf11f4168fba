#include "server/shared_memory/shared_memory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>

#include "cpu_optimizer_service/common/layout.h"

namespace ballast::server {
namespace {

constexpr int kChunks = 3;  // The last one is rank 1's.

class SharedMemoryTest : public testing::Test {
 protected:
  SharedMemoryTest() : places_(MakePlaces(0)), memory_(Make(places_)) {}

  static RankMemoryLayout MakePlaces(int rank) {
    LayoutSpec spec;
    spec.world_size = 2;
    spec.group_count = 1;
    spec.parameters = {{.name = "w", .shape = {kChunks * kBlockElements}}};
    spec.partitions = {
        {.rank = 0, .group = 0, .begin = 0, .end = 2 * kBlockElements},
        {.rank = 1, .group = 0, .begin = 2 * kBlockElements, .end = kChunks * kBlockElements}};
    spec.chunk_elements = kBlockElements;
    return RankMemoryLayout(Layout::Create(spec).value(), {GroupSpec{}}, rank);
  }

  std::shared_ptr<SharedMemory> Make(const RankMemoryLayout& places) {
    return SharedMemory::Create(places, budget_.Reserve(places.size_bytes(), "test").value())
        .value();
  }

  // As the other process has it.
  void MapTheFile() {
    descriptor_ = dup(memory_->file_descriptor());
    void* mapping =
        mmap(nullptr, places_.size_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    ASSERT_NE(mapping, MAP_FAILED);
    theirs_ = {static_cast<std::byte*>(mapping), static_cast<size_t>(places_.size_bytes())};
  }
  ~SharedMemoryTest() override {
    if (theirs_.data() != nullptr) munmap(theirs_.data(), theirs_.size());
    if (descriptor_ >= 0) close(descriptor_);
  }

  absl::Span<std::byte> Theirs(const RankMemoryLayout::Place& place) {
    return theirs_.subspan(place.offset_bytes, place.bytes);
  }
  int64_t BackedBytes() const {
    struct stat file = {};
    fstat(descriptor_, &file);
    return file.st_blocks * 512;
  }

  MemoryBudget budget_{1 << 20};
  const RankMemoryLayout places_;
  std::shared_ptr<SharedMemory> memory_;
  int descriptor_ = -1;
  absl::Span<std::byte> theirs_;
};

TEST_F(SharedMemoryTest, ShowsBothSidesWhatTheOtherWrites) {
  MapTheFile();
  EXPECT_THAT(theirs_, testing::Each(std::byte{0}));
  for (const int chunk : {0, 1}) {
    ASSERT_EQ(memory_->gradient(chunk).size(), 2 * kBlockElements);
    ASSERT_EQ(memory_->weights(chunk).size(), 2 * kBlockElements);
    std::ranges::fill(Theirs(places_.gradient(chunk)), static_cast<std::byte>(10 + chunk));
    std::ranges::fill(memory_->weights(chunk), static_cast<std::byte>(20 + chunk));
  }
  for (const int chunk : {0, 1}) {
    EXPECT_THAT(memory_->gradient(chunk), testing::Each(static_cast<std::byte>(10 + chunk)));
    EXPECT_THAT(Theirs(places_.weights(chunk)), testing::Each(static_cast<std::byte>(20 + chunk)));
  }
  EXPECT_TRUE(memory_->gradient(2).empty());
  EXPECT_TRUE(memory_->weights(2).empty());
}

TEST_F(SharedMemoryTest, CannotBeMadeSmallerOrLargerByThePeerNorUnsealed) {
  MapTheFile();
  EXPECT_EQ(BackedBytes(), places_.size_bytes());
  for (const int64_t bytes : {int64_t{0}, places_.size_bytes() - 4096, places_.size_bytes() + 1}) {
    EXPECT_EQ(ftruncate(descriptor_, bytes), -1);
    EXPECT_EQ(errno, EPERM);
  }
  // Nor could writing be sealed off, which would make our next write fail.
  EXPECT_EQ(fcntl(descriptor_, F_ADD_SEALS, F_SEAL_WRITE), -1);
  EXPECT_EQ(errno, EPERM);
  // A write fills a hole again: the values are lost, and nothing else.
  memory_->weights(0)[0] = std::byte{1};
  EXPECT_EQ(
      fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, places_.size_bytes()),
      0);
  EXPECT_EQ(memory_->weights(0)[0], std::byte{0});
  memory_->weights(0)[0] = std::byte{2};
  EXPECT_EQ(Theirs(places_.weights(0))[0], std::byte{2});
}

TEST_F(SharedMemoryTest, GivesItsReservationBackAndThePagesOfAPeerThatIsDone) {
  for (const bool done : {false, true}) {
    memory_ = Make(places_);
    MapTheFile();
    theirs_[0] = std::byte{3};
    EXPECT_EQ(budget_.used_bytes(), places_.size_bytes());
    if (done) memory_->PeerIsDone();
    EXPECT_EQ(theirs_[0], std::byte{3});  // Not before the end.
    memory_ = nullptr;
    EXPECT_EQ(budget_.used_bytes(), 0);
    EXPECT_EQ(BackedBytes(), done ? 0 : places_.size_bytes());
    EXPECT_EQ(theirs_[0], done ? std::byte{0} : std::byte{3});
    munmap(theirs_.data(), theirs_.size());
    theirs_ = {};
    close(descriptor_);
    descriptor_ = -1;
  }
}

TEST_F(SharedMemoryTest, IsRefusedWhereTheSystemHasNoRoom) {
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small = {.rlim_cur = 4096, .rlim_max = limit.rlim_max};
  const auto before = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = SharedMemory::Create(places_, {}).status();
  setrlimit(RLIMIT_FSIZE, &limit);
  signal(SIGXFSZ, before);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
}

}  // namespace
}  // namespace ballast::server
