#include "cpu_optimizer_service/host/kept_record.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/checked_word.h"
#include "cpu_optimizer_service/common/system/ordered_stores.h"

namespace ballast {

std::function<void(const char*)>* store_seam = nullptr;

uint64_t ChecksumOf(absl::string_view bytes) {
  // The offset and the prime of FNV-1a for 64 bits. The last word is filled up with zeros, so the
  // length goes in, too. A multiplication carries bits upwards alone; the shift brings them down.
  uint64_t hash = 0xcbf29ce484222325u ^ bytes.size();
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, std::min(sizeof(word), bytes.size() - at));
    hash = (hash ^ word) * 0x100000001b3u;
    hash ^= hash >> 29;
  }
  return hash;
}

namespace {

// Checked words.
struct RecordHeader {
  uint64_t current = 0;   // The half that counts, 1 or 2; 0: none.
  uint64_t capacity = 0;  // Of a half's contents.
};
struct HalfHeader {
  uint64_t bytes = 0;
  uint64_t checksum = 0;
};

RecordHeader& HeaderOf(Arena& arena) { return *reinterpret_cast<RecordHeader*>(arena.data()); }
// Both of a whole one.
int CurrentOf(Arena& arena) {
  return static_cast<int>(HeaderOf(arena).current & kCheckedValueMask);
}
int64_t CapacityOf(Arena& arena) {
  return static_cast<int64_t>(HeaderOf(arena).capacity & kCheckedValueMask);
}
std::byte* HalfOf(Arena& arena, int half) {
  return arena.data() + kArenaAlignment +
         (half - 1) * AlignUp(CapacityOf(arena) + static_cast<int64_t>(sizeof(HalfHeader)));
}
bool IsWhole(Arena& arena) {
  const RecordHeader& header = HeaderOf(arena);
  const std::optional<uint64_t> current = ValueOf(header.current);
  if (!current.has_value() || *current > 2) return false;
  // The process may have died before it stored the capacity, which nobody reads then.
  if (*current == 0) return true;
  // Asked before HalfOf computes with the capacity, because a damaged one would lead out of the
  // memory.
  const std::optional<uint64_t> capacity = ValueOf(header.capacity);
  const int64_t most_bytes = arena.size_bytes() - kArenaAlignment;
  return capacity.has_value() && *capacity < static_cast<uint64_t>(most_bytes) &&
         2 * AlignUp(static_cast<int64_t>(*capacity + sizeof(HalfHeader))) <= most_bytes;
}

// The numbers of the names that begin with the label, ascending.
std::vector<int64_t> NumbersLeft(const NamedArenas& arenas, absl::string_view label) {
  std::vector<int64_t> numbers;
  for (const std::string& left : arenas.Left(absl::StrCat(label, " "))) {
    int64_t number = 0;
    if (absl::SimpleAtoi(absl::StripPrefix(left, absl::StrCat(label, " ")), &number)) {
      numbers.push_back(number);
    }
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

}  // namespace

// ---------------------------------------------------------------- a record

KeptRecord::KeptRecord(NamedArenas& arenas, std::string label, int64_t capacity)
    : arenas_(arenas), label_(std::move(label)), capacity_(capacity) {}

absl::StatusOr<std::string> KeptRecord::TakeOver() {
  // Where the process died after a grown record had its first contents and before the older one
  // went, both have contents. The higher number is the newer one, and comes last.
  for (const int64_t number : NumbersLeft(arenas_, label_)) {
    BALLAST_ASSIGN_OR_RETURN(
        std::unique_ptr<Arena> arena,
        arenas_.Create(1, absl::StrCat(label_, " ", number), ArenaFactory::Touch::kLater));
    number_ = number;
    if (!IsWhole(*arena)) return Damaged();
    // One that was growing when its process died has nothing yet, and goes.
    if (CurrentOf(*arena) != 0) arena_ = std::move(arena);
  }
  if (arena_ == nullptr) return absl::NotFoundError(absl::StrCat("no ", label_, " was kept"));
  capacity_ = CapacityOf(*arena_);
  const std::byte* const half = HalfOf(*arena_, CurrentOf(*arena_));
  const auto& header = *reinterpret_cast<const HalfHeader*>(half);
  // Before the bytes are read: a damaged length could lead beyond the memory.
  if (header.bytes > static_cast<uint64_t>(capacity_)) return Damaged();
  std::string contents(reinterpret_cast<const char*>(half + sizeof(HalfHeader)), header.bytes);
  if (ChecksumOf(contents) != header.checksum) return Damaged();
  return contents;
}

absl::Status KeptRecord::Damaged() const {
  return absl::DataLossError(absl::StrCat(arenas_.WhatIs(absl::StrCat(label_, " ", number_)),
                                          " is not as it was stored: its checksum differs"));
}

void KeptRecord::Forget() {
  if (arena_ == nullptr) return;
  StoreWord(HeaderOf(*arena_).current, 0);
  Stored("a record is forgotten");
}

absl::Status KeptRecord::Grow(int64_t bytes, std::unique_ptr<Arena>& older) {
  // Twice what is needed now, so that contents that grow a little each time are seldom moved.
  const int64_t capacity = std::max(capacity_, 2 * bytes);
  const int64_t half = AlignUp(capacity + static_cast<int64_t>(sizeof(HalfHeader)));
  BALLAST_ASSIGN_OR_RETURN(
      std::unique_ptr<Arena> arena,
      arenas_.Create(kArenaAlignment + 2 * half, absl::StrCat(label_, " ", number_ + 1),
                     ArenaFactory::Touch::kNow));
  ++number_;
  capacity_ = capacity;
  // `current` is 0 until Store flips it: a process that dies before leaves this one without
  // contents, and TakeOver takes the older one.
  HeaderOf(*arena).capacity = CheckedWord(static_cast<uint64_t>(capacity));
  older = std::exchange(arena_, std::move(arena));
  return absl::OkStatus();
}

absl::Status KeptRecord::Store(absl::string_view contents) {
  const auto bytes = static_cast<int64_t>(contents.size());
  std::unique_ptr<Arena> older;  // Until the new one has what it had.
  if (arena_ == nullptr || bytes > capacity_) {
    BALLAST_RETURN_IF_ERROR(Grow(bytes, older));
  }
  const int next = CurrentOf(*arena_) == 1 ? 2 : 1;
  std::byte* const half = HalfOf(*arena_, next);
  std::byte* const to = half + sizeof(HalfHeader);
  // The half that is not current is written, so a death in here leaves the older contents as they
  // were. It is written in two parts only so that a test can end the process between them.
  const size_t middle = contents.size() / 2;
  std::memcpy(to, contents.data(), middle);
  Stored("a part of a record");
  std::memcpy(to + middle, contents.data() + middle, contents.size() - middle);
  *reinterpret_cast<HalfHeader*>(half) = {.bytes = contents.size(),
                                          .checksum = ChecksumOf(contents)};
  Stored("a record's half");
  // StoreWord keeps the order: contents, length and checksum are all there before the word says so.
  StoreWord(HeaderOf(*arena_).current, CheckedWord(static_cast<uint64_t>(next)));
  Stored("a record's flip");
  return absl::OkStatus();
}

// ---------------------------------------------------------------- a log

// Checked words.
struct KeptLog::Header {
  uint64_t epoch = 0;
  uint64_t tail = 0;  // Bytes of entries.
};

namespace {

// Before an entry.
struct EntryHeader {
  uint64_t bytes = 0;
  uint64_t checksum = 0;
};

}  // namespace

KeptLog::KeptLog(NamedArenas& arenas, std::string label, int64_t capacity)
    : arenas_(arenas), label_(std::move(label)), capacity_(capacity) {}

absl::Status KeptLog::TakeOver(uint64_t epoch,
                               const std::function<void(absl::string_view)>& visit) {
  bool whole = true;
  for (const int64_t number : NumbersLeft(arenas_, label_)) {
    BALLAST_ASSIGN_OR_RETURN(
        std::unique_ptr<Arena> arena,
        arenas_.Create(1, absl::StrCat(label_, " ", number), ArenaFactory::Touch::kLater));
    number_ = number;
    const std::optional<uint64_t> of = ValueOf(reinterpret_cast<Header*>(arena->data())->epoch);
    whole = whole && of.has_value();
    // One that was growing when its process died has no epoch yet.
    if (arena_ == nullptr || of == epoch) arena_ = std::move(arena);
  }
  if (arena_ == nullptr) return absl::OkStatus();
  capacity_ = arena_->size_bytes() - kArenaAlignment;
  const absl::Status damaged = absl::DataLossError(
      absl::StrCat(arenas_.WhatIs(absl::StrCat(label_, " ", number_)), " is not as it was stored"));
  if (!whole) return damaged;
  const auto& header = *reinterpret_cast<const Header*>(arena_->data());
  if (header.epoch != CheckedWord(epoch)) return absl::OkStatus();
  const char* const entries = reinterpret_cast<const char*>(arena_->data()) + kArenaAlignment;
  // All lengths come from memory that may be damaged, so each is compared before it is used.
  const uint64_t tail = ValueOf(header.tail).value_or(std::numeric_limits<uint64_t>::max());
  if (tail > static_cast<uint64_t>(capacity_)) return damaged;
  for (uint64_t at = 0; at < tail;) {
    EntryHeader of;
    if (tail - at < sizeof(of)) return damaged;
    std::memcpy(&of, entries + at, sizeof(of));
    at += sizeof(of);
    if (of.bytes > tail - at) return damaged;
    const absl::string_view entry(entries + at, of.bytes);
    if (ChecksumOf(entry) != of.checksum) return damaged;
    visit(entry);
    at += of.bytes;
  }
  return absl::OkStatus();
}

absl::Status KeptLog::Grow(int64_t bytes) {
  const int64_t capacity = std::max(capacity_, 2 * bytes);
  BALLAST_ASSIGN_OR_RETURN(
      std::unique_ptr<Arena> arena,
      arenas_.Create(kArenaAlignment + capacity, absl::StrCat(label_, " ", number_ + 1),
                     ArenaFactory::Touch::kNow));
  ++number_;
  capacity_ = capacity;
  if (arena_ != nullptr) {
    const auto& old = *reinterpret_cast<const Header*>(arena_->data());
    auto& grown = *reinterpret_cast<Header*>(arena->data());
    // The epoch is stored last. A process that dies before leaves a log of no epoch, which TakeOver
    // passes over; one that dies after it leaves two with the same entries, and then the newer
    // counts.
    std::memcpy(arena->data() + kArenaAlignment, arena_->data() + kArenaAlignment,
                old.tail & kCheckedValueMask);
    grown.tail = old.tail;
    StoreWord(grown.epoch, old.epoch);
  }
  arena_.swap(arena);
  return absl::OkStatus();
}

absl::Status KeptLog::Append(uint64_t epoch, absl::string_view entry) {
  const EntryHeader of = {.bytes = entry.size(), .checksum = ChecksumOf(entry)};
  const uint64_t bytes = sizeof(of) + entry.size();
  // Entries of another epoch are overwritten, and need no room.
  const auto needed = [&]() -> int64_t {
    if (arena_ == nullptr) return static_cast<int64_t>(bytes);
    const auto& header = *reinterpret_cast<const Header*>(arena_->data());
    const uint64_t tail = header.epoch == CheckedWord(epoch) ? header.tail & kCheckedValueMask : 0;
    return static_cast<int64_t>(tail + bytes);
  }();
  if (arena_ == nullptr || needed > capacity_) BALLAST_RETURN_IF_ERROR(Grow(needed));
  auto& header = *reinterpret_cast<Header*>(arena_->data());
  if (header.epoch != CheckedWord(epoch)) {
    // The end first: with the epoch first, a process that dies in between would leave entries of
    // the older epoch as if they were of this one.
    StoreWord(header.tail, 0);
    StoreWord(header.epoch, CheckedWord(epoch));
  }
  // The entry is written behind the end, where a later process does not look. The end comes last.
  const uint64_t tail = header.tail & kCheckedValueMask;
  std::byte* const at = arena_->data() + kArenaAlignment + tail;
  std::memcpy(at, &of, sizeof(of));
  std::memcpy(at + sizeof(of), entry.data(), entry.size());
  Stored("an entry of the log");
  StoreWord(header.tail, CheckedWord(tail + bytes));
  Stored("the log's end");
  return absl::OkStatus();
}

}  // namespace ballast
