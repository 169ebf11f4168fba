// The state of a job: versioned chunks in slots.
//
// A chunk's planes lie in a slot; a table maps the chunk to its slot and to the step that it stands
// at. An update asks where to write: in place, or, if a reader has pinned the chunk or the caller
// wants it so, into a fresh slot. Publishing is one switch of the table entry.
//
// In named memory the table is, too: one word a chunk, with its slot and its step, stored after the
// planes. A process that finds the memory of another has that one's published versions; every slot
// that no word names is free. A word is stored before a slot that it no longer names is used again.
//
// A store that keeps previous versions has, of each chunk, the version before the published one, too:
// an update goes where that lies, and what was published becomes the previous version. SwitchBack
// publishes it again. It has a word of its own in the table.
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
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/host/arena.h"
#include "cpu_optimizer_service/host/memory_budget.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/state/slot.h"

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

// kInPlaceIfFree: where previous versions are kept, in the place of the chunk's previous one; then
// the chunk has none until Publish. kInPlace: although a reader has it pinned, or it has moved out of
// its place for a while.
enum class Destination : uint8_t { kInPlaceIfFree, kFresh, kInPlace };

class ChunkStore {
 public:
  // Slots that nobody has but a Pin to come. Outlived by its store.
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
    // Per group: 3 planes, or 4 with amsgrad.
    std::vector<int> planes;
    // Also allocates a second slot for each chunk, so that fresh versions need no further memory.
    bool second_versions = false;
    // Keeps the version before the published one, of each chunk, in a slot more.
    bool keep_previous = false;
    // Slots beyond one per chunk come out of this budget when they are needed.
    MemoryBudget* budget = nullptr;
    std::string owner;  // For messages: "job gpt2".
    // The store's memory outlives the process, and is found again; outlives the store. Null: it
    // dies with it.
    NamedArenas* named = nullptr;
  };

  // Allocates and zeroes the slots from `arenas`. Both outlive the store. What options.named has of
  // another process is taken over instead. DATA_LOSS: that is not a store of this layout.
  static absl::StatusOr<std::unique_ptr<ChunkStore>> Create(const Layout& layout, Options options,
                                                            ArenaFactory& arenas);
  ~ChunkStore();

  // Pins the published versions of `chunks`, reserving a fresh slot for each so that no writer has
  // to wait; those of `room`, nullable, first. RESOURCE_EXHAUSTED if the budget has no room for
  // them.
  absl::StatusOr<std::vector<ChunkPin>> Pin(absl::Span<const int> chunks, Room* room = nullptr);
  // In named memory making slots takes long, and Pin does it under the store's lock. So this makes
  // them before, on a thread that may wait: those that a Pin of all chunks would want beyond the
  // free ones, with all their pages. Null: there are enough. RESOURCE_EXHAUSTED.
  absl::StatusOr<std::unique_ptr<Room>> MakeRoom();
  // Whether a Pin of all chunks would make no slot.
  bool HasRoom(const Room* room) const;

  // The published version. Valid while the caller knows that no writer publishes the chunk.
  const Slot& Published(int chunk) const;
  uint64_t step(int chunk) const;

  // An update under way: read from `from`, write all planes of `to`. Ends in Publish or Drop.
  struct Write {
    int chunk = 0;
    Slot from;
    Slot to;
    bool in_place = true;
    ChunkVersion* target = nullptr;
  };
  // RESOURCE_EXHAUSTED only with kFresh and no reserved slot and no room.
  absl::StatusOr<Write> BeginWrite(int chunk, Destination destination);
  void Publish(const Write& write, uint64_t step) { Publish(absl::MakeConstSpan(&write, 1), step); }
  // Of many chunks, for less than one by one.
  void Publish(absl::Span<const Write> writes, uint64_t step);
  void Drop(const Write& write);  // Not for writes in place.

  // All chunks now stand at `step`, after state was written from outside.
  void SetStep(uint64_t step);
  // Every chunk that stands beyond `step` goes back to its previous version, which is of that step.
  // Cut off by a death, it can be done again. Precondition: previous versions are kept, nothing is
  // being written, and nothing read that is not pinned.
  void SwitchBack(uint64_t step);

  // Of named memory, and of that alone: whether the chunk has its first weights, which lie in the
  // slot by then. Of a store without it nothing has arrived.
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
