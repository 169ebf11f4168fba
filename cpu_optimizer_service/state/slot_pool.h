// The slots of a chunk store: one, two or three for each chunk in the store's arenas, and temporary
// others. A released slot is free for any chunk of its size.
//
// In named memory slots are numbered, so that a later process finds the versions in them. The order
// is: the chunks' own, their second ones, those for previous versions, and those of batches. A
// batch has its memory together.
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
#include "cpu_optimizer_service/common/packed/slot.h"
#include "cpu_optimizer_service/host/arena.h"
#include "cpu_optimizer_service/host/memory_budget.h"
#include "cpu_optimizer_service/state/chunk_store.h"

namespace ballast {

struct SlotBatch;

// A version of a chunk, and its slot.
struct ChunkVersion {
  Slot slot;
  uint32_t number = 0;  // Of the slot, in the table's words.
  int home = 0;         // The chunk whose place in the arena, and so whose NUMA node, it has.
  uint64_t step = 0;
  bool half = false;  // ChunkStore::is_half.
  int pins = 0;
  bool published = false;
  bool previous = false;  // Its chunk's previous one.
  // Reserved while pinned, so that a writer always has a slot.
  ChunkVersion* spare = nullptr;
  // Its own memory, or its batch's, for slots beyond the store's arenas.
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

  // Allocates and zeroes the store's arenas. `layout`, `options` and `arenas` outlive the pool. No
  // slot is free yet.
  static absl::StatusOr<std::unique_ptr<SlotPool>> Create(const Layout& layout,
                                                          const ChunkStore::Options& options,
                                                          ArenaFactory& arenas);

  // In the store's arenas. Precondition of the latter two: the options have them.
  ChunkVersion* first(int chunk) { return &places_[0][chunk]; }
  ChunkVersion* second(int chunk) { return &places_[1][chunk]; }
  ChunkVersion* third(int chunk) { return &places_[2][chunk]; }
  // Whether the chunks' versions are interchangeable.
  bool AreOfOneKind(int chunk, int other) const { return kind_[chunk] == kind_[other]; }

  bool HasFree(int chunk) const { return free_count_[kind_[chunk]] > 0; }
  // The free version nearest to a chunk's own; null: no free one of its size.
  ChunkVersion* TakeFree(int chunk);
  // A free one, or a new one. RESOURCE_EXHAUSTED: there is no room.
  absl::StatusOr<ChunkVersion*> TakeFresh(int chunk);
  // A new one for each of `chunks`, in named memory.
  absl::StatusOr<std::vector<ChunkVersion*>> TakeBatch(absl::Span<const int> chunks);
  // The two parts of that. The first takes long and needs no lock. `number` is unique to the batch.
  // RESOURCE_EXHAUSTED, both.
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
  // The `chunks` that would get no free version if each took one.
  std::vector<int> WithoutFree(absl::Span<const int> chunks) const;

  // Released versions with their own memory: destroyed without the lock, because unmapping takes
  // long.
  using Freed = std::vector<std::unique_ptr<ChunkVersion>>;
  // Releases an unneeded version and its spare: free if it lies in the store's arenas, else
  // destroyed.
  void Retire(ChunkVersion* version, Freed& freed);
  // Releases all that are neither published nor previous.
  void RetireUnused(Freed& freed);

  // In named memory: takes over an earlier process's slots beyond the store's arenas. Returns all
  // versions, by number. DATA_LOSS: a batch has changed.
  using Numbered = std::unordered_map<uint32_t, ChunkVersion*>;
  absl::StatusOr<Numbered> TakeOver();
  // Describes the memory of the slot with that number, for people.
  std::string WhatHas(uint32_t number) const;

 private:
  static constexpr int kPlaces = 3;  // In the store's arenas, for each chunk.

  SlotPool(const Layout& layout, const ChunkStore::Options& options, ArenaFactory& arenas)
      : layout_(layout), options_(options), arenas_(arenas) {}
  PlaneList PlanesOf(int chunk) const { return options_.planes[layout_.chunks()[chunk].group]; }
  absl::Status Allocate(int place);
  absl::Status TakeOverBatch(const std::string& label, Numbered& all);
  // The slots of a batch, in their order, as unused versions.
  std::vector<ChunkVersion*> AddBatch(std::unique_ptr<Arena> memory,
                                      MemoryBudget::Reservation reservation);

  const Layout& layout_;
  const ChunkStore::Options& options_;
  ArenaFactory& arenas_;
  std::array<std::unique_ptr<Arena>, kPlaces> place_arenas_;  // Nullable.
  std::array<std::vector<ChunkVersion>, kPlaces> places_;     // By home; empty without an arena.
  std::unordered_map<ChunkVersion*, std::unique_ptr<ChunkVersion>> others_;
  std::vector<std::array<ChunkVersion*, kPlaces>> free_;  // By home; may be null.
  std::vector<int> kind_;                                 // By chunk: of equal slots.
  std::vector<int64_t> free_count_;                       // By kind.
  std::vector<std::weak_ptr<SlotBatch>> batches_;
  size_t most_batches_ = 16;  // Before released ones are removed.
  uint64_t end_slot_ = 0;     // Of the last one.
  uint64_t last_batch_ = 0;   // Part of its name.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SLOT_POOL_H_
