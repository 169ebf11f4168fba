#include "server/shared_memory/shared_memory.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/populate_pages.h"

namespace ballast::server {
namespace {

absl::Status NoRoom(int64_t bytes, const char* call) {
  return absl::ResourceExhaustedError(
      absl::StrCat("no ", bytes, " bytes of shared memory: ", call, ": ", std::strerror(errno)));
}

constexpr char kHugePageSetting[] = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

bool HugePagesAreGiven() {
  std::ifstream file(kHugePageSetting);
  std::string setting;
  std::getline(file, setting);
  return !setting.empty() && !absl::StrContains(setting, "[never]") &&
         !absl::StrContains(setting, "[deny]");
}

// Backs every page. Populating is done first, because only a fault through a mapping gets huge
// pages. Allocating then makes sure that no page is missing: it fails with an error, a later fault
// with a signal.
absl::Status Back(int file_descriptor, std::byte* memory, int64_t bytes) {
  // The advice succeeds also where the system gives shared memory no huge pages.
  if (madvise(memory, bytes, MADV_HUGEPAGE) != 0 || !HugePagesAreGiven()) {
    spdlog::debug("{} bytes of shared memory without huge pages; see {}", bytes, kHugePageSetting);
  }
  const bool populated = PopulatePages(memory, bytes) == 0;
  int failed = 0;
  do {
    failed = fallocate(file_descriptor, 0, 0, bytes);
  } while (failed != 0 && errno == EINTR);
  if (failed != 0) return NoRoom(bytes, "fallocate");
  // An allocated page is cleared and mapped when it is first touched: now, and not in a step.
  if (!populated) std::memset(memory, 0, bytes);
  return absl::OkStatus();
}

template <typename Byte>
absl::Span<Byte> At(Byte* memory, const RankMemoryLayout::Place& place) {
  if (place.offset_bytes < 0) return {};
  return absl::MakeSpan(memory + place.offset_bytes, static_cast<size_t>(place.bytes));
}

}  // namespace

absl::StatusOr<std::shared_ptr<SharedMemory>> SharedMemory::Create(
    RankMemoryLayout places, MemoryBudget::Reservation reservation) {
  const int64_t bytes = places.size_bytes();
  if (bytes == 0) return absl::InvalidArgumentError("a rank without chunks shares no memory");
  // Without MFD_ALLOW_SEALING a memory file takes no seals (memfd_create(2)).
  const int file_descriptor = memfd_create("ballast-rank-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file_descriptor < 0) return NoRoom(bytes, "memfd_create");
  if (ftruncate(file_descriptor, bytes) != 0) {
    const absl::Status status = NoRoom(bytes, "ftruncate");
    close(file_descriptor);
    return status;
  }
  void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_descriptor, 0);
  if (mapping == MAP_FAILED) {
    const absl::Status status = NoRoom(bytes, "mmap");
    close(file_descriptor);
    return status;
  }
  // From here on it owns the file and the mapping.
  const std::shared_ptr<SharedMemory> memory(
      new SharedMemory(std::move(places), std::move(reservation), file_descriptor,
                       static_cast<std::byte*>(mapping)));
  if (absl::Status backed = Back(file_descriptor, memory->memory_, bytes); !backed.ok()) {
    return backed;
  }
  // A peer that could make the file shorter would end this process with SIGBUS at its next access
  // (mmap(2)). F_SEAL_SEAL keeps the peer from adding others, such as one against writing.
  if (fcntl(file_descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return absl::InternalError(absl::StrCat("cannot seal shared memory: ", std::strerror(errno)));
  }
  return memory;
}

absl::StatusOr<std::shared_ptr<SharedMemory>> SharedMemory::CreateNamed(
    RankMemoryLayout places, MemoryBudget::Reservation reservation, NamedMemory& memory,
    const std::string& name) {
  const int64_t bytes = places.size_bytes();
  if (bytes == 0) return absl::InvalidArgumentError("a rank without chunks shares no memory");
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<NamedArena> arena, memory.CreateShared(name, bytes));
  const int file = arena->file_descriptor();
  std::byte* const data = arena->data();
  // Pages and seals are there already (NamedMemory::CreateShared).
  return std::shared_ptr<SharedMemory>(
      new SharedMemory(std::move(places), std::move(reservation), file, data, std::move(arena)));
}

SharedMemory::SharedMemory(RankMemoryLayout places, MemoryBudget::Reservation reservation,
                           int file_descriptor, std::byte* memory,
                           std::unique_ptr<NamedArena> arena)
    : places_(std::move(places)),
      reservation_(std::move(reservation)),
      arena_(std::move(arena)),
      file_descriptor_(file_descriptor),
      memory_(memory) {}

SharedMemory::~SharedMemory() {
  // An arena unmaps its memory and closes its file by itself.
  if (arena_ == nullptr) munmap(memory_, places_.size_bytes());
  if (peer_is_done_) {
    fallocate(file_descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
              places_.size_bytes());
  }
  if (arena_ == nullptr) close(file_descriptor_);
}

absl::Span<const std::byte> SharedMemory::gradient(int chunk) const {
  return At<const std::byte>(memory_, places_.gradient(chunk));
}

absl::Span<std::byte> SharedMemory::weights(int chunk) const {
  return At(memory_, places_.weights(chunk));
}

}  // namespace ballast::server
