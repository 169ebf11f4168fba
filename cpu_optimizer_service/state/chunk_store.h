// The state of a job: versioned chunks in slots.
//
// A chunk's planes lie in a slot. A table maps the chunk to its slot and its step. An update asks
// where to write: in place, or into a fresh slot, if a reader has pinned the chunk or the caller
// wants it. Publishing is one switch of the table entry. A step of two rounds makes one version, which
// is published half, and then whole.
//
// In named memory the table is there, too: one word a chunk, with its slot and its step, stored
// after the planes. A process that takes over the memory has the published versions; every slot
// without a word is free. A word is stored before a slot that it no longer names is reused.
//
// A store with previous versions also has each chunk's version before the published one. An update
// overwrites the previous version, and the published one becomes the previous version. SwitchBack
// publishes it again. It has its own word in the table.
//
// Thread-safe, with one writer per chunk at a time.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHUNK_STORE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHUNK_STORE_H_

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/packed/slot.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/host/arena.h"
#include "cpu_optimizer_service/host/memory_budget.h"
#include "cpu_optimizer_service/host/named_memory.h"

namespace ballast {

struct ChunkVersion;
class ChunkStore;

// Keeps one version of a chunk readable and unchanged. Outlived by its store.
class ChunkPin {
 public:
  ChunkPin() = default;
  ChunkPin(ChunkPin&& other) noexcept;
  ChunkPin& operator=(ChunkPin&& other) noexcept;
  ~ChunkPin() { Release(); }

  const Slot& slot() const;

 private:
  friend class ChunkStore;
  void Release();

  ChunkStore* store_ = nullptr;
  ChunkVersion* version_ = nullptr;
};

// kInPlaceIfFree: with previous versions, in place of the chunk's previous one; then the chunk has
// none until Publish. kInPlace: even if a reader has it pinned, or it is temporarily elsewhere.
enum class Destination : uint8_t { kInPlaceIfFree, kFresh, kInPlace };

class ChunkStore {
 public:
  // Slots reserved for a later Pin. Outlived by its store.
  class Room {
   public:
    ~Room();
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;

   private:
    friend class ChunkStore;
    explicit Room(ChunkStore& store) : store_(store) {}
    ChunkStore& store_;
    std::unordered_map<int, ChunkVersion*> slots_;  // By chunk; the store's lock guards it.
  };

  struct Options {
    std::vector<PlaneList> planes;  // By group.
    // Also allocates a second slot for each chunk, so that fresh versions need no further memory.
    bool second_versions = false;
    // Keeps each chunk's version before the published one, in a further slot.
    bool keep_previous = false;
    // The budget for slots beyond one per chunk.
    MemoryBudget* budget = nullptr;
    std::string owner;  // For messages: "job gpt2".
    // The store's memory outlives the process, and is found again; it outlives the store. Null: it
    // ends with the process.
    NamedArenas* named = nullptr;
  };

  // Allocates and zeroes the slots from `arenas`. Both outlive the store. If options.named has an
  // earlier process's store, takes that over instead. DATA_LOSS: that is not a store of this
  // layout.
  static absl::StatusOr<std::unique_ptr<ChunkStore>> Create(const Layout& layout, Options options,
                                                            ArenaFactory& arenas);
  ~ChunkStore();

  // Pins the published versions of `chunks`. Reserves a fresh slot for each, so that no writer has
  // to wait; first those of `room`, nullable. RESOURCE_EXHAUSTED if the budget has no room for
  // them.
  absl::StatusOr<std::vector<ChunkPin>> Pin(absl::Span<const int> chunks, Room* room = nullptr);
  // In named memory making slots takes long, and Pin does it under the store's lock. So this makes
  // them earlier, on a thread that may wait: the slots that a Pin of all chunks would need beyond
  // the free ones, with all their pages. Null: there are enough. RESOURCE_EXHAUSTED.
  absl::StatusOr<std::unique_ptr<Room>> MakeRoom();
  // Whether a Pin of all chunks would make no slot.
  bool HasRoom(const Room* room) const;

  // The published version. Valid while no writer publishes the chunk.
  const Slot& Published(int chunk) const;
  uint64_t step(int chunk) const;
  // The published version has only the first of that step's two rounds.
  bool is_half(int chunk) const;

  // An update in progress: read from `from`, write all planes of `to`. Ends in Publish or Drop.
  struct Write {
    int chunk = 0;
    Slot from;
    Slot to;
    bool in_place = true;
    ChunkVersion* target = nullptr;
  };
  // RESOURCE_EXHAUSTED only for kFresh, without a reserved slot and without room.
  absl::StatusOr<Write> BeginWrite(int chunk, Destination destination);
  void Publish(const Write& write, uint64_t step) { Publish(absl::MakeConstSpan(&write, 1), step); }
  // After the first of the step's two rounds. The second one writes in place.
  void PublishHalf(const Write& write, uint64_t step);
  // Many chunks at once, which is cheaper than one by one.
  void Publish(absl::Span<const Write> writes, uint64_t step);
  void Drop(const Write& write);  // Not for writes in place.

  // All chunks are now at `step`, after state was written from outside.
  void SetStep(uint64_t step);
  // Every chunk beyond `step` goes back to its previous version, which is of that step. After a
  // crash it can be repeated. Precondition: previous versions are kept, no writer is active, and
  // all readers have pins.
  void SwitchBack(uint64_t step);

  // Only in named memory: whether the chunk has its first weights, which are in the slot already.
  // In other memory always false.
  void SetArrived(int chunk, bool arrived);
  bool arrived(int chunk) const;

 private:
  friend class ChunkPin;
  struct Impl;
  explicit ChunkStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHUNK_STORE_H_
