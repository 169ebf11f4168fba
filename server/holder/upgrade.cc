#include "server/holder/upgrade.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "server/holder/holder_table.h"

namespace ballast::server {
namespace {

constexpr std::chrono::milliseconds kPollEvery(10);

using MappedTable = std::unique_ptr<const HolderTable, void (*)(const HolderTable*)>;

// Of which link in /proc the table is behind.
absl::StatusOr<std::string> FindTable(pid_t holder) {
  const std::string process = absl::StrCat("process ", holder);
  // For another user's process it says EPERM; then the folder below cannot be read, either.
  if (kill(holder, 0) != 0 && errno == ESRCH) {
    return absl::NotFoundError(absl::StrCat("there is no ", process));
  }
  // What memfd_create(2) shows there. The kernel adds " (deleted)", so the blank ends the name.
  const std::string wanted = absl::StrCat("/memfd:", kHolderFile, " ");
  const std::string folder = absl::StrCat("/proc/", holder, "/fd");
  std::string table;
  std::error_code error;
  for (std::filesystem::directory_iterator file(folder, error), end; !error && file != end;
       file.increment(error)) {
    std::error_code gone;  // Closed meanwhile.
    const std::string target = std::filesystem::read_symlink(*file, gone).string();
    if (absl::StartsWith(target, wanted)) table = file->path().string();
  }
  if (error) {
    return absl::PermissionDeniedError(
        absl::StrCat("cannot look at ", process, ": ", error.message(), "; be its user, or root"));
  }
  if (!table.empty()) return table;
  return absl::FailedPreconditionError(absl::StrCat(
      process,
      " is no ballastd that holds a service's memory: name the parent, the first of the two, and "
      "not one with --holder=none, which loses its jobs when it ends; or its program is too old to "
      "upgrade"));
}

absl::StatusOr<MappedTable> OpenTable(pid_t holder) {
  BALLAST_ASSIGN_OR_RETURN(const std::string path, FindTable(holder));
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  // Of another version only this has a known place.
  uint32_t protocol = 0;
  if (!file || pread(file.number(), &protocol, sizeof(protocol), 0) != sizeof(protocol)) {
    return absl::PermissionDeniedError(absl::StrCat("cannot read what process ", holder,
                                                    " says of itself: ", std::strerror(errno)));
  }
  struct stat facts = {};
  // A look beyond the end of a file that is mapped would end this process by SIGBUS.
  const bool is_whole =
      fstat(file.number(), &facts) == 0 && facts.st_size >= static_cast<off_t>(sizeof(HolderTable));
  if (protocol != kHolderProtocol || !is_whole) {
    return absl::FailedPreconditionError(
        absl::StrCat("process ", holder, " is a ballastd of another version (it speaks ", protocol,
                     ", here ", kHolderProtocol,
                     ") and cannot hold what this one keeps: stop it, which saves its jobs, and "
                     "start this one"));
  }
  void* const mapped = mmap(nullptr, sizeof(HolderTable), PROT_READ, MAP_SHARED, file.number(), 0);
  if (mapped == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot map what process ", holder,
                                                     " says of itself (", std::strerror(errno),
                                                     "); free memory and try again"));
  }
  return MappedTable(static_cast<const HolderTable*>(mapped), [](const HolderTable* table) {
    munmap(const_cast<HolderTable*>(table), sizeof(HolderTable));
  });
}

// Changed by another process.
uint32_t Load(const uint32_t& word) {
  return std::atomic_ref<uint32_t>(const_cast<uint32_t&>(word)).load(std::memory_order_acquire);
}

}  // namespace

absl::StatusOr<uint32_t> StateFormatOf(pid_t holder) {
  BALLAST_ASSIGN_OR_RETURN(const MappedTable table, OpenTable(holder));
  const uint32_t format = Load(table->state_format);
  if (format != 0) return format;
  return absl::UnavailableError(
      absl::StrCat("the service of process ", holder, " has not served yet; try again"));
}

absl::StatusOr<std::string> Upgrade(pid_t holder, double seconds) {
  BALLAST_ASSIGN_OR_RETURN(const MappedTable table, OpenTable(holder));
  // Before the signal: if it is even, the next upgrade opens its program after this, whoever asked
  // for it.
  const uint32_t before = Load(table->upgrades);
  // With one under way, which may have opened an earlier program, the next one is meant.
  const uint32_t after = before + (before % 2 == 0 ? 2 : 3);
  const int child_before = table->child;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  // With a number, because a plain SIGHUP may mean a terminal that has closed.
  if (sigqueue(holder, SIGHUP, {.sival_int = kUpgradeAsked}) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("cannot signal process ", holder, ": ", std::strerror(errno)));
  }
  // A difference is right also where the count has begun again at 0.
  while (static_cast<int32_t>(Load(table->upgrades) - after) < 0) {
    if (kill(holder, 0) != 0 && errno == ESRCH) {
      return absl::AbortedError(absl::StrCat("process ", holder, " has ended; see its log"));
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("process ", holder,
                                                      " has not upgraded within ", seconds,
                                                      " s, and may still do so; see its log"));
    }
    std::this_thread::sleep_for(kPollEvery);
  }
  // This and what follows was stored before the count rose, which Load has acquired.
  if (table->has_upgraded == 0) {
    return absl::AbortedError(
        absl::StrCat("not upgraded, and the service goes on as it was: ", table->why_not));
  }
  return absl::StrCat("upgraded: process ", table->child, " serves in the place of ", child_before,
                      ", with all that it had");
}

}  // namespace ballast::server
