#include "cpu_optimizer_service/state/chunk_store.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/plan/memory_need.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/host/kept_record.h"

namespace ballast {

namespace {

// A word of the table: the slot that a chunk's planes lie in, and the step that they stand at.
// Slots are numbered: the chunks' own, then their second ones, then those for previous versions, then
// those of batches.
constexpr int kSlotBits = 28;
constexpr uint64_t kSlotMask = (uint64_t{1} << kSlotBits) - 1;
constexpr uint64_t kArrived = uint64_t{1} << kSlotBits;
constexpr int kStepShift = kSlotBits + 1;
constexpr uint64_t kNumberedPlaces = 3;  // In the store's arenas, of each chunk.

// Named memory for slots that are needed for a while, all of one Pin. Its first bytes say which
// they are; the slots follow in their order.
struct BatchHeader {
  uint64_t first_slot = 0;
  uint64_t slots = 0;
  // Then `slots` chunk numbers of 32 bits.
};
struct Batch {
  MemoryBudget::Reservation reservation;
  std::unique_ptr<Arena> arena;
  uint64_t first_slot = 0;
  uint64_t end_slot = 0;
};

int64_t BatchHeaderBytes(int64_t slots) {
  return AlignUp(static_cast<int64_t>(sizeof(BatchHeader)) +
                 slots * static_cast<int64_t>(sizeof(uint32_t)));
}

constexpr char kTableLabel[] = "table";
constexpr char kSecondLabel[] = "second versions";
constexpr char kPreviousLabel[] = "previous versions";
constexpr char kBatchLabel[] = "versions ";

}  // namespace

struct ChunkPin::Version {
  Slot slot;
  uint32_t number = 0;  // Of the slot, in the table's words.
  int home = 0;         // The chunk whose place in the arena, and so whose NUMA node, it has.
  uint64_t step = 0;
  int pins = 0;
  bool published = false;
  bool previous = false;  // Its chunk's previous one.
  // Reserved while pinned, so that a writer always has somewhere to go.
  Version* spare = nullptr;
  // Memory of its own, or with others of its batch, for slots beyond those in the store's arenas.
  std::unique_ptr<Arena> arena;
  std::shared_ptr<Batch> batch;
  MemoryBudget::Reservation reservation;

  bool is_extra() const { return arena != nullptr || batch != nullptr; }
};

struct ChunkStore::Impl {
  using Version = ChunkPin::Version;

  Impl(const Layout& layout, Options options, ArenaFactory& arenas)
      : layout(layout), options(std::move(options)), arenas(arenas) {}

  int PlanesOf(int chunk) const { return options.planes[layout.chunks()[chunk].group]; }
  // A place in the store's arenas, one after the other in each.
  void AddVersions(std::byte* memory, std::vector<Version>& versions, uint32_t first_number)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  absl::StatusOr<Version*> TakeFresh(int chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // For those of `chunks` for which no slot is free.
  absl::StatusOr<std::vector<Version*>> TakeBatch(absl::Span<const int> chunks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // The slots of a batch, in their order, as versions that nobody has.
  std::vector<Version*> AddBatch(std::unique_ptr<Arena> memory,
                                 MemoryBudget::Reservation reservation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // In named memory, from its return on.
  void StoreWord(int chunk, const Version& version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void StorePreviousWord(int chunk, const Version& version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Where a chunk is written to, of a store that keeps previous versions.
  Version* TakePrevious(int chunk, std::vector<std::unique_ptr<Version>>& freed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // The table as an earlier process left it.
  absl::Status TakeOver() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // The free version nearest to a chunk's own, if there is one of its size.
  Version* TakeFree(int chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Versions with memory of their own that are over: destroyed without the lock, because unmapping
  // takes long.
  using Freed = std::vector<std::unique_ptr<Version>>;
  void Publish(const Write& write, uint64_t step, Freed& freed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // A version that is not needed: kept for reuse if it lies in the store's arenas, else freed.
  void Retire(Version* version, Freed& freed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  int64_t& FreeLike(int chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return free_count[size_class[chunk]];
  }

  const Layout& layout;
  const Options options;
  ArenaFactory& arenas;
  std::unique_ptr<Arena> arena;
  std::unique_ptr<Arena> second_arena;    // Null: no second versions.
  std::unique_ptr<Arena> previous_arena;  // Null: no previous versions.
  std::unique_ptr<Arena> table_arena;     // Null: the memory has no name.
  uint64_t* words = nullptr;              // In it, by chunk.
  uint64_t* previous_words = nullptr;     // Behind them, of previous versions.
  mutable Mutex mutex;
  // What all chunks do in a decision that publishes their provisional updates lies side by side,
  // and neither allocates nor searches: ranks wait meanwhile.
  std::vector<Version*> table ABSL_GUARDED_BY(mutex);  // By chunk: the published one.
  std::vector<Version> first ABSL_GUARDED_BY(mutex);   // By home, as the next; in the arenas.
  std::vector<Version> second ABSL_GUARDED_BY(mutex);  // Empty without second versions.
  std::vector<Version> third ABSL_GUARDED_BY(mutex);   // Empty without previous versions.
  // By chunk, of a store that keeps them. A pinned version of a chunk that is published or previous
  // has a spare, and no other has; so where the previous one is pinned, its spare is free.
  std::vector<Version*> previous ABSL_GUARDED_BY(mutex);
  absl::flat_hash_map<Version*, std::unique_ptr<Version>> others ABSL_GUARDED_BY(mutex);
  std::vector<std::array<Version*, kNumberedPlaces>> free
      ABSL_GUARDED_BY(mutex);  // By home; null: none.
  // Chunks whose versions may take each other's places.
  std::vector<int> size_class ABSL_GUARDED_BY(mutex);      // By chunk.
  std::vector<int64_t> free_count ABSL_GUARDED_BY(mutex);  // By size class.
  std::vector<std::weak_ptr<Batch>> batches ABSL_GUARDED_BY(mutex);
  size_t most_batches ABSL_GUARDED_BY(mutex) = 16;  // Before those that are over are forgotten.
  uint64_t end_slot ABSL_GUARDED_BY(mutex) = 0;     // Of the last one.
  uint64_t last_batch ABSL_GUARDED_BY(mutex) = 0;   // Part of its name.
};

namespace {

Slot MakeSlot(std::byte* memory, int64_t elements, int planes) {
  Slot slot;
  for (int plane = 0; plane < planes; ++plane) {
    slot.planes[plane] = reinterpret_cast<float*>(memory + SlotBytes(elements, plane));
  }
  return slot;
}

}  // namespace

void ChunkStore::Impl::AddVersions(std::byte* memory, std::vector<Version>& versions,
                                   uint32_t first_number) {
  versions = std::vector<Version>(layout.chunks().size());
  for (int chunk = 0; chunk < static_cast<int>(versions.size()); ++chunk) {
    const int64_t elements = layout.chunks()[chunk].elements;
    versions[chunk].home = chunk;
    versions[chunk].number = first_number + static_cast<uint32_t>(chunk);
    versions[chunk].slot = MakeSlot(memory, elements, PlanesOf(chunk));
    memory += SlotBytes(elements, PlanesOf(chunk));
  }
}

ChunkPin::Version* ChunkStore::Impl::TakeFree(int chunk) {
  if (FreeLike(chunk) == 0) return nullptr;
  const auto take = [&](int home) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) -> Version* {
    if (size_class[home] != size_class[chunk]) return nullptr;
    for (Version*& place : free[home]) {
      if (place == nullptr) continue;
      --FreeLike(chunk);
      return std::exchange(place, nullptr);
    }
    return nullptr;
  };
  // Nearly always the chunk's own.
  for (int home = chunk; home < static_cast<int>(free.size()); ++home) {
    if (Version* version = take(home); version != nullptr) return version;
  }
  for (int home = chunk - 1; home >= 0; --home) {
    if (Version* version = take(home); version != nullptr) return version;
  }
  Check(false, "a chunk that needs a place has one");
  return nullptr;
}

void ChunkStore::Impl::Retire(Version* version, Freed& freed) {
  if (version->spare != nullptr) Retire(std::exchange(version->spare, nullptr), freed);
  if (version->is_extra()) {
    const auto found = others.find(version);
    freed.push_back(std::move(found->second));
    others.erase(found);
    return;
  }
  auto& places = free[version->home];
  *std::find(places.begin(), places.end(), nullptr) = version;
  ++FreeLike(version->home);
}

absl::StatusOr<ChunkPin::Version*> ChunkStore::Impl::TakeFresh(int chunk) {
  if (Version* version = TakeFree(chunk); version != nullptr) return version;
  if (words != nullptr) {  // A slot without a number could not be found again.
    BALLAST_ASSIGN_OR_RETURN(const std::vector<Version*> one, TakeBatch({chunk}));
    return one[0];
  }
  const int64_t elements = layout.chunks()[chunk].elements;
  const int planes = PlanesOf(chunk);
  const int64_t bytes = SlotBytes(elements, planes);
  auto version = std::make_unique<Version>();
  BALLAST_ASSIGN_OR_RETURN(
      version->reservation,
      options.budget->Reserve(bytes,
                              absl::StrCat("a second version of a chunk of ", options.owner)));
  BALLAST_ASSIGN_OR_RETURN(version->arena,
                           arenas.Create(bytes, options.owner, ArenaFactory::Touch::kLater));
  version->slot = MakeSlot(version->arena->data(), elements, planes);
  Version* const fresh = version.get();
  others.emplace(fresh, std::move(version));
  return fresh;
}

absl::StatusOr<std::vector<ChunkPin::Version*>> ChunkStore::Impl::TakeBatch(
    absl::Span<const int> chunks) {
  const auto slots = static_cast<int64_t>(chunks.size());
  uint64_t first_slot = std::max<uint64_t>(end_slot, kNumberedPlaces * layout.chunks().size());
  if (first_slot + chunks.size() > kSlotMask) {  // Behind those that there still are.
    first_slot = kNumberedPlaces * layout.chunks().size();
    std::erase_if(batches, [](const std::weak_ptr<Batch>& batch) { return batch.expired(); });
    for (const std::weak_ptr<Batch>& weak : batches) {
      if (const auto batch = weak.lock(); batch != nullptr) {
        first_slot = std::max(first_slot, batch->end_slot);
      }
    }
  }
  if (first_slot + chunks.size() > kSlotMask) {
    return absl::ResourceExhaustedError(
        absl::StrCat(options.owner, " has too many versions of its chunks; close readers"));
  }
  int64_t bytes = BatchHeaderBytes(slots);
  for (const int chunk : chunks) {
    bytes += SlotBytes(layout.chunks()[chunk].elements, PlanesOf(chunk));
  }
  BALLAST_ASSIGN_OR_RETURN(
      MemoryBudget::Reservation reservation,
      options.budget->Reserve(bytes, absl::StrCat("second versions of chunks of ", options.owner)));
  BALLAST_ASSIGN_OR_RETURN(
      std::unique_ptr<Arena> memory,
      options.named->Create(bytes, absl::StrCat(options.owner, " ", kBatchLabel, ++last_batch),
                            ArenaFactory::Touch::kLater));
  BatchHeader& header = *reinterpret_cast<BatchHeader*>(memory->data());
  auto* const numbers = reinterpret_cast<uint32_t*>(&header + 1);
  std::copy(chunks.begin(), chunks.end(), numbers);
  header.first_slot = first_slot;
  header.slots = chunks.size();
  return AddBatch(std::move(memory), std::move(reservation));
}

std::vector<ChunkPin::Version*> ChunkStore::Impl::AddBatch(std::unique_ptr<Arena> memory,
                                                           MemoryBudget::Reservation reservation) {
  auto batch = std::make_shared<Batch>();
  batch->reservation = std::move(reservation);
  batch->arena = std::move(memory);
  const auto& header = *reinterpret_cast<const BatchHeader*>(batch->arena->data());
  const auto* const numbers = reinterpret_cast<const uint32_t*>(&header + 1);
  batch->first_slot = header.first_slot;
  batch->end_slot = header.first_slot + header.slots;
  std::byte* at = batch->arena->data() + BatchHeaderBytes(static_cast<int64_t>(header.slots));
  std::vector<Version*> added;
  for (uint64_t i = 0; i < header.slots; ++i) {
    const int chunk = static_cast<int>(numbers[i]);
    const int64_t elements = layout.chunks()[chunk].elements;
    const int planes = PlanesOf(chunk);
    auto version = std::make_unique<Version>();
    version->slot = MakeSlot(at, elements, planes);
    at += SlotBytes(elements, planes);
    version->number = static_cast<uint32_t>(header.first_slot + i);
    version->home = chunk;
    version->batch = batch;
    added.push_back(version.get());
    others.emplace(added.back(), std::move(version));
  }
  end_slot = batch->end_slot;
  if (batches.size() >= most_batches) {
    std::erase_if(batches, [](const std::weak_ptr<Batch>& other) { return other.expired(); });
    most_batches = 2 * batches.size() + 16;
  }
  batches.push_back(batch);
  return added;
}

void ChunkStore::Impl::StoreWord(int chunk, const Version& version) {
  if (words == nullptr) return;
  Check(version.arena == nullptr, "a version in named memory has a number");
  const uint64_t arrived = words[chunk] & kArrived;
  // After the planes, in this thread's order or through the lock.
  std::atomic_ref<uint64_t>(words[chunk])
      .store(version.step << kStepShift | arrived | version.number, std::memory_order_release);
  Stored("a chunk's word");
}

void ChunkStore::Impl::StorePreviousWord(int chunk, const Version& version) {
  if (previous_words == nullptr) return;
  std::atomic_ref<uint64_t>(previous_words[chunk])
      .store(version.step << kStepShift | version.number, std::memory_order_release);
  Stored("a previous version's word");
}

absl::Status ChunkStore::Impl::TakeOver() {
  const auto not_ours = [&](const auto&... what) {
    return absl::DataLossError(absl::StrCat("the memory that an earlier process left of ",
                                            options.owner, " is not whole: ", what...));
  };
  std::map<uint32_t, Version*> extras;
  for (const std::string& label : options.named->Left(kBatchLabel)) {
    BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<Arena> memory,
                             options.named->Create(1, label, ArenaFactory::Touch::kLater));
    uint64_t number = 0;
    if (absl::SimpleAtoi(absl::StripPrefix(label, kBatchLabel), &number)) {
      last_batch = std::max(last_batch, number);
    }
    const int64_t bytes = memory->size_bytes();
    const uint64_t others_end = end_slot;
    for (Version* version : AddBatch(std::move(memory), options.budget->Take(bytes))) {
      extras[version->number] = version;
    }
    end_slot = std::max(end_slot, others_end);
  }
  const auto chunks = static_cast<uint32_t>(layout.chunks().size());
  const auto find = [&](uint32_t number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) -> Version* {
    for (std::vector<Version>* versions : {&first, &second, &third}) {
      if (number < chunks) return versions->empty() ? nullptr : &(*versions)[number];
      number -= chunks;
    }
    const auto found = extras.find(number + static_cast<uint32_t>(kNumberedPlaces) * chunks);
    return found == extras.end() ? nullptr : found->second;
  };
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    const auto number = static_cast<uint32_t>(words[chunk] & kSlotMask);
    Version* const version = find(number);
    if (version == nullptr || version->published ||
        size_class[version->home] != size_class[chunk]) {
      return not_ours("chunk ", chunk, " lies in slot ", number);
    }
    version->published = true;
    version->step = words[chunk] >> kStepShift;
    table[chunk] = version;
  }
  for (uint32_t chunk = 0; chunk < chunks && options.keep_previous; ++chunk) {
    const auto number = static_cast<uint32_t>(previous_words[chunk] & kSlotMask);
    Version* const version = find(number);
    // In the middle of a switch the word names the published version: there is no other then.
    if (version == table[chunk]) continue;
    if (version == nullptr || version->published || version->previous ||
        size_class[version->home] != size_class[chunk]) {
      return not_ours("the previous version of chunk ", chunk, " lies in slot ", number);
    }
    version->previous = true;
    version->step = previous_words[chunk] >> kStepShift;
    previous[chunk] = version;
  }
  // What no word names is free, and goes.
  Freed freed;
  for (std::vector<Version>* versions : {&first, &second, &third}) {
    for (Version& version : *versions) {
      if (!version.published && !version.previous) Retire(&version, freed);
    }
  }
  for (const auto& [number, version] : extras) {
    if (!version->published && !version->previous) Retire(version, freed);
  }
  for (uint32_t chunk = 0; chunk < chunks && options.keep_previous; ++chunk) {
    if (previous[chunk] != nullptr) continue;
    previous[chunk] = TakeFree(static_cast<int>(chunk));
    if (previous[chunk] == nullptr) return not_ours("chunk ", chunk, " has no second place");
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
  ChunkStore::Impl::Freed freed;
  MutexLock lock(impl.mutex);
  if (--version_->pins > 0) return;
  if (version_->published || version_->previous) {
    if (version_->spare != nullptr) impl.Retire(std::exchange(version_->spare, nullptr), freed);
    return;
  }
  impl.Retire(version_, freed);
}

ChunkStore::ChunkStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ChunkStore::~ChunkStore() = default;

absl::StatusOr<std::unique_ptr<ChunkStore>> ChunkStore::Create(const Layout& layout,
                                                               Options options,
                                                               ArenaFactory& arenas) {
  const int64_t bytes = StateBytes(layout, options.planes);
  const std::string label = absl::StrCat(options.owner, " state");
  const bool second_versions = options.second_versions;
  const bool keep_previous = options.keep_previous;
  auto impl = std::make_unique<Impl>(layout, std::move(options), arenas);
  NamedArenas* const named = impl->options.named;
  const auto chunks = static_cast<uint32_t>(layout.chunks().size());
  const bool takes_over = named != nullptr && named->Has(kTableLabel);
  BALLAST_ASSIGN_OR_RETURN(impl->arena, arenas.Create(bytes, label, ArenaFactory::Touch::kNow));
  if (second_versions) {
    BALLAST_ASSIGN_OR_RETURN(
        impl->second_arena,
        arenas.Create(bytes, absl::StrCat(impl->options.owner, " ", kSecondLabel),
                      ArenaFactory::Touch::kNow));
  }
  if (keep_previous) {
    BALLAST_ASSIGN_OR_RETURN(
        impl->previous_arena,
        arenas.Create(bytes, absl::StrCat(impl->options.owner, " ", kPreviousLabel),
                      ArenaFactory::Touch::kNow));
  }
  if (named != nullptr) {
    const int64_t words = int64_t{chunks} * (keep_previous ? 2 : 1);
    BALLAST_ASSIGN_OR_RETURN(impl->table_arena,
                             named->Create(words * static_cast<int64_t>(sizeof(uint64_t)),
                                           kTableLabel, ArenaFactory::Touch::kNow));
    impl->words = reinterpret_cast<uint64_t*>(impl->table_arena->data());
    if (keep_previous) impl->previous_words = impl->words + chunks;
  }
  MutexLock lock(impl->mutex);
  impl->AddVersions(impl->arena->data(), impl->first, 0);
  impl->free.resize(chunks);
  std::map<std::pair<int64_t, int>, int> classes;  // By elements and planes.
  for (int chunk = 0; chunk < static_cast<int>(chunks); ++chunk) {
    const std::pair size(layout.chunks()[chunk].elements, impl->PlanesOf(chunk));
    impl->size_class.push_back(classes.try_emplace(size, classes.size()).first->second);
  }
  impl->free_count.resize(classes.size());
  if (second_versions) impl->AddVersions(impl->second_arena->data(), impl->second, chunks);
  if (keep_previous) {
    impl->AddVersions(impl->previous_arena->data(), impl->third, 2 * chunks);
    impl->previous.resize(chunks);
  }
  impl->table.resize(chunks);
  if (takes_over) {
    BALLAST_RETURN_IF_ERROR(impl->TakeOver());
    return std::unique_ptr<ChunkStore>(new ChunkStore(std::move(impl)));
  }
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    impl->first[chunk].published = true;
    impl->table[chunk] = &impl->first[chunk];
    impl->StoreWord(static_cast<int>(chunk), impl->first[chunk]);
    if (!keep_previous) continue;
    impl->third[chunk].previous = true;
    impl->previous[chunk] = &impl->third[chunk];
    impl->StorePreviousWord(static_cast<int>(chunk), impl->third[chunk]);
  }
  Impl::Freed none;
  for (ChunkPin::Version& version : impl->second) impl->Retire(&version, none);
  return std::unique_ptr<ChunkStore>(new ChunkStore(std::move(impl)));
}

absl::StatusOr<std::vector<ChunkPin>> ChunkStore::Pin(absl::Span<const int> chunks) {
  std::vector<ChunkPin> pins;  // On an error these release what was pinned, after the lock is gone.
  pins.reserve(chunks.size());
  Impl::Freed freed;
  MutexLock lock(impl_->mutex);
  absl::flat_hash_map<int, ChunkPin::Version*> spares;
  std::vector<int> without;  // Those for which named memory has no free slot: they get a batch.
  for (const int chunk : chunks) {
    if (impl_->table[chunk]->spare != nullptr || spares.contains(chunk)) continue;
    if (impl_->words != nullptr) {
      ChunkPin::Version* const free = impl_->TakeFree(chunk);
      if (free == nullptr) without.push_back(chunk);
      spares.emplace(chunk, free);
      continue;
    }
    auto spare = impl_->TakeFresh(chunk);
    if (!spare.ok()) {
      for (auto& [owner, taken] : spares) impl_->Retire(taken, freed);
      return spare.status();
    }
    spares.emplace(chunk, *spare);
  }
  if (!without.empty()) {
    auto batch = impl_->TakeBatch(without);
    if (!batch.ok()) {
      for (auto& [owner, taken] : spares) {
        if (taken != nullptr) impl_->Retire(taken, freed);
      }
      return batch.status();
    }
    for (size_t i = 0; i < without.size(); ++i) spares[without[i]] = (*batch)[i];
  }
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

ChunkPin::Version* ChunkStore::Impl::TakePrevious(int chunk, Freed& freed) {
  Version*& place = previous[chunk];
  if (place->pins > 0) {
    Version* const spare = std::exchange(place->spare, nullptr);
    Check(spare != nullptr, "a pinned version has a spare");
    return spare;
  }
  // One that moved out of the store's arenas goes back as soon as it can, which frees the other one.
  if (place->is_extra() && FreeLike(chunk) > 0) {
    StorePreviousWord(chunk, *table[chunk]);
    Version* const free_one = TakeFree(chunk);
    place->previous = false;
    Retire(std::exchange(place, free_one), freed);
    place->previous = true;
  }
  return place;
}

absl::StatusOr<ChunkStore::Write> ChunkStore::BeginWrite(int chunk, Destination destination) {
  Impl::Freed freed;
  MutexLock lock(impl_->mutex);
  ChunkPin::Version& current = *impl_->table[chunk];
  Write write;
  write.chunk = chunk;
  write.from = current.slot;
  if (impl_->options.keep_previous && destination != Destination::kInPlace) {
    write.in_place = false;
    if (destination == Destination::kInPlaceIfFree) {
      write.target = impl_->TakePrevious(chunk, freed);
    } else {
      BALLAST_ASSIGN_OR_RETURN(write.target, impl_->TakeFresh(chunk));
    }
    write.to = write.target->slot;
    return write;
  }
  // A chunk that moved out of its first slot goes back as soon as it can, which frees the other
  // one.
  const bool goes_back = current.is_extra() && impl_->FreeLike(chunk) > 0;
  if (destination == Destination::kInPlace ||
      (destination == Destination::kInPlaceIfFree && current.pins == 0 && !goes_back)) {
    write.to = current.slot;
    write.target = &current;
    return write;
  }
  ChunkPin::Version* target = std::exchange(current.spare, nullptr);
  if (target == nullptr) {
    BALLAST_ASSIGN_OR_RETURN(target, impl_->TakeFresh(chunk));
  }
  write.to = target->slot;
  write.in_place = false;
  write.target = target;
  return write;
}

void ChunkStore::Impl::Publish(const Write& write, uint64_t step, Freed& freed) {
  write.target->step = step;
  Version* gone = table[write.chunk];
  if (options.keep_previous && !write.in_place) {
    // First, since a chunk whose own word is of the step is not computed again.
    StorePreviousWord(write.chunk, *gone);
    gone->previous = true;
    gone = std::exchange(previous[write.chunk], gone);
    gone->previous = false;
  }
  StoreWord(write.chunk, *write.target);
  if (write.in_place) return;
  table[write.chunk]->published = false;
  table[write.chunk] = write.target;
  write.target->published = true;
  if (gone == write.target) return;
  if (gone->pins == 0) {
    Retire(gone, freed);
  } else if (options.keep_previous && gone->spare != nullptr) {
    Retire(std::exchange(gone->spare, nullptr), freed);
  }
}

void ChunkStore::Publish(absl::Span<const Write> writes, uint64_t step) {
  Impl::Freed freed;
  MutexLock lock(impl_->mutex);
  for (const Write& write : writes) impl_->Publish(write, step, freed);
}

void ChunkStore::Drop(const Write& write) {
  Check(!write.in_place, "only a write into a fresh version can be dropped");
  Impl::Freed freed;
  MutexLock lock(impl_->mutex);
  // The write may have used the place that a pinned version keeps for its writer.
  ChunkPin::Version& current = *impl_->table[write.chunk];
  if (current.pins > 0 && current.spare == nullptr) {
    current.spare = write.target;
  } else {
    impl_->Retire(write.target, freed);
  }
}

void ChunkStore::SetStep(uint64_t step) {
  MutexLock lock(impl_->mutex);
  for (int chunk = 0; chunk < static_cast<int>(impl_->table.size()); ++chunk) {
    impl_->table[chunk]->step = step;
    impl_->StoreWord(chunk, *impl_->table[chunk]);
  }
}

void ChunkStore::SwitchBack(uint64_t step) {
  MutexLock lock(impl_->mutex);
  for (int chunk = 0; chunk < static_cast<int>(impl_->table.size()); ++chunk) {
    ChunkPin::Version*& published = impl_->table[chunk];
    ChunkPin::Version*& previous = impl_->previous[chunk];
    if (published->step <= step) continue;
    Check(previous->step == step, "a previous version is of the step that is gone back to");
    std::swap(published, previous);
    std::swap(published->published, previous->published);
    std::swap(published->previous, previous->previous);
    impl_->StoreWord(chunk, *published);
    impl_->StorePreviousWord(chunk, *previous);
  }
}

void ChunkStore::SetArrived(int chunk, bool arrived) {
  MutexLock lock(impl_->mutex);
  if (impl_->words == nullptr) return;
  const uint64_t word = impl_->words[chunk];
  std::atomic_ref<uint64_t>(impl_->words[chunk])
      .store(arrived ? word | kArrived : word & ~kArrived, std::memory_order_release);
  Stored("a chunk's first weights");
}

bool ChunkStore::arrived(int chunk) const {
  MutexLock lock(impl_->mutex);
  return impl_->words != nullptr && (impl_->words[chunk] & kArrived) != 0;
}

}  // namespace ballast
