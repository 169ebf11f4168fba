// The slots of a chunk store: one, two or three for each chunk in arenas of the store's own, and
// others for as long as they are needed. A slot that is given up is free for any chunk of its size.
//
// In named memory slots are numbered, so that a later process finds the versions in them: the
// chunks' own, then their second ones, then those for previous versions, then those of batches,
// which have their memory together.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SLOT_POOL_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SLOT_POOL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/host/arena.h"
#include "cpu_optimizer_service/host/memory_budget.h"
#include "cpu_optimizer_service/state/chunk_store.h"
#include "cpu_optimizer_service/state/slot.h"

namespace ballast {

struct SlotBatch;

// A version of a chunk, and the slot that it lies in.
struct ChunkVersion {
  Slot slot;
  uint32_t number = 0;  // Of the slot, in the table's words.
  int home = 0;         // The chunk whose place in the arena, and so whose NUMA node, it has.
  uint64_t step = 0;
  int pins = 0;
  bool published = false;
  bool previous = false;  // Its chunk's previous one.
  // Reserved while pinned, so that a writer always has somewhere to go.
  ChunkVersion* spare = nullptr;
  // Memory of its own, or with others of its batch, for slots beyond those in the store's arenas.
  std::unique_ptr<Arena> arena;
  std::shared_ptr<SlotBatch> batch;
  MemoryBudget::Reservation reservation;

  bool is_extra() const { return arena != nullptr || batch != nullptr; }
};

// Thread-compatible: the store's lock guards it.
class SlotPool {
 public:
  // For a few versions of each of kMaxChunks chunks.
  static constexpr int kNumberBits = 23;
  static_assert(7 * kMaxChunks < int64_t{1} << kNumberBits);

  // Allocates and zeroes the store's arenas. `layout`, `options` and `arenas` outlive the pool. None
  // is free yet.
  static absl::StatusOr<std::unique_ptr<SlotPool>> Create(const Layout& layout,
                                                          const ChunkStore::Options& options,
                                                          ArenaFactory& arenas);

  // In the store's arenas. Precondition of the latter two: the options have them.
  ChunkVersion* first(int chunk) { return &places_[0][chunk]; }
  ChunkVersion* second(int chunk) { return &places_[1][chunk]; }
  ChunkVersion* third(int chunk) { return &places_[2][chunk]; }
  // Whether the chunks' versions may take each other's places.
  bool AreOfOneSize(int chunk, int other) const { return size_class_[chunk] == size_class_[other]; }

  bool HasFree(int chunk) const { return free_count_[size_class_[chunk]] > 0; }
  // The free version nearest to a chunk's own; null: none is of its size.
  ChunkVersion* TakeFree(int chunk);
  // One that is free, or another one. RESOURCE_EXHAUSTED: there is no room.
  absl::StatusOr<ChunkVersion*> TakeFresh(int chunk);
  // One more for each of `chunks`, of named memory.
  absl::StatusOr<std::vector<ChunkVersion*>> TakeBatch(absl::Span<const int> chunks);
  // The two parts of that, of which the first takes long and needs no lock. `number` is of no other
  // batch. RESOURCE_EXHAUSTED, both.
  struct BatchMemory {
    MemoryBudget::Reservation reservation;
    std::unique_ptr<Arena> arena;
  };
  static absl::StatusOr<BatchMemory> MakeBatch(const Layout& layout,
                                               const ChunkStore::Options& options,
                                               absl::Span<const int> chunks, uint64_t number,
                                               ArenaFactory::Touch touch);
  uint64_t NumberOfNextBatch() { return ++last_batch_; }
  absl::StatusOr<std::vector<ChunkVersion*>> NumberBatch(absl::Span<const int> chunks,
                                                         BatchMemory memory);
  // Those of `chunks` that would get no free version if each took one.
  std::vector<int> WithoutFree(absl::Span<const int> chunks) const;

  // Versions with memory of their own that are over: destroyed without the lock, because unmapping
  // takes long.
  using Freed = std::vector<std::unique_ptr<ChunkVersion>>;
  // A version that is not needed, with its spare: free if it lies in the store's arenas, else over.
  void Retire(ChunkVersion* version, Freed& freed);
  // All that are neither published nor previous.
  void RetireUnused(Freed& freed);

  // Of named memory: takes over what an earlier process left beyond the store's arenas. Returns all
  // versions, by number. DATA_LOSS: a batch is not as it was stored.
  using Numbered = std::unordered_map<uint32_t, ChunkVersion*>;
  absl::StatusOr<Numbered> TakeOver();
  // What the slot with that number lies in, for people.
  std::string WhatHas(uint32_t number) const;

 private:
  static constexpr int kPlaces = 3;  // In the store's arenas, of each chunk.

  SlotPool(const Layout& layout, const ChunkStore::Options& options, ArenaFactory& arenas)
      : layout_(layout), options_(options), arenas_(arenas) {}
  int PlanesOf(int chunk) const { return options_.planes[layout_.chunks()[chunk].group]; }
  absl::Status Allocate(int place);
  absl::Status TakeOverBatch(const std::string& label, Numbered& all);
  // The slots of a batch, in their order, as versions that nobody has.
  std::vector<ChunkVersion*> AddBatch(std::unique_ptr<Arena> memory,
                                      MemoryBudget::Reservation reservation);

  const Layout& layout_;
  const ChunkStore::Options& options_;
  ArenaFactory& arenas_;
  std::array<std::unique_ptr<Arena>, kPlaces> place_arenas_;  // Nullable.
  std::array<std::vector<ChunkVersion>, kPlaces> places_;     // By home; empty without an arena.
  std::unordered_map<ChunkVersion*, std::unique_ptr<ChunkVersion>> others_;
  std::vector<std::array<ChunkVersion*, kPlaces>> free_;  // By home; null: none.
  std::vector<int> size_class_;                           // By chunk.
  std::vector<int64_t> free_count_;                       // By size class.
  std::vector<std::weak_ptr<SlotBatch>> batches_;
  size_t most_batches_ = 16;  // Before those that are over are forgotten.
  uint64_t end_slot_ = 0;     // Of the last one.
  uint64_t last_batch_ = 0;   // Part of its name.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SLOT_POOL_H_
