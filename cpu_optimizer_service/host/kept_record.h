// Bytes in named memory that change whole or not at all, and a log that grows entry by entry: for
// the small things that the next process must find as they were at one instant.
//
// Both rest on the order of one thread's stores. A process that dies leaves all that it had stored
// before, and nothing of what would have come after; which instant that is nobody chooses.
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

// Called after each store that a later process could see, by what was stored: tests end the process
// there. Null but in tests.
extern std::function<void(const char* what)>* store_seam;
inline void Stored(const char* what) {
  if (store_seam != nullptr) (*store_seam)(what);
}

// FNV-1a, of eight bytes at a time.
uint64_t ChecksumOf(absl::string_view bytes);

// Two halves. The new contents go to the one that is not current, with their length and a checksum;
// then one store of a word makes it current.
class KeptRecord {
 public:
  // Memory named "LABEL N" of `arenas`, for contents of `capacity` bytes; it grows where that is
  // not enough, by another name.
  KeptRecord(NamedArenas& arenas, std::string label, int64_t capacity);

  // What an earlier process stored last. NOT_FOUND: nothing. DATA_LOSS: it is not as it was stored;
  // the message names the memory.
  absl::StatusOr<std::string> TakeOver();
  // After that: an earlier process had made memory for it, whether or not it stored anything.
  bool was_made() const { return number_ > 0; }
  // Memory for it, with nothing stored. RESOURCE_EXHAUSTED.
  absl::Status Make() {
    std::unique_ptr<Arena> none;
    return Grow(capacity_ / 2, none);
  }
  // RESOURCE_EXHAUSTED: no memory to grow; then it has what it had.
  absl::Status Store(absl::string_view contents);
  // A later process finds that nothing was stored.
  void Forget();
  // What it has goes; a later process finds nothing.
  void Drop() { arena_ = nullptr; }
  // The contents of another one, that is over.
  void TakeFrom(KeptRecord&& other) {
    capacity_ = other.capacity_;
    number_ = other.number_;
    arena_ = std::move(other.arena_);
  }

 private:
  // `older`: what it had until now. After an error it is as it was.
  absl::Status Grow(int64_t bytes, std::unique_ptr<Arena>& older);
  absl::Status Damaged() const;

  NamedArenas& arenas_;
  const std::string label_;
  int64_t capacity_;
  int64_t number_ = 0;
  std::unique_ptr<Arena> arena_;  // Null: not made.
};

// Entries in order, of one epoch; those of another epoch are none.
class KeptLog {
 public:
  KeptLog(NamedArenas& arenas, std::string label, int64_t capacity);

  // Calls visit(entry) for what an earlier process left of this epoch.
  absl::Status TakeOver(uint64_t epoch, const std::function<void(absl::string_view)>& visit);
  // RESOURCE_EXHAUSTED: no memory to grow; nothing is appended then.
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
