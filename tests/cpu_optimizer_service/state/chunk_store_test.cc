#include "cpu_optimizer_service/state/chunk_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/host/file_keeper.h"
#include "cpu_optimizer_service/host/named_memory.h"

namespace ballast {
namespace {

class ChunkStoreTest : public testing::Test {
 protected:
  ChunkStoreTest() {
    LayoutSpec spec;
    spec.group_count = 2;
    spec.chunk_elements = 512;
    spec.parameters = {{.name = "a", .shape = {1280}, .group = 0},
                       {.name = "b", .shape = {256}, .group = 1}};
    spec.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 1280},
                       {.rank = 0, .group = 1, .begin = 0, .end = 256}};
    layout_ = std::make_unique<Layout>(Layout::Create(spec).value());
    store_ =
        ChunkStore::Create(
            *layout_,
            {.planes = {PlanesOf(HyperParameters()), PlanesOf(HyperParameters{.amsgrad = true})},
             .budget = &budget_,
             .owner = "test"},
            *arenas_)
            .value();
  }

  // Writes `value` into every plane of a new version.
  void Write(int chunk, float value, uint64_t step,
             Destination destination = Destination::kInPlaceIfFree) {
    const auto write = store_->BeginWrite(chunk, destination).value();
    Fill(write, value);
    store_->Publish(write, step);
  }
  void Fill(const ChunkStore::Write& write, float value) {
    for (void* plane : write.to.planes) {
      if (plane == nullptr) continue;
      std::fill_n(static_cast<float*>(plane), layout_->chunks()[write.chunk].elements, value);
    }
  }

  MemoryBudget budget_{512 * 4 * 3 * 2};  // Room for two more slots of a whole chunk.
  std::unique_ptr<ArenaFactory> arenas_ = MakeAnonymousArenaFactory();
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<ChunkStore> store_;
};

TEST_F(ChunkStoreTest, SlotsHaveThePlanesOfTheirGroupAndDoNotOverlap) {
  EXPECT_EQ(store_->Published(0)[Plane::kMaxExpAvgSq], nullptr);
  EXPECT_NE(store_->Published(3)[Plane::kMaxExpAvgSq], nullptr);
  for (int chunk = 0; chunk < 4; ++chunk) Write(chunk, static_cast<float>(chunk + 1), 1);
  for (int chunk = 0; chunk < 4; ++chunk) {
    for (const void* memory : store_->Published(chunk).planes) {
      if (memory == nullptr) continue;
      const auto* const plane = static_cast<const float*>(memory);
      EXPECT_EQ(plane[0], chunk + 1);
      EXPECT_EQ(plane[layout_->chunks()[chunk].elements - 1], chunk + 1);
    }
    EXPECT_EQ(store_->step(chunk), 1u);
  }
}

// Places in an arena are near to the threads of the chunks whose places they are.
TEST(ChunkStore, ChunksKeepToTheirOwnTwoSlots) {
  constexpr int kChunks = 8;
  LayoutSpec spec;
  spec.chunk_elements = 256;
  spec.parameters = {{.name = "a", .shape = {kChunks * 256}, .group = 0}};
  spec.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = kChunks * 256}};
  const Layout layout = Layout::Create(spec).value();
  const std::unique_ptr<ArenaFactory> arenas = MakeAnonymousArenaFactory();
  const auto store =
      ChunkStore::Create(
          layout,
          {.planes = {PlanesOf(HyperParameters())}, .second_versions = true, .owner = "test"},
          *arenas)
          .value();
  for (uint64_t step = 1; step <= 5; ++step) {
    std::vector<ChunkStore::Write> writes;
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = static_cast<int>((i * 3 + step) % kChunks);
      writes.push_back(store->BeginWrite(chunk, Destination::kFresh).value());
    }
    for (const ChunkStore::Write& write : writes) store->Publish(write, step);
    for (int chunk = 1; chunk < kChunks; ++chunk) {
      EXPECT_EQ(store->Published(chunk)[Plane::kMaster] - store->Published(0)[Plane::kMaster],
                chunk * 3 * 256)
          << step;
    }
  }
}

TEST_F(ChunkStoreTest, WritesPublishedTogetherAreAsIfOneByOne) {
  const std::vector<ChunkPin> pins = store_->Pin({0}).value();
  std::vector<ChunkStore::Write> writes;
  writes.push_back(store_->BeginWrite(0, Destination::kInPlaceIfFree).value());
  writes.push_back(store_->BeginWrite(2, Destination::kInPlaceIfFree).value());
  Fill(writes[0], 1);
  Fill(writes[1], 2);
  EXPECT_EQ(store_->Published(0)[Plane::kMaster][0], 0);
  store_->Publish(writes, 5);
  EXPECT_EQ(pins[0].slot()[Plane::kMaster][0], 0);
  EXPECT_EQ(store_->Published(0)[Plane::kMaster][0], 1);
  EXPECT_EQ(store_->Published(2)[Plane::kMaster][0], 2);
  EXPECT_EQ(store_->step(0), 5u);
  EXPECT_EQ(store_->step(1), 0u);
  EXPECT_EQ(store_->step(2), 5u);
}

TEST_F(ChunkStoreTest, WritesInPlaceWhenNobodyNeedsTheOldVersion) {
  const Slot before = store_->Published(0);
  const auto write = store_->BeginWrite(0, Destination::kInPlaceIfFree).value();
  EXPECT_TRUE(write.in_place);
  EXPECT_EQ(write.from.planes, write.to.planes);
  store_->Publish(write, 1);
  EXPECT_EQ(store_->Published(0).planes, before.planes);
  EXPECT_EQ(budget_.used_bytes(), 0);
}

TEST_F(ChunkStoreTest, APinnedVersionStaysAndTheNextIsWrittenBesideIt) {
  Write(0, 1, 1);
  auto pins = store_->Pin({0}).value();
  Write(0, 2, 2);
  Write(0, 3, 3);
  EXPECT_EQ(pins[0].slot()[Plane::kMaster][511], 1);
  EXPECT_EQ(store_->Published(0)[Plane::kMaster][511], 3);
  EXPECT_EQ(store_->step(0), 3u);
  pins.clear();
  // The next write goes back to the chunk's first slot, and what was beyond one per chunk is given
  // back.
  Write(0, 4, 4);
  EXPECT_EQ(store_->Published(0)[Plane::kExpAvgSq][0], 4);
  EXPECT_EQ(budget_.used_bytes(), 0);
  EXPECT_TRUE(store_->BeginWrite(0, Destination::kInPlaceIfFree).value().in_place);
}

TEST_F(ChunkStoreTest, APinThatNobodyWroteUnderGivesItsSpareBack) {
  auto pins = store_->Pin({0, 1, 0}).value();
  EXPECT_EQ(pins.size(), 3u);
  EXPECT_EQ(budget_.used_bytes(), 2 * 512 * 4 * 3);
  pins.clear();
  EXPECT_EQ(budget_.used_bytes(), 0);
}

TEST_F(ChunkStoreTest, PinningBeyondTheBudgetIsRefusedWholly) {
  const auto pins = store_->Pin({0, 1, 2});
  EXPECT_EQ(pins.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(budget_.used_bytes(), 0);
  EXPECT_TRUE(store_->BeginWrite(0, Destination::kInPlaceIfFree).value().in_place);
}

TEST_F(ChunkStoreTest, SecondVersionsNeedNoFurtherMemory) {
  MemoryBudget none(0);
  const auto store =
      ChunkStore::Create(
          *layout_,
          {.planes = {PlanesOf(HyperParameters()), PlanesOf(HyperParameters{.amsgrad = true})},
           .second_versions = true,
           .budget = &none,
           .owner = "test"},
          *arenas_)
          .value();
  for (uint64_t step = 1; step < 4; ++step) {
    std::vector<ChunkStore::Write> writes;
    for (int chunk = 0; chunk < 4; ++chunk) {
      writes.push_back(store->BeginWrite(chunk, Destination::kFresh).value());
      EXPECT_NE(writes.back().to[Plane::kMaster], store->Published(chunk)[Plane::kMaster]);
      Fill(writes.back(), static_cast<float>(10 * step + chunk));
    }
    EXPECT_EQ(store->BeginWrite(0, Destination::kFresh).status().code(),
              absl::StatusCode::kResourceExhausted);
    for (const ChunkStore::Write& write : writes) {
      if (write.chunk == 2) {
        store->Drop(write);
      } else {
        store->Publish(write, step);
      }
    }
    for (const int chunk : {0, 1, 3}) {
      EXPECT_EQ(store->Published(chunk)[Plane::kExpAvgSq][255], 10 * step + chunk);
    }
    EXPECT_EQ(store->Published(2)[Plane::kMaster][0], 0);
  }
}

// Has what it was given, and so has each copy.
class CopiedKeeper final : public FileKeeper {
 public:
  CopiedKeeper() = default;
  CopiedKeeper(const CopiedKeeper& other) : FileKeeper() {
    for (const auto& [name, file] : other.kept_) (void)Keep(name, file.number());
  }
  absl::Status Keep(const std::string& name, int descriptor) override {
    const bool is_new = kept_.try_emplace(name, fcntl(descriptor, F_DUPFD_CLOEXEC, 0)).second;
    EXPECT_TRUE(is_new) << name;
    return absl::OkStatus();
  }
  void Drop(const std::string& name) override { kept_.erase(name); }
  std::map<std::string, FileDescriptor> TakeKept() override { return CopiedKeeper(*this).kept(); }
  std::map<std::string, FileDescriptor> kept() && { return std::move(kept_); }

 private:
  std::map<std::string, FileDescriptor> kept_;
};

TEST_F(ChunkStoreTest, TheNextProcessFindsVersionsBeyondBothOfEachChunk) {
  CopiedKeeper keeper;
  NamedMemory memory(keeper);
  NamedArenas arenas(memory, "uid", "test");
  MemoryBudget budget(int64_t{1} << 20);
  const auto create = [&](NamedArenas& in) {
    return ChunkStore::Create(
               *layout_,
               {.planes = {PlanesOf(HyperParameters()), PlanesOf(HyperParameters{.amsgrad = true})},
                .second_versions = true,
                .budget = &budget,
                .owner = "test",
                .named = &in},
               in)
        .value();
  };
  store_ = create(arenas);
  // A save pins what the first write leaves behind; with the second one there are no more places.
  auto pins = store_->Pin({0, 1, 2, 3}).value();
  for (uint64_t step = 1; step < 4; ++step) {
    std::vector<ChunkStore::Write> writes;
    for (int chunk = 0; chunk < 4; ++chunk) {
      writes.push_back(store_->BeginWrite(chunk, Destination::kFresh).value());
      Fill(writes.back(), static_cast<float>(10 * step + chunk));
    }
    store_->Publish(writes, step);
    // It dies here.
    CopiedKeeper left(keeper);
    NamedMemory later(left);
    NamedArenas later_arenas(later, "uid", "test");
    later_arenas.MustBeLeft(true);
    const auto taken_over = create(later_arenas);
    for (int chunk = 0; chunk < 4; ++chunk) {
      EXPECT_EQ(taken_over->step(chunk), step);
      EXPECT_EQ(taken_over->Published(chunk)[Plane::kMaster][0], 10 * step + chunk);
      EXPECT_EQ(taken_over->Published(chunk)[Plane::kExpAvgSq][255], 10 * step + chunk);
    }
  }
  pins.clear();
  store_.reset();
}

// What a store must hold that keeps previous versions, by chunk, and the store, through all that
// uses its places: decided and provisional writes, pins, going back, and the death of its process.
class PreviousVersions : public ChunkStoreTest {
 protected:
  static constexpr int kChunks = 4;
  using Values = std::array<float, kChunks>;  // By chunk, of all elements of all planes.
  struct Held {
    std::vector<ChunkPin> pins;
    Values values;
  };

  PreviousVersions() { store_.reset(); }
  ~PreviousVersions() override { StopProcess(); }

  void Start(bool second_versions, int64_t budget_bytes) {
    second_versions_ = second_versions;
    budget_bytes_ = budget_bytes;
    published_ = {};
    step_ = 0;
    has_previous_ = false;
    StopProcess();
    StartProcess(std::make_unique<CopiedKeeper>(), /*takes_over=*/false);
  }
  // Without a chance to do anything.
  void Die() {
    auto left = std::make_unique<CopiedKeeper>(*keeper_);
    StopProcess();
    StartProcess(std::move(left), /*takes_over=*/true);
  }
  // Some chunks by a provisional write, where there is a place for one; all others by decided ones.
  void Update(std::mt19937& random) {
    const uint64_t step = step_ + 1;
    Values next;
    std::vector<ChunkStore::Write> provisional;
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      next[chunk] = static_cast<float>(1000 * step + 10 * chunk + random() % 10);
      if (random() % 3 == 0) continue;
      const auto write = store_->BeginWrite(chunk, Destination::kFresh);
      if (!write.ok()) continue;
      Fill(*write, next[chunk]);
      provisional.push_back(*write);
    }
    Check();  // Nothing shows of them.
    std::vector<bool> done(kChunks, false);
    for (const ChunkStore::Write& write : provisional) {
      if (random() % 2 == 0) {
        store_->Drop(write);
      } else {
        store_->Publish(write, step);
        done[write.chunk] = true;
      }
    }
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (!done[chunk]) Write(chunk, next[chunk], step);
    }
    step_ = step;
    previous_ = std::exchange(published_, next);
    has_previous_ = true;
  }
  void Skip() {
    store_->SetStep(++step_);
    has_previous_ = false;
  }
  void GoBack() {
    if (!std::exchange(has_previous_, false)) return;
    store_->SwitchBack(--step_);
    published_ = previous_;
  }
  void Hold() {
    auto pins = store_->Pin({0, 1, 2, 3});
    if (pins.ok()) held_.push_back({.pins = *std::move(pins), .values = published_});
  }
  void Check() const {
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      EXPECT_EQ(store_->step(chunk), step_);
      ExpectAll(store_->Published(chunk), chunk, published_[chunk]);
      for (const Held& held : held_) ExpectAll(held.pins[chunk].slot(), chunk, held.values[chunk]);
    }
  }

  std::vector<Held> held_;

 private:
  void ExpectAll(const Slot& slot, int chunk, float value) const {
    for (const void* memory : slot.planes) {
      if (memory == nullptr) continue;
      const auto* const plane = static_cast<const float*>(memory);
      const float* const end = plane + layout_->chunks()[chunk].elements;
      EXPECT_EQ(std::count(plane, end, value), end - plane) << "chunk " << chunk;
    }
  }
  void StartProcess(std::unique_ptr<CopiedKeeper> keeper, bool takes_over) {
    keeper_ = std::move(keeper);
    memory_.emplace(*keeper_);
    arenas_in_.emplace(*memory_, "uid", "test");
    arenas_in_->MustBeLeft(takes_over);
    budget_in_.emplace(budget_bytes_);
    store_ =
        ChunkStore::Create(
            *layout_,
            {.planes = {PlanesOf(HyperParameters()), PlanesOf(HyperParameters{.amsgrad = true})},
             .second_versions = second_versions_,
             .keep_previous = true,
             .budget = &*budget_in_,
             .owner = "test",
             .named = &*arenas_in_},
            *arenas_in_)
            .value();
    arenas_in_->MustBeLeft(false);
  }
  void StopProcess() {
    held_.clear();
    store_.reset();
  }

  bool second_versions_ = false;
  int64_t budget_bytes_ = 0;
  std::unique_ptr<CopiedKeeper> keeper_;
  std::optional<NamedMemory> memory_;
  std::optional<NamedArenas> arenas_in_;
  std::optional<MemoryBudget> budget_in_;
  Values published_ = {};
  Values previous_ = {};
  uint64_t step_ = 0;
  bool has_previous_ = false;
};

TEST_F(PreviousVersions, AreThereWhateverIsPinnedWrittenAndLost) {
  for (const bool second_versions : {false, true}) {
    for (const int64_t budget_bytes : {0, 40'000, 1 << 20}) {
      for (unsigned seed = 0; seed < 30; ++seed) {
        SCOPED_TRACE(testing::Message() << "second versions " << second_versions << ", budget "
                                        << budget_bytes << ", seed " << seed);
        std::mt19937 random(seed);
        Start(second_versions, budget_bytes);
        for (int i = 0; i < 60; ++i) {
          switch (random() % 8) {
            case 0:
            case 1:
            case 2:
              Update(random);
              break;
            case 3:
              Hold();
              break;
            case 4:
              if (!held_.empty()) held_.erase(held_.begin() + random() % held_.size());
              break;
            case 5:
              GoBack();
              break;
            case 6:
              Skip();
              break;
            case 7:
              if (random() % 2 == 0) Die();
              break;
          }
          Check();
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(ChunkStoreTest, ADroppedVersionLeavesAPlaceForTheWriterOfAPinnedChunk) {
  const auto pins = store_->Pin({0, 1}).value();  // The budget is used up.
  store_->Drop(store_->BeginWrite(0, Destination::kFresh).value());
  EXPECT_FALSE(store_->Pin({2}).ok());
  Write(0, 7, 1);
  EXPECT_EQ(store_->Published(0)[Plane::kMaster][0], 7);
  EXPECT_EQ(pins[0].slot()[Plane::kMaster][0], 0);
}

TEST_F(ChunkStoreTest, AFreshVersionIsPublishedOrDropped) {
  Write(0, 1, 1);
  auto write = store_->BeginWrite(0, Destination::kFresh).value();
  EXPECT_FALSE(write.in_place);
  Fill(write, 2);
  EXPECT_EQ(store_->Published(0)[Plane::kMaster][0], 1);
  store_->Drop(write);
  EXPECT_EQ(store_->Published(0)[Plane::kMaster][0], 1);
  EXPECT_EQ(budget_.used_bytes(), 0);
  write = store_->BeginWrite(0, Destination::kFresh).value();
  Fill(write, 3);
  store_->Publish(write, 2);
  EXPECT_EQ(store_->Published(0)[Plane::kMaster][0], 3);
  EXPECT_EQ(store_->step(0), 2u);
}

}  // namespace
}  // namespace ballast
