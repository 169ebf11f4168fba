#include "cpu_optimizer_service/state/slot_pool.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/plan/memory_need.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/ordered_stores.h"
#include "cpu_optimizer_service/common/text/activity.h"
#include "cpu_optimizer_service/host/kept_record.h"

namespace ballast {

// Named memory for slots that are needed for a while, all of one Pin. Its first bytes say which
// they are; the slots follow in their order.
struct SlotBatch {
  MemoryBudget::Reservation reservation;
  std::unique_ptr<Arena> arena;
  uint64_t first_slot = 0;
  uint64_t end_slot = 0;
};

namespace {

// A slot's number has kNumberBits bits in a word of the table.
constexpr uint64_t kMostSlots = (uint64_t{1} << SlotPool::kNumberBits) - 1;
constexpr char kBatchLabel[] = "versions ";
constexpr const char* kPlaceLabels[] = {"state", "second versions", "previous versions"};

struct BatchHeader {
  uint64_t first_slot = 0;
  uint32_t slots = 0;  // Stored last; 0: the rest is not there yet.
  uint32_t check = 0;  // Of all that is here.
  // Then `slots` chunk numbers of 32 bits.
};

int64_t BatchHeaderBytes(int64_t slots) {
  return AlignUp(static_cast<int64_t>(sizeof(BatchHeader)) +
                 slots * static_cast<int64_t>(sizeof(uint32_t)));
}

int64_t SlotBytesOf(const Layout& layout, const ChunkStore::Options& options, int chunk) {
  const Chunk& of = layout.chunks()[chunk];
  return SlotBytes(of.elements, options.planes[of.group], of.format);
}

uint32_t CheckOf(uint64_t first_slot, absl::Span<const uint32_t> numbers) {
  const auto bytes = [](const auto& values) {
    return absl::string_view(reinterpret_cast<const char*>(values.data()),
                             values.size() * sizeof(values[0]));
  };
  const std::array<uint64_t, 2> of = {first_slot, ChecksumOf(bytes(numbers))};
  return static_cast<uint32_t>(ChecksumOf(bytes(of)) >> 32);
}

Slot MakeSlot(std::byte* memory, const Chunk& chunk, PlaneList planes) {
  Slot slot = {.format = chunk.format};
  for (const Plane stored : StoredPlanesOf(planes, chunk.format)) {
    slot.planes[static_cast<int>(stored)] = memory;
    memory += StoredPlaneBytes(chunk.format, stored, chunk.elements);
  }
  return slot;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SlotPool>> SlotPool::Create(const Layout& layout,
                                                           const ChunkStore::Options& options,
                                                           ArenaFactory& arenas) {
  std::unique_ptr<SlotPool> pool(new SlotPool(layout, options, arenas));
  BALLAST_RETURN_IF_ERROR(pool->Allocate(0));
  if (options.second_versions) BALLAST_RETURN_IF_ERROR(pool->Allocate(1));
  if (options.keep_previous) BALLAST_RETURN_IF_ERROR(pool->Allocate(2));
  const int chunks = static_cast<int>(layout.chunks().size());
  pool->free_.resize(chunks);
  // By elements, format and planes.
  std::map<std::tuple<int64_t, StateFormat, std::vector<Plane>>, int> kinds;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const PlaneList planes = pool->PlanesOf(chunk);
    const std::tuple kind(layout.chunks()[chunk].elements, layout.chunks()[chunk].format,
                          std::vector<Plane>(planes.begin(), planes.end()));
    pool->kind_.push_back(kinds.try_emplace(kind, kinds.size()).first->second);
  }
  pool->free_count_.resize(kinds.size());
  return pool;
}

// The chunks' places, one behind the other.
absl::Status SlotPool::Allocate(int place) {
  BALLAST_ASSIGN_OR_RETURN(place_arenas_[place],
                           arenas_.Create(StateBytes(layout_, options_.planes),
                                          absl::StrCat(options_.owner, " ", kPlaceLabels[place]),
                                          ArenaFactory::Touch::kNow));
  const int chunks = static_cast<int>(layout_.chunks().size());
  std::byte* memory = place_arenas_[place]->data();
  places_[place] = std::vector<ChunkVersion>(chunks);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    ChunkVersion& version = places_[place][chunk];
    version.home = chunk;
    // Counted as if all places were there, so that a number means the same slot whatever a job has.
    version.number = static_cast<uint32_t>(place * chunks + chunk);
    version.slot = MakeSlot(memory, layout_.chunks()[chunk], PlanesOf(chunk));
    memory += SlotBytesOf(layout_, options_, chunk);
  }
  return absl::OkStatus();
}

ChunkVersion* SlotPool::TakeFree(int chunk) {
  if (!HasFree(chunk)) return nullptr;
  const auto take = [&](int home) -> ChunkVersion* {
    if (!AreOfOneKind(home, chunk)) return nullptr;
    for (ChunkVersion*& place : free_[home]) {
      if (place == nullptr) continue;
      --free_count_[kind_[chunk]];
      return std::exchange(place, nullptr);
    }
    return nullptr;
  };
  // Nearly always the chunk's own.
  for (int home = chunk; home < static_cast<int>(free_.size()); ++home) {
    if (ChunkVersion* version = take(home); version != nullptr) return version;
  }
  for (int home = chunk - 1; home >= 0; --home) {
    if (ChunkVersion* version = take(home); version != nullptr) return version;
  }
  // HasFree counted one of this kind, so a loop above has found it.
  Check(false, "a chunk that needs a place has one");
  return nullptr;
}

void SlotPool::Retire(ChunkVersion* version, Freed& freed) {
  if (version->spare != nullptr) Retire(std::exchange(version->spare, nullptr), freed);
  if (version->is_extra()) {
    const auto found = others_.find(version);
    freed.push_back(std::move(found->second));
    others_.erase(found);
    return;
  }
  // A home has as many entries as versions, so one of them is empty.
  auto& places = free_[version->home];
  *std::find(places.begin(), places.end(), nullptr) = version;
  ++free_count_[kind_[version->home]];
}

void SlotPool::RetireUnused(Freed& freed) {
  // Collected first, because Retire takes from `others_`.
  std::vector<ChunkVersion*> all;
  for (std::vector<ChunkVersion>& versions : places_) {
    for (ChunkVersion& version : versions) all.push_back(&version);
  }
  for (const auto& [version, owned] : others_) all.push_back(version);
  for (ChunkVersion* version : all) {
    if (!version->published && !version->previous) Retire(version, freed);
  }
}

absl::StatusOr<ChunkVersion*> SlotPool::TakeFresh(int chunk) {
  if (ChunkVersion* version = TakeFree(chunk); version != nullptr) return version;
  if (options_.named != nullptr) {  // A slot without a number could not be found again.
    BALLAST_ASSIGN_OR_RETURN(const std::vector<ChunkVersion*> one, TakeBatch({chunk}));
    return one[0];
  }
  const int64_t bytes = SlotBytesOf(layout_, options_, chunk);
  auto version = std::make_unique<ChunkVersion>();
  BALLAST_ASSIGN_OR_RETURN(
      version->reservation,
      options_.budget->Reserve(bytes,
                               absl::StrCat("a second version of a chunk of ", options_.owner)));
  // Its pages come with the update that writes it, from the node of the thread that does.
  BALLAST_ASSIGN_OR_RETURN(version->arena,
                           arenas_.Create(bytes, options_.owner, ArenaFactory::Touch::kLater));
  version->slot = MakeSlot(version->arena->data(), layout_.chunks()[chunk], PlanesOf(chunk));
  ChunkVersion* const fresh = version.get();
  others_.emplace(fresh, std::move(version));
  return fresh;
}

absl::StatusOr<std::vector<ChunkVersion*>> SlotPool::TakeBatch(absl::Span<const int> chunks) {
  // The store's lock is held, so pages come later where that can be; MakeRoom has them made before.
  BALLAST_ASSIGN_OR_RETURN(BatchMemory memory, MakeBatch(layout_, options_, chunks, ++last_batch_,
                                                         ArenaFactory::Touch::kLater));
  return NumberBatch(chunks, std::move(memory));
}

absl::StatusOr<SlotPool::BatchMemory> SlotPool::MakeBatch(const Layout& layout,
                                                          const ChunkStore::Options& options,
                                                          absl::Span<const int> chunks,
                                                          uint64_t number,
                                                          ArenaFactory::Touch touch) {
  int64_t bytes = BatchHeaderBytes(static_cast<int64_t>(chunks.size()));
  for (const int chunk : chunks) bytes += SlotBytesOf(layout, options, chunk);
  const std::string what = absl::StrCat("second versions of chunks of ", options.owner);
  BatchMemory memory;
  // The budget is what jobs may have; what the machine has left is another question, and is asked
  // where all pages are to come now.
  BALLAST_ASSIGN_OR_RETURN(memory.reservation, options.budget->Reserve(bytes, what));
  if (touch == ArenaFactory::Touch::kNow) {
    BALLAST_RETURN_IF_ERROR(options.named->memory().Admit(bytes, what));
    Progress::OfThisThread().Expect(bytes);
  }
  BALLAST_ASSIGN_OR_RETURN(
      memory.arena,
      options.named->Create(bytes, absl::StrCat(options.owner, " ", kBatchLabel, number), touch));
  return memory;
}

absl::StatusOr<std::vector<ChunkVersion*>> SlotPool::NumberBatch(absl::Span<const int> chunks,
                                                                 BatchMemory memory) {
  const uint64_t first_of_batches = kPlaces * layout_.chunks().size();
  // Numbers go upwards, so that no two batches have one in common, whatever their sizes. At the end
  // they begin again.
  uint64_t first_slot = std::max(end_slot_, first_of_batches);
  if (first_slot + chunks.size() > kMostSlots) {  // Behind those that there still are.
    first_slot = first_of_batches;
    std::erase_if(batches_, [](const std::weak_ptr<SlotBatch>& batch) { return batch.expired(); });
    for (const std::weak_ptr<SlotBatch>& weak : batches_) {
      if (const auto batch = weak.lock(); batch != nullptr) {
        first_slot = std::max(first_slot, batch->end_slot);
      }
    }
  }
  if (first_slot + chunks.size() > kMostSlots) {
    return absl::ResourceExhaustedError(
        absl::StrCat(options_.owner, " has too many versions of its chunks; close readers"));
  }
  BatchHeader& header = *reinterpret_cast<BatchHeader*>(memory.arena->data());
  auto* const numbers = reinterpret_cast<uint32_t*>(&header + 1);
  std::copy(chunks.begin(), chunks.end(), numbers);
  header.first_slot = first_slot;
  header.check = CheckOf(first_slot, {numbers, chunks.size()});
  // A process that dies before the next store leaves a batch without slots, which TakeOverBatch
  // gives up.
  KeepOrderOfStores();
  header.slots = static_cast<uint32_t>(chunks.size());
  return AddBatch(std::move(memory.arena), std::move(memory.reservation));
}

std::vector<int> SlotPool::WithoutFree(absl::Span<const int> chunks) const {
  std::vector<int> without;
  std::vector<int64_t> left = free_count_;
  for (const int chunk : chunks) {
    if (--left[kind_[chunk]] < 0) without.push_back(chunk);
  }
  return without;
}

std::vector<ChunkVersion*> SlotPool::AddBatch(std::unique_ptr<Arena> memory,
                                              MemoryBudget::Reservation reservation) {
  auto batch = std::make_shared<SlotBatch>();
  batch->reservation = std::move(reservation);
  batch->arena = std::move(memory);
  const auto& header = *reinterpret_cast<const BatchHeader*>(batch->arena->data());
  const auto* const numbers = reinterpret_cast<const uint32_t*>(&header + 1);
  batch->first_slot = header.first_slot;
  batch->end_slot = header.first_slot + header.slots;
  std::byte* at = batch->arena->data() + BatchHeaderBytes(static_cast<int64_t>(header.slots));
  std::vector<ChunkVersion*> added;
  decltype(others_) versions;  // The pool has all of them, or none.
  for (uint64_t i = 0; i < header.slots; ++i) {
    const int chunk = static_cast<int>(numbers[i]);
    auto version = std::make_unique<ChunkVersion>();
    version->slot = MakeSlot(at, layout_.chunks()[chunk], PlanesOf(chunk));
    at += SlotBytesOf(layout_, options_, chunk);
    version->number = static_cast<uint32_t>(header.first_slot + i);
    version->home = chunk;
    version->batch = batch;
    added.push_back(version.get());
    versions.emplace(added.back(), std::move(version));
  }
  // Looked through only when there are twice as many as were left the last time, so that each batch
  // costs little.
  if (batches_.size() >= most_batches_) {
    std::erase_if(batches_, [](const std::weak_ptr<SlotBatch>& other) { return other.expired(); });
    most_batches_ = 2 * batches_.size() + 16;
  }
  batches_.push_back(batch);
  // The last call that may throw: a merge moves entries, and takes no memory.
  others_.reserve(others_.size() + versions.size());
  others_.merge(versions);
  end_slot_ = batch->end_slot;
  return added;
}

absl::StatusOr<SlotPool::Numbered> SlotPool::TakeOver() {
  Numbered all;
  for (std::vector<ChunkVersion>& versions : places_) {
    for (ChunkVersion& version : versions) all[version.number] = &version;
  }
  for (const std::string& label : options_.named->Left(kBatchLabel)) {
    BALLAST_RETURN_IF_ERROR(TakeOverBatch(label, all));
  }
  return all;
}

absl::Status SlotPool::TakeOverBatch(const std::string& label, Numbered& all) {
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<Arena> memory,
                           options_.named->Open(sizeof(BatchHeader), label));
  // New batches get higher numbers in their names, so none has the name of one that is there.
  uint64_t number = 0;
  if (absl::SimpleAtoi(absl::StripPrefix(label, kBatchLabel), &number)) {
    last_batch_ = std::max(last_batch_, number);
  }
  const auto& header = *reinterpret_cast<const BatchHeader*>(memory->data());
  if (header.slots == 0) return absl::OkStatus();  // No version can lie in one of them.
  const auto is_whole = [&] {
    // The header may be damaged, so each of its numbers is compared before it is used.
    int64_t bytes = BatchHeaderBytes(header.slots);
    if (bytes > memory->size_bytes() || header.first_slot < kPlaces * layout_.chunks().size() ||
        header.first_slot > kMostSlots || header.first_slot + header.slots > kMostSlots + 1) {
      return false;
    }
    const absl::Span<const uint32_t> chunks(reinterpret_cast<const uint32_t*>(&header + 1),
                                            header.slots);
    if (header.check != CheckOf(header.first_slot, chunks)) return false;
    for (const uint32_t chunk : chunks) {
      if (chunk >= layout_.chunks().size()) return false;
      bytes += SlotBytesOf(layout_, options_, static_cast<int>(chunk));
    }
    return bytes <= memory->size_bytes();
  };
  const absl::Status damaged = absl::DataLossError(
      absl::StrCat(options_.named->WhatIs(label),
                   " is not as it was stored: what it says of its slots is wrong"));
  if (!is_whole()) return damaged;
  const int64_t bytes = memory->size_bytes();
  // Batches come in the order of their names, in which 10 is before 2, so the highest end counts.
  const uint64_t others_end = end_slot_;
  for (ChunkVersion* version : AddBatch(std::move(memory), options_.budget->Take(bytes))) {
    // A number that two slots have would lead a word of the table to either of them.
    if (!all.emplace(version->number, version).second) return damaged;
  }
  end_slot_ = std::max(end_slot_, others_end);
  return absl::OkStatus();
}

std::string SlotPool::WhatHas(uint32_t number) const {
  const size_t place = number / std::max<size_t>(layout_.chunks().size(), 1);
  return options_.named->WhatIs(place < kPlaces ? kPlaceLabels[place] : kBatchLabel);
}

}  // namespace ballast
