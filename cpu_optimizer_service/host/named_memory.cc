#include "cpu_optimizer_service/host/named_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/populate_pages.h"
#include "cpu_optimizer_service/common/text/activity.h"
#include "cpu_optimizer_service/host/huge_pages.h"
#include "cpu_optimizer_service/host/kept_record.h"

// Linux 6.1; older headers do not have it.
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace ballast {
namespace {

// What one task makes huge: a few milliseconds of the system's work. Less is not worth the calls.
constexpr int64_t kCollapseBytes = 8 * kHugePageBytes;
bool IsMadeHuge(int64_t bytes) { return bytes >= kCollapseBytes; }

// Memory that is made huge is half way when its pages are there.
constexpr int64_t kHugeParts = 2;

int64_t SizeOf(int file) {
  // Sockets are kept, too, and count as no memory.
  struct stat facts = {};
  return fstat(file, &facts) == 0 && S_ISREG(facts.st_mode) ? facts.st_size : 0;
}

// Where nothing is mapped, for so many bytes that begin a huge page: elsewhere the kernel maps
// none. Null: anywhere.
void* PlaceFor(int64_t bytes) {
  if (bytes < kHugePageBytes) return nullptr;
  const int64_t room = bytes + kHugePageBytes;
  void* const found =
      mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  // Another thread may map something there before the caller does. The address is only a hint,
  // without MAP_FIXED: the caller then gets memory elsewhere, in small pages, and nothing is
  // overwritten.
  munmap(found, room);
  const auto begin = reinterpret_cast<uintptr_t>(found) + kHugePageBytes - 1;
  return reinterpret_cast<void*>(begin / kHugePageBytes * kHugePageBytes);
}

absl::Status Wanting(int64_t bytes, absl::string_view what, int64_t left_bytes,
                     absl::string_view where) {
  return absl::ResourceExhaustedError(absl::StrCat(what, " needs ", bytes, " bytes of memory, but ",
                                                   where, " has ", left_bytes,
                                                   " bytes left; enlarge it, or close a job"));
}

constexpr absl::string_view kOutOfMemory = "ballast/out_of_memory";

}  // namespace

NamedArena::~NamedArena() {
  // First the keeper: where this process dies before, the memory is found again, whole.
  if (!memory_.PutBack(*this)) {
    memory_.keeper_.Drop(name_);
    Stored("memory is dropped");
  }
  munmap(data_, size_bytes_);
}

NamedMemory::NamedMemory(FileKeeper& keeper, std::function<int64_t()> available_bytes)
    : keeper_(keeper), available_bytes_(std::move(available_bytes)) {
  MutexLock lock(mutex_);
  left_ = keeper_.TakeKept();
}

absl::Status NamedMemory::NoRoom(int64_t bytes, absl::string_view name, const char* call) const {
  // Read first, since room() makes system calls, which may change it.
  const int error = errno;
  const std::optional<FileKeeper::Room> room = keeper_.room();
  absl::Status status = absl::ResourceExhaustedError(absl::StrCat(
      "cannot allocate ", bytes, " bytes of named memory for ", name, room ? " in " : "",
      room ? room->where : std::string(), ": ", call, ": ", std::strerror(error)));
  if (error == ENOMEM) status.SetPayload(kOutOfMemory, absl::Cord());
  return status;
}

bool IsOutOfMemory(const absl::Status& status) {
  return status.GetPayload(kOutOfMemory).has_value();
}

absl::Status NamedMemory::Admit(int64_t bytes, absl::string_view what) const {
  const std::optional<FileKeeper::Room> room = keeper_.room();
  if (room && room->bytes < bytes) return Wanting(bytes, what, room->bytes, room->where);
  // The size of a tmpfs is what it may have, not what the machine has left, so both are asked. A
  // pool of huge pages has its memory already.
  if (room && room->is_apart) return absl::OkStatus();
  const int64_t available = available_bytes_();
  if (available >= bytes) return absl::OkStatus();
  return Wanting(bytes, what, available, "the machine or the process's control group");
}

absl::StatusOr<std::unique_ptr<NamedArena>> NamedMemory::Map(const std::string& name,
                                                             FileDescriptor file, int64_t bytes) {
  void* const data =
      mmap(PlaceFor(bytes), bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.number(), 0);
  if (data == MAP_FAILED) return NoRoom(bytes, name, "mmap");
  // Before the first touch, because a page's size is chosen then. The answers do not matter:
  // without huge pages the memory is slower, and is there.
  madvise(data, bytes, MADV_HUGEPAGE);
  madvise(data, bytes, MADV_DONTDUMP);  // A core dump of a service would be all of its state.
  return std::unique_ptr<NamedArena>(
      new NamedArena(*this, name, std::move(file), static_cast<std::byte*>(data), bytes));
}

absl::Status NamedMemory::Fill(const NamedArena& arena) const {
  int failed = 0;
  do {
    failed = fallocate(arena.file_descriptor(), 0, 0, arena.size_bytes());
  } while (failed != 0 && errno == EINTR);
  return failed == 0 ? absl::OkStatus() : NoRoom(arena.size_bytes(), arena.name(), "fallocate");
}

absl::Status NamedMemory::Back(const NamedArena& arena) {
  const int64_t bytes = arena.size_bytes();
  // A fault through a mapping gets huge pages where the system gives them, fallocate none. It
  // follows, because it fails with an error where a later fault would with a signal.
  Progress& progress = Progress::OfThisThread();
  const int64_t parts = IsMadeHuge(bytes) ? kHugeParts : 1;
  const bool populated = PopulatePages(arena.data_, bytes, kPopulatePieceBytes, [&](size_t piece) {
                           progress.Count(static_cast<int64_t>(piece) / parts);
                         }) == 0;
  BALLAST_RETURN_IF_ERROR(Fill(arena));
  // It fails on a kernel before 5.14, which does not know the call. After Fill the file has all its
  // pages, and writing maps them; the file is new, so zeros change nothing.
  if (!populated) std::memset(arena.data_, 0, bytes);
  return absl::OkStatus();
}

// Even where the system gives memory files no huge pages it makes some of what is there. The next
// process maps them in no time.
bool NamedMemory::MakeHuge(NamedArena& arena) {
  struct statfs facts = {};
  if (fstatfs(arena.file_descriptor(), &facts) == 0 && facts.f_type == HUGETLBFS_MAGIC) return true;
  const int64_t bytes = arena.size_bytes() / kHugePageBytes * kHugePageBytes;
  const int64_t pieces = DivideUp(bytes, kCollapseBytes);
  std::atomic<bool> huge = pieces > 0;
  Progress& progress = Progress::OfThisThread();
  const auto collapse = [&](int64_t piece) {
    const int64_t begin = piece * kCollapseBytes;
    const int64_t piece_bytes = std::min(kCollapseBytes, bytes - begin);
    progress.Count(piece_bytes / kHugeParts);
    // After one refusal the others are not asked for: a kernel before 6.1 refuses all, and without
    // free memory each call would search in vain.
    if (!huge.load()) return;
    if (madvise(arena.data() + begin, piece_bytes, MADV_COLLAPSE) != 0) huge = false;
  };
  TaskPool* const tasks = tasks_.load();
  if (tasks != nullptr && pieces > 1) {
    tasks->ForEach(pieces, collapse);
  } else {
    for (int64_t piece = 0; piece < pieces; ++piece) collapse(piece);
  }
  return huge;
}

absl::StatusOr<std::unique_ptr<NamedArena>> NamedMemory::MapNew(const std::string& name,
                                                                FileDescriptor file,
                                                                ArenaFactory::Touch touch) {
  const int64_t bytes = SizeOf(file.number());
  absl::StatusOr<std::unique_ptr<NamedArena>> arena = Map(name, std::move(file), bytes);
  if (!arena.ok()) {
    // No arena came of it whose end would drop the name.
    keeper_.Drop(name);
    return arena;
  }
  if (touch == ArenaFactory::Touch::kNow) {
    BALLAST_RETURN_IF_ERROR(Back(**arena));
    if (IsMadeHuge(bytes)) MakeHuge(**arena);
  } else if (keeper_.room()) {
    BALLAST_RETURN_IF_ERROR(Fill(**arena));  // Or a full file system would be a signal later.
  }
  // The keeper gets it last. Until then a death leaves nothing that a later process finds, and
  // where Keep fails, the arena's end drops what was made.
  Stored("memory that is not kept yet");
  BALLAST_RETURN_IF_ERROR(keeper_.Keep(name, (*arena)->file_descriptor()));
  return arena;
}

absl::StatusOr<std::unique_ptr<NamedArena>> NamedMemory::Create(const std::string& name,
                                                                int64_t bytes,
                                                                ArenaFactory::Touch touch) {
  // A job without parameters has arenas, too.
  BALLAST_ASSIGN_OR_RETURN(FileDescriptor file,
                           keeper_.MakeFile(name, std::max<int64_t>(bytes, 1)));
  return MapNew(name, std::move(file), touch);
}

absl::StatusOr<std::unique_ptr<NamedArena>> NamedMemory::CreateShared(const std::string& name,
                                                                      int64_t bytes) {
  // A sealed file is the machine's memory, wherever the keeper's own files lie, so its room is not
  // asked.
  if (const int64_t available = available_bytes_(); available < bytes) {
    return Wanting(bytes, name, available, "the machine or the process's control group");
  }
  BALLAST_ASSIGN_OR_RETURN(FileDescriptor file, MakeSealedFile(name, bytes));
  return MapNew(name, std::move(file), ArenaFactory::Touch::kNow);
}

absl::StatusOr<std::unique_ptr<NamedArena>> NamedMemory::Open(const std::string& name) {
  FileDescriptor file;
  {
    MutexLock lock(mutex_);
    const auto found = left_.find(name);
    if (found == left_.end()) return absl::NotFoundError(absl::StrCat("no memory named ", name));
    file = std::move(found->second);
    left_.erase(found);
  }
  // Without the lock, which is for the table alone: to map large memory takes long.
  const int64_t bytes = SizeOf(file.number());
  return Map(name, std::move(file), bytes);
}

FileDescriptor NamedMemory::TakeFile(const std::string& name) {
  MutexLock lock(mutex_);
  const auto found = left_.find(name);
  if (found == left_.end()) return FileDescriptor();
  FileDescriptor file = std::move(found->second);
  left_.erase(found);
  return file;
}

std::vector<std::string> NamedMemory::Left() const {
  MutexLock lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, file] : left_) names.push_back(name);
  return names;
}

bool NamedMemory::IsLeft(const std::string& name) const {
  MutexLock lock(mutex_);
  return left_.contains(name);
}

int64_t NamedMemory::LeftBytes() const {
  MutexLock lock(mutex_);
  int64_t bytes = 0;
  for (const auto& [name, file] : left_) bytes += SizeOf(file.number());
  return bytes;
}

bool NamedMemory::PutBack(NamedArena& arena) {
  MutexLock lock(mutex_);
  if (puts_back_.empty() || !absl::StartsWith(arena.name_, puts_back_)) return false;
  // The keeper has it under its name still. Only this process's own table changes.
  left_.emplace(arena.name_, std::move(arena.file_));
  return true;
}

void NamedMemory::Forget(const std::string& name) {
  keeper_.Drop(name);
  MutexLock lock(mutex_);
  left_.erase(name);
}

std::string NamedMemory::PagesForPeople() {
  const std::string name = "pages";
  if (TakeFile(name)) keeper_.Drop(name);  // Of a process that died here.
  const auto arena = Create(name, kHugePageBytes, ArenaFactory::Touch::kNow);
  if (!arena.ok()) return "pages of a size that is not known";
  return MakeHuge(**arena) ? "huge pages" : "pages of 4 KiB";
}

std::string NamedArenas::NameOf(absl::string_view label) const {
  absl::string_view what = label;
  absl::ConsumePrefix(&what, owner_);
  return absl::StrCat(prefix_, "/", absl::StripAsciiWhitespace(what));
}

std::vector<std::string> NamedArenas::Left(absl::string_view label_prefix) const {
  std::vector<std::string> labels;
  for (const std::string& left : memory_.Left()) {
    absl::string_view label = left;
    if (!absl::ConsumePrefix(&label, absl::StrCat(prefix_, "/"))) continue;
    if (absl::StartsWith(label, label_prefix)) labels.emplace_back(label);
  }
  return labels;
}

absl::Status NamedArenas::Missing(absl::string_view label) const {
  return absl::DataLossError(absl::StrCat(WhatIs(label), " is missing; put it back"));
}

absl::StatusOr<std::unique_ptr<Arena>> NamedArenas::Open(int64_t bytes, absl::string_view label) {
  absl::StatusOr<std::unique_ptr<NamedArena>> arena = memory_.Open(NameOf(label));
  if (absl::IsNotFound(arena.status())) return Missing(label);
  if (!arena.ok()) return arena.status();
  // It may be larger: keepers make whole pages, which may be huge ones.
  if ((*arena)->size_bytes() < bytes) {
    return absl::DataLossError(
        absl::StrCat(WhatIs(label), " has ", (*arena)->size_bytes(), " bytes, expected ", bytes));
  }
  return *std::move(arena);
}

absl::StatusOr<std::unique_ptr<Arena>> NamedArenas::Create(int64_t bytes, absl::string_view label,
                                                           Touch touch) {
  if (must_be_left_ || Has(label)) return Open(bytes, label);
  return memory_.Create(NameOf(label), bytes, touch);
}

}  // namespace ballast
