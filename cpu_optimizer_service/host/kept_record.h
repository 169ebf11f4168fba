// Bytes in named memory that change atomically, and a log that grows entry by entry: for small data
// that the next process must find as of one instant.
//
// Both rely on the order of one thread's stores. A crashed process leaves all its earlier stores
// and none of its later ones. The crash may come at any instant.
//
// Thread-compatible: their owner's lock guards them.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_HOST_KEPT_RECORD_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_HOST_KEPT_RECORD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/host/named_memory.h"

namespace ballast {

// Called after each store that a later process could see, with the name of what was stored: tests
// end the process there. Null except in tests.
extern std::function<void(const char* what)>* store_seam;
inline void Stored(const char* what) {
  if (store_seam != nullptr) (*store_seam)(what);
}

// FNV-1a, eight bytes at a time.
uint64_t ChecksumOf(absl::string_view bytes);

// Two halves. New contents go to the half that is not current, with their length and a checksum.
// Then one store of a word makes it current.
class KeptRecord {
 public:
  // Memory named "LABEL N" of `arenas`, for contents of `capacity` bytes. If that is too small, it
  // grows, under another name.
  KeptRecord(NamedArenas& arenas, std::string label, int64_t capacity);

  // An earlier process's last contents. NOT_FOUND: none stored. DATA_LOSS: the contents have
  // changed; the message names the memory.
  absl::StatusOr<std::string> TakeOver();
  // After that: whether an earlier process made memory for it, even without contents.
  bool was_made() const { return number_ > 0; }
  // Makes memory for it, without contents. RESOURCE_EXHAUSTED.
  absl::Status Make() {
    std::unique_ptr<Arena> none;
    return Grow(capacity_ / 2, none);
  }
  // RESOURCE_EXHAUSTED: no memory to grow; the old contents stay.
  absl::Status Store(absl::string_view contents);
  // A later process finds no contents.
  void Forget();
  // Drops the memory; a later process finds nothing.
  void Drop() { arena_ = nullptr; }
  // The contents of another one, which ends.
  void TakeFrom(KeptRecord&& other) {
    capacity_ = other.capacity_;
    number_ = other.number_;
    arena_ = std::move(other.arena_);
  }

 private:
  // `older`: its previous memory. After an error nothing has changed.
  absl::Status Grow(int64_t bytes, std::unique_ptr<Arena>& older);
  absl::Status Damaged() const;

  NamedArenas& arenas_;
  const std::string label_;
  int64_t capacity_;
  int64_t number_ = 0;
  std::unique_ptr<Arena> arena_;  // Null: not made.
};

// An append-only log. Entries from other epochs are ignored.
class KeptLog {
 public:
  KeptLog(NamedArenas& arenas, std::string label, int64_t capacity);

  // Calls visit(entry) for an earlier process's entries of this epoch.
  absl::Status TakeOver(uint64_t epoch, const std::function<void(absl::string_view)>& visit);
  // RESOURCE_EXHAUSTED: no memory to grow; the entry is not appended.
  absl::Status Append(uint64_t epoch, absl::string_view entry);

 private:
  struct Header;
  absl::Status Grow(int64_t bytes);

  NamedArenas& arenas_;
  const std::string label_;
  int64_t capacity_;
  int64_t number_ = 0;
  std::unique_ptr<Arena> arena_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_KEPT_RECORD_H_
