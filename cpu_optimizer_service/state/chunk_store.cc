#include "cpu_optimizer_service/state/chunk_store.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <unordered_map>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/checked_word.h"
#include "cpu_optimizer_service/host/kept_record.h"
#include "cpu_optimizer_service/state/slot_pool.h"

namespace ballast {

namespace {

// The value of a word of the table, which is a checked one: the slot that a chunk's planes lie in,
// whether first weights have come, and the step that they are at, with all of it or half.
constexpr uint64_t kSlotMask = (uint64_t{1} << SlotPool::kNumberBits) - 1;
constexpr uint64_t kArrived = uint64_t{1} << SlotPool::kNumberBits;
constexpr uint64_t kHalf = kArrived << 1;
constexpr int kStepShift = SlotPool::kNumberBits + 2;
// So half of the steps that there can be are left to a job that begins as late as it may.
static_assert(2 * kMaxFirstStep == uint64_t{1} << (kCheckedValueBits - kStepShift));
constexpr char kTableLabel[] = "table";

}  // namespace

struct ChunkStore::Impl {
  Impl(const Layout& layout, Options options) : layout(layout), options(std::move(options)) {}

  // In named memory, from its return on.
  void StoreWord(int chunk, const ChunkVersion& version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Into the place `index` of the table, which is checked with the value.
  void StoreAt(uint64_t index, uint64_t value) {
    std::atomic_ref<uint64_t>(words[index])
        .store(CheckedWord(value, static_cast<uint32_t>(index)), std::memory_order_release);
  }
  void StorePreviousWord(int chunk, const ChunkVersion& version)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Where a chunk is written to, of a store that keeps previous versions.
  ChunkVersion* TakePrevious(int chunk, SlotPool::Freed& freed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // The table as an earlier process left it.
  absl::Status TakeOver() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void Publish(const Write& write, uint64_t step, bool half, SlotPool::Freed& freed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Those for which a Pin of all chunks would have to make slots.
  std::vector<int> ChunksWithoutRoom(const Room* room) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  const Layout& layout;
  const Options options;
  std::unique_ptr<Arena> table_arena;  // Null: the memory has no name.
  uint64_t* words = nullptr;           // In it, by chunk.
  uint64_t* previous_words = nullptr;  // Behind them, of previous versions.
  mutable Mutex mutex;
  std::unique_ptr<SlotPool> slots ABSL_PT_GUARDED_BY(mutex);
  // What all chunks do in a decision that publishes their provisional updates lies side by side,
  // and neither allocates nor searches: ranks wait meanwhile.
  std::vector<ChunkVersion*> table ABSL_GUARDED_BY(mutex);  // By chunk: the published one.
  // By chunk, of a store that keeps them. A pinned version of a chunk that is published or previous
  // has a spare, and no other has; so where the previous one is pinned, its spare is free.
  std::vector<ChunkVersion*> previous ABSL_GUARDED_BY(mutex);
};

void ChunkStore::Impl::StoreWord(int chunk, const ChunkVersion& version) {
  if (words == nullptr) return;
  Check(version.arena == nullptr, "a version in named memory has a number");
  const uint64_t arrived = words[chunk] & kArrived;
  // After the planes, in this thread's order or through the lock.
  StoreAt(chunk,
          version.step << kStepShift | (version.half ? kHalf : 0) | arrived | version.number);
  Stored(version.half ? "a chunk's word, half" : "a chunk's word");
}

void ChunkStore::Impl::StorePreviousWord(int chunk, const ChunkVersion& version) {
  if (previous_words == nullptr) return;
  StoreAt(table.size() + chunk, version.step << kStepShift | version.number);
  Stored("a previous version's word");
}

absl::Status ChunkStore::Impl::TakeOver() {
  const auto not_whole = [&](const char* which, int chunk,
                             uint64_t word) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    const auto number = static_cast<uint32_t>(word & kSlotMask);
    return absl::DataLossError(absl::StrCat(options.named->WhatIs(kTableLabel), " has the ", which,
                                            "version of chunk ", chunk, " in slot ", number,
                                            ", which is not there: put back ",
                                            slots->WhatHas(number), ", if it is missing"));
  };
  const auto chunks = static_cast<uint32_t>(table.size());
  for (uint32_t index = 0; index < chunks * (options.keep_previous ? 2 : 1); ++index) {
    if (ValueOf(words[index], index).has_value()) continue;
    return absl::DataLossError(absl::StrCat(options.named->WhatIs(kTableLabel),
                                            " is not as it was stored: what it says of chunk ",
                                            index % chunks, " has other check bits"));
  }
  BALLAST_ASSIGN_OR_RETURN(const auto versions, slots->TakeOver());
  // The unused one that a word names, of the chunk's size.
  const auto find = [&](int chunk, uint64_t word)
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) -> ChunkVersion* {
    const auto found = versions.find(static_cast<uint32_t>(word & kSlotMask));
    if (found == versions.end()) return nullptr;
    ChunkVersion* const version = found->second;
    const bool unused = !version->published && !version->previous;
    return unused && slots->AreOfOneKind(version->home, chunk) ? version : nullptr;
  };
  // Each version is marked as soon as it is found, so that `find` sees a second word that names it.
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    ChunkVersion* const version = find(chunk, words[chunk]);
    if (version == nullptr) return not_whole("", chunk, words[chunk]);
    version->published = true;
    version->step = (words[chunk] & kCheckedValueMask) >> kStepShift;
    version->half = (words[chunk] & kHalf) != 0;
    table[chunk] = version;
  }
  for (uint32_t chunk = 0; chunk < chunks && options.keep_previous; ++chunk) {
    const uint64_t word = previous_words[chunk];
    // In the middle of a switch the word names the published version: there is no other then.
    if ((word & kSlotMask) == table[chunk]->number) continue;
    ChunkVersion* const version = find(chunk, word);
    if (version == nullptr) return not_whole("previous ", chunk, word);
    version->previous = true;
    version->step = (word & kCheckedValueMask) >> kStepShift;
    previous[chunk] = version;
  }
  // What no word names is free, and goes.
  SlotPool::Freed freed;
  slots->RetireUnused(freed);
  for (uint32_t chunk = 0; chunk < chunks && options.keep_previous; ++chunk) {
    if (previous[chunk] != nullptr) continue;
    previous[chunk] = slots->TakeFree(chunk);
    if (previous[chunk] == nullptr) {
      return absl::DataLossError(
          absl::StrCat("chunk ", chunk, " of ", options.owner, " has no second place"));
    }
    previous[chunk]->previous = true;
  }
  return absl::OkStatus();
}

ChunkPin::ChunkPin(ChunkPin&& other) noexcept
    : store_(std::exchange(other.store_, nullptr)),
      version_(std::exchange(other.version_, nullptr)) {}

ChunkPin& ChunkPin::operator=(ChunkPin&& other) noexcept {
  if (this != &other) {
    Release();
    store_ = std::exchange(other.store_, nullptr);
    version_ = std::exchange(other.version_, nullptr);
  }
  return *this;
}

const Slot& ChunkPin::slot() const { return version_->slot; }

void ChunkPin::Release() {
  if (store_ == nullptr) return;
  ChunkStore::Impl& impl = *store_->impl_;
  store_ = nullptr;
  SlotPool::Freed freed;
  // Declared after `freed`, which is therefore destroyed without the lock: to unmap memory takes
  // long.
  MutexLock lock(impl.mutex);
  if (--version_->pins > 0) return;
  if (version_->published || version_->previous) {
    if (version_->spare != nullptr)
      impl.slots->Retire(std::exchange(version_->spare, nullptr), freed);
    return;
  }
  // It was replaced while it was pinned, and this was the last pin.
  impl.slots->Retire(version_, freed);
}

ChunkStore::ChunkStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ChunkStore::~ChunkStore() = default;

absl::StatusOr<std::unique_ptr<ChunkStore>> ChunkStore::Create(const Layout& layout,
                                                               Options options,
                                                               ArenaFactory& arenas) {
  auto impl = std::make_unique<Impl>(layout, std::move(options));
  NamedArenas* const named = impl->options.named;
  const bool keep_previous = impl->options.keep_previous;
  const int chunks = static_cast<int>(layout.chunks().size());
  const bool takes_over = named != nullptr && named->must_be_left();
  BALLAST_ASSIGN_OR_RETURN(impl->slots, SlotPool::Create(layout, impl->options, arenas));
  if (named != nullptr) {
    const int64_t words = int64_t{chunks} * (keep_previous ? 2 : 1);
    BALLAST_ASSIGN_OR_RETURN(impl->table_arena,
                             named->Create(words * static_cast<int64_t>(sizeof(uint64_t)),
                                           kTableLabel, ArenaFactory::Touch::kNow));
    impl->words = reinterpret_cast<uint64_t*>(impl->table_arena->data());
    if (keep_previous) impl->previous_words = impl->words + chunks;
  }
  MutexLock lock(impl->mutex);
  impl->table.resize(chunks);
  if (keep_previous) impl->previous.resize(chunks);
  if (takes_over) {
    BALLAST_RETURN_IF_ERROR(impl->TakeOver());
    return std::unique_ptr<ChunkStore>(new ChunkStore(std::move(impl)));
  }
  for (int chunk = 0; chunk < chunks; ++chunk) {
    impl->table[chunk] = impl->slots->first(chunk);
    impl->table[chunk]->published = true;
    // A word of zeros would name slot 0, whichever chunk it is of.
    impl->StoreWord(chunk, *impl->table[chunk]);
    if (!keep_previous) continue;
    impl->previous[chunk] = impl->slots->third(chunk);
    impl->previous[chunk]->previous = true;
    impl->StorePreviousWord(chunk, *impl->previous[chunk]);
  }
  SlotPool::Freed none;
  // Until here no slot is free. Now second places are, and they alone.
  impl->slots->RetireUnused(none);
  return std::unique_ptr<ChunkStore>(new ChunkStore(std::move(impl)));
}

std::vector<int> ChunkStore::Impl::ChunksWithoutRoom(const Room* room) const {
  // Memory without a name is mapped at once, and gets its pages as it is written.
  if (words == nullptr) return {};
  std::vector<int> wanted;
  for (int chunk = 0; chunk < static_cast<int>(table.size()); ++chunk) {
    const bool has_one =
        table[chunk]->spare != nullptr || (room != nullptr && room->slots_.contains(chunk));
    if (!has_one) wanted.push_back(chunk);
  }
  return slots->WithoutFree(wanted);
}

ChunkStore::Room::~Room() {
  Impl& impl = *store_.impl_;
  SlotPool::Freed freed;
  MutexLock lock(impl.mutex);
  for (const auto& [chunk, slot] : slots_) impl.slots->Retire(slot, freed);
}

absl::StatusOr<std::unique_ptr<ChunkStore::Room>> ChunkStore::MakeRoom() {
  std::vector<int> chunks;
  uint64_t number = 0;
  {
    MutexLock lock(impl_->mutex);
    // What is free may change until the memory is there. What is too much is given back with the
    // room, and what is too little Pin makes itself.
    chunks = impl_->ChunksWithoutRoom(nullptr);
    number = impl_->slots->NumberOfNextBatch();
  }
  std::unique_ptr<Room> room;
  if (chunks.empty()) return room;
  BALLAST_ASSIGN_OR_RETURN(SlotPool::BatchMemory memory,
                           SlotPool::MakeBatch(impl_->layout, impl_->options, chunks, number,
                                               ArenaFactory::Touch::kNow));
  room.reset(new Room(*this));
  room->slots_.reserve(chunks.size());
  // Declared after the room, whose destructor takes the lock and so is called without it.
  MutexLock lock(impl_->mutex);
  BALLAST_ASSIGN_OR_RETURN(const std::vector<ChunkVersion*> made,
                           impl_->slots->NumberBatch(chunks, std::move(memory)));
  for (size_t i = 0; i < chunks.size(); ++i) room->slots_.emplace(chunks[i], made[i]);
  return room;
}

bool ChunkStore::HasRoom(const Room* room) const {
  MutexLock lock(impl_->mutex);
  return impl_->ChunksWithoutRoom(room).empty();
}

absl::StatusOr<std::vector<ChunkPin>> ChunkStore::Pin(absl::Span<const int> chunks, Room* room) {
  std::vector<ChunkPin> pins;  // On an error these release what was pinned, after the lock is gone.
  pins.reserve(chunks.size());
  SlotPool::Freed freed;
  freed.reserve(chunks.size());
  MutexLock lock(impl_->mutex);
  std::unordered_map<int, ChunkVersion*> spares;
  // Also where memory runs out; `freed` has room.
  absl::Cleanup give_back = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (auto& [owner, taken] : spares) {
      if (taken != nullptr) impl_->slots->Retire(taken, freed);
    }
  };
  std::vector<int> without;  // Those for which named memory has no free slot: they get a batch.
  for (const int chunk : chunks) {
    if (impl_->table[chunk]->spare != nullptr) continue;
    // Spares are given to versions only when all are there, so an error leaves the table as it was.
    // A chunk may be named twice.
    const auto [spare, is_new] = spares.try_emplace(chunk, nullptr);
    if (!is_new) continue;
    const auto made =
        room == nullptr ? decltype(room->slots_)::node_type() : room->slots_.extract(chunk);
    if (!made.empty()) {
      spare->second = made.mapped();
    } else if (impl_->words == nullptr) {
      BALLAST_ASSIGN_OR_RETURN(spare->second, impl_->slots->TakeFresh(chunk));
    } else {
      spare->second = impl_->slots->TakeFree(chunk);
      if (spare->second == nullptr) without.push_back(chunk);
    }
  }
  if (!without.empty()) {
    BALLAST_ASSIGN_OR_RETURN(const std::vector<ChunkVersion*> batch,
                             impl_->slots->TakeBatch(without));
    for (size_t i = 0; i < without.size(); ++i) spares[without[i]] = batch[i];
  }
  std::move(give_back).Cancel();
  for (auto& [chunk, spare] : spares) impl_->table[chunk]->spare = spare;
  for (const int chunk : chunks) {
    ChunkPin pin;
    pin.store_ = this;
    pin.version_ = impl_->table[chunk];
    ++pin.version_->pins;
    pins.push_back(std::move(pin));
  }
  return pins;
}

const Slot& ChunkStore::Published(int chunk) const {
  MutexLock lock(impl_->mutex);
  return impl_->table[chunk]->slot;
}

uint64_t ChunkStore::step(int chunk) const {
  MutexLock lock(impl_->mutex);
  return impl_->table[chunk]->step;
}

bool ChunkStore::is_half(int chunk) const {
  MutexLock lock(impl_->mutex);
  return impl_->table[chunk]->half;
}

ChunkVersion* ChunkStore::Impl::TakePrevious(int chunk, SlotPool::Freed& freed) {
  ChunkVersion*& place = previous[chunk];
  if (place->pins > 0) {
    ChunkVersion* const spare = std::exchange(place->spare, nullptr);
    Check(spare != nullptr, "a pinned version has a spare");
    return spare;
  }
  // One that moved out of the store's arenas goes back as soon as it can, which frees the other
  // one.
  if (place->is_extra() && slots->HasFree(chunk)) {
    // No word may name a slot that another version will use. Until Publish both words name the
    // published version, by which TakeOver sees that the chunk has no previous one.
    StorePreviousWord(chunk, *table[chunk]);
    ChunkVersion* const free_one = slots->TakeFree(chunk);
    place->previous = false;
    slots->Retire(std::exchange(place, free_one), freed);
    place->previous = true;
  }
  return place;
}

absl::StatusOr<ChunkStore::Write> ChunkStore::BeginWrite(int chunk, Destination destination) {
  SlotPool::Freed freed;
  MutexLock lock(impl_->mutex);
  ChunkVersion& current = *impl_->table[chunk];
  Write write;
  write.chunk = chunk;
  write.from = current.slot;
  if (impl_->options.keep_previous && destination != Destination::kInPlace) {
    write.in_place = false;
    if (destination == Destination::kInPlaceIfFree) {
      write.target = impl_->TakePrevious(chunk, freed);
    } else {
      BALLAST_ASSIGN_OR_RETURN(write.target, impl_->slots->TakeFresh(chunk));
    }
    write.to = write.target->slot;
    return write;
  }
  // A chunk that moved out of its first slot goes back as soon as it can, which frees the other
  // one.
  const bool goes_back = current.is_extra() && impl_->slots->HasFree(chunk);
  if (destination == Destination::kInPlace ||
      (destination == Destination::kInPlaceIfFree && current.pins == 0 && !goes_back)) {
    write.to = current.slot;
    write.target = &current;
    return write;
  }
  // Pin has reserved it, so that a decided update never fails for want of memory.
  ChunkVersion* target = std::exchange(current.spare, nullptr);
  if (target == nullptr) {
    BALLAST_ASSIGN_OR_RETURN(target, impl_->slots->TakeFresh(chunk));
  }
  write.to = target->slot;
  write.in_place = false;
  write.target = target;
  return write;
}

void ChunkStore::Impl::Publish(const Write& write, uint64_t step, bool half,
                               SlotPool::Freed& freed) {
  write.target->step = step;
  write.target->half = half;
  ChunkVersion* gone = table[write.chunk];
  if (options.keep_previous && !write.in_place) {
    // First, since a chunk whose own word is of the step is not computed again.
    StorePreviousWord(write.chunk, *gone);
    gone->previous = true;
    gone = std::exchange(previous[write.chunk], gone);
    gone->previous = false;
  }
  // Before any slot is given up below: a slot that a word names is not free.
  StoreWord(write.chunk, *write.target);
  if (write.in_place) return;
  table[write.chunk]->published = false;
  table[write.chunk] = write.target;
  write.target->published = true;
  // It was written where the previous version lay, so no slot is left over.
  if (gone == write.target) return;
  if (gone->pins == 0) {
    slots->Retire(gone, freed);
  } else if (options.keep_previous && gone->spare != nullptr) {
    slots->Retire(std::exchange(gone->spare, nullptr), freed);
  }
}

void ChunkStore::Publish(absl::Span<const Write> writes, uint64_t step) {
  SlotPool::Freed freed;
  MutexLock lock(impl_->mutex);
  for (const Write& write : writes) impl_->Publish(write, step, /*half=*/false, freed);
}

void ChunkStore::PublishHalf(const Write& write, uint64_t step) {
  SlotPool::Freed freed;
  MutexLock lock(impl_->mutex);
  impl_->Publish(write, step, /*half=*/true, freed);
}

void ChunkStore::Drop(const Write& write) {
  Check(!write.in_place, "only a write into a fresh version can be dropped");
  SlotPool::Freed freed;
  MutexLock lock(impl_->mutex);
  // The write may have used the place that a pinned version keeps for its writer.
  ChunkVersion& current = *impl_->table[write.chunk];
  if (current.pins > 0 && current.spare == nullptr) {
    current.spare = write.target;
  } else {
    impl_->slots->Retire(write.target, freed);
  }
}

void ChunkStore::SetStep(uint64_t step) {
  MutexLock lock(impl_->mutex);
  // A death in between leaves chunks at both steps; the next process goes by the job's record, and
  // sets all of them again (job_recover.cc).
  for (int chunk = 0; chunk < static_cast<int>(impl_->table.size()); ++chunk) {
    impl_->table[chunk]->step = step;
    impl_->StoreWord(chunk, *impl_->table[chunk]);
  }
}

void ChunkStore::SwitchBack(uint64_t step) {
  MutexLock lock(impl_->mutex);
  for (int chunk = 0; chunk < static_cast<int>(impl_->table.size()); ++chunk) {
    ChunkVersion*& published = impl_->table[chunk];
    ChunkVersion*& previous = impl_->previous[chunk];
    if (published->step <= step) continue;
    Check(previous->step == step, "a previous version is of the step that is gone back to");
    std::swap(published, previous);
    std::swap(published->published, previous->published);
    std::swap(published->previous, previous->previous);
    // The published word first. After it the chunk has gone back, whatever becomes of the other. In
    // the other order both words would name the version that is undone, and the one before would be
    // lost.
    impl_->StoreWord(chunk, *published);
    impl_->StorePreviousWord(chunk, *previous);
  }
}

void ChunkStore::SetArrived(int chunk, bool arrived) {
  MutexLock lock(impl_->mutex);
  if (impl_->words == nullptr) return;
  const uint64_t value = impl_->words[chunk] & kCheckedValueMask;
  impl_->StoreAt(chunk, arrived ? value | kArrived : value & ~kArrived);
  Stored("a chunk's first weights");
}

bool ChunkStore::arrived(int chunk) const {
  MutexLock lock(impl_->mutex);
  return impl_->words != nullptr && (impl_->words[chunk] & kArrived) != 0;
}

}  // namespace ballast
