#include "cpu_optimizer_service/host/state_directory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/host/huge_pages.h"
#include "cpu_optimizer_service/host/kept_record.h"

namespace ballast {

// It lies so in the file: another order or size of its fields is another kFormat. All formats have
// these first fields, and their checksum.
struct StateDirectory::Superblock {
  char magic[16];
  uint64_t format;
  char boot_id[48];
  uint64_t checksum;  // Covers all before it.
  int64_t process;    // That has the directory, or had it last.
};

struct StateDirectory::Found {
  std::string name;
  FileDescriptor descriptor;
};

namespace {

constexpr uint64_t kFormat = 1;
constexpr char kMagic[16] = "ballast state";
constexpr char kSuperblock[] = "superblock";
constexpr char kUnfinished[] = ".new";
// How often LockOrWait looks: flock(2) has no wait that ends after a time.
constexpr auto kPause = std::chrono::milliseconds(20);
constexpr char kUse[] =
    "; give a directory on a tmpfs, such as /dev/shm/ballast, or in Kubernetes an emptyDir volume "
    "with medium: Memory";

// Empty: not in memory.
std::string FileSystemInMemory(const struct statfs& facts) {
  // f_type is signed, and where it has 32 bits some of these numbers are negative in it.
  switch (static_cast<uint32_t>(facts.f_type)) {
    case TMPFS_MAGIC:
      return "tmpfs";
    case HUGETLBFS_MAGIC:
      return "hugetlbfs";
    case RAMFS_MAGIC:
      return "ramfs";
    default:
      return "";
  }
}

std::string WithoutSlashes(absl::string_view path) {
  while (path.size() > 1 && absl::ConsumeSuffix(&path, "/")) continue;
  return std::string(path);
}

std::string ParentOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string Why() { return std::strerror(errno); }

absl::StatusOr<std::string> CheckInMemory(const std::string& path) {
  struct statfs facts = {};
  if (statfs(path.c_str(), &facts) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", Why(), kUse));
  }
  std::string name = FileSystemInMemory(facts);
  if (!name.empty()) return name;
  return absl::InvalidArgumentError(absl::StrCat(path, " is on a disk (file system 0x",
                                                 absl::Hex(static_cast<uint32_t>(facts.f_type)),
                                                 "), not in memory", kUse));
}

absl::Status CheckDirectory(const std::string& path, const struct stat& facts) {
  if (S_ISLNK(facts.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is a symbolic link; give the directory itself"));
  }
  if (!S_ISDIR(facts.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a directory", kUse));
  }
  if (facts.st_uid != geteuid()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " belongs to user ", facts.st_uid, ", but this process runs as user ",
                     geteuid(), "; name a new directory inside it, or another one"));
  }
  // Others who may write here could put other state in the place of a file. Files have mode 0600;
  // the directory's mode keeps others out a second time.
  if ((facts.st_mode & 0077) != 0) {
    char mode[8];
    std::snprintf(mode, sizeof(mode), "%04o", facts.st_mode & 07777);
    return absl::InvalidArgumentError(
        absl::StrCat("other users can enter ", path, " (mode ", mode,
                     "); run chmod 700, or name a new directory inside it"));
  }
  return absl::OkStatus();
}

// Nothing on systems that do not say: then every boot is the same.
std::string BootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id.substr(0, 36);
}

// The file's name for memory "UID/LABEL", without its size.
std::string WithoutSize(const std::string& name) {
  return absl::StrReplaceAll(name, {{"/", "."}, {" ", "_"}});
}

// The whole name of the file; empty: `name` is none of named memory.
std::string FileOf(const std::string& name, int64_t bytes) {
  // A name has neither '.' nor '_', which stand for '/' and ' ' in the file's name. So NameOf can
  // go the other way.
  const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == ' ' || c == '/' || c == '-';
  });
  if (!plain) return "";
  return absl::StrCat(WithoutSize(name), ".", bytes);
}

// The other way; empty: the file is none of ours.
std::string NameOf(absl::string_view file, int64_t& bytes) {
  const size_t dot = file.rfind('.');
  if (dot == absl::string_view::npos || !absl::SimpleAtoi(file.substr(dot + 1), &bytes)) return "";
  std::string name = absl::StrReplaceAll(file.substr(0, dot), {{".", "/"}, {"_", " "}});
  // Only what FileOf makes is ours: "a.0064" would be the same name and size as "a.64".
  return FileOf(name, bytes) == file && bytes > 0 ? name : "";
}

}  // namespace

// ---------------------------------------------------------------- opening

absl::Status StateDirectory::Check(const std::string& given) {
  const std::string path = WithoutSlashes(given);
  struct stat facts = {};
  if (lstat(path.c_str(), &facts) != 0) {
    if (errno == ENOENT) return CheckInMemory(ParentOf(path)).status();  // It will be made.
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", Why(), kUse));
  }
  BALLAST_RETURN_IF_ERROR(CheckDirectory(path, facts));
  return CheckInMemory(path).status();
}

absl::Status StateDirectory::CheckSame(const FileDescriptor& lock, bool others_hold_jobs,
                                       const std::string& path) {
  const std::string superblock = absl::StrCat(WithoutSlashes(path), "/", kSuperblock);
  const char* const instead =
      "; an upgrade moves no job: leave --state-dir as it was, or stop the service and start it "
      "again";
  if (!lock) {
    if (path.empty() || !others_hold_jobs) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("the service's jobs lie in its parent's memory, and not in ", path, instead));
  }
  // What the process locks is compared, and not the paths: a path may lead elsewhere by now, where
  // something was mounted or a link has changed.
  struct stat held = {};
  struct stat there = {};
  if (!path.empty() && fstat(lock.number(), &held) == 0 && stat(superblock.c_str(), &there) == 0 &&
      held.st_ino == there.st_ino && held.st_dev == there.st_dev) {
    return absl::OkStatus();
  }
  char has[4096] = {};
  const std::string link = absl::StrCat("/proc/self/fd/", lock.number());
  if (readlink(link.c_str(), has, sizeof(has) - 1) < 0) return absl::InternalError(Why());
  return absl::InvalidArgumentError(absl::StrCat("the service's jobs lie in ", ParentOf(has),
                                                 path.empty() ? "" : ", and not in ", path,
                                                 instead));
}

absl::StatusOr<std::unique_ptr<StateDirectory>> StateDirectory::Open(
    StateDirectoryOptions options) {
  options.path = WithoutSlashes(options.path);
  BALLAST_RETURN_IF_ERROR(Check(options.path));
  std::unique_ptr<StateDirectory> opened(new StateDirectory(std::move(options)));
  BALLAST_RETURN_IF_ERROR(opened->OpenDirectory());
  // The lock comes before the files are looked at, because whoever has it may change them.
  BALLAST_RETURN_IF_ERROR(opened->TakeLock());
  BALLAST_ASSIGN_OR_RETURN(const auto files, opened->List());
  // Without files there is nothing to lose, so whatever superblock is there is written anew.
  BALLAST_RETURN_IF_ERROR(opened->CheckOrWriteSuperblock(files.empty()));
  BALLAST_RETURN_IF_ERROR(opened->OpenFiles(files));
  return opened;
}

StateDirectory::~StateDirectory() {
  if (superblock_ != nullptr) munmap(superblock_, page_bytes_);
}

absl::Status StateDirectory::OpenDirectory() {
  const std::string& path = options_.path;
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return absl::InvalidArgumentError(absl::StrCat("cannot make ", path, ": ", Why(), kUse));
  }
  // Checked again on what was opened: between Check and here another process may have put something
  // else in its place. Everything after this goes through the descriptor.
  directory_ = FileDescriptor(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat facts = {};
  struct statfs system = {};
  if (!directory_ || fstat(directory_.number(), &facts) != 0 ||
      fstatfs(directory_.number(), &system) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", Why()));
  }
  BALLAST_RETURN_IF_ERROR(CheckDirectory(path, facts));
  // On hugetlbfs a block is a huge page, and files and mappings have whole ones.
  page_bytes_ = std::max<int64_t>(system.f_bsize, sysconf(_SC_PAGESIZE));
  description_ = absl::StrCat(path, " (", FileSystemInMemory(system), ")");
  return absl::OkStatus();
}

absl::Status StateDirectory::LockOrWait(FileDescriptor& file) {
  const auto until =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(options_.wait_seconds);
  // The process that has it may be about to end: whoever restarts a service may start the next
  // process before that.
  for (bool said = false; flock(file.number(), LOCK_EX | LOCK_NB) != 0;) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      return absl::UnavailableError(absl::StrCat("cannot lock ", options_.path, ": ", Why()));
    }
    // Read without the lock, for the message alone: who has the lock has stored its number, or is
    // about to.
    Superblock has = {};
    const bool known = pread(file.number(), &has, sizeof(has), 0) == sizeof(has);
    const std::string who =
        known ? absl::StrCat("process ", has.process) : std::string("another process");
    if (std::chrono::steady_clock::now() >= until) {
      return absl::UnavailableError(absl::StrCat(
          who, " uses ", options_.path, "; stop it, or give each service its own directory"));
    }
    if (!std::exchange(said, true) && options_.say) {
      options_.say(absl::StrCat(who, " uses ", options_.path, "; waiting ", options_.wait_seconds,
                                " s for its end"));
    }
    std::this_thread::sleep_for(kPause);
  }
  return absl::OkStatus();
}

absl::Status StateDirectory::TakeLock() {
  MutexLock lock(mutex_);
  // The other keeper gives what it has once. What is no lock goes on to whoever calls our TakeKept.
  if (options_.others != nullptr) kept_ = options_.others->TakeKept();
  const std::string path = absl::StrCat(options_.path, "/", kSuperblock);
  FileDescriptor file(
      openat(directory_.number(), kSuperblock, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (!file && errno == ENOENT) {
    BALLAST_ASSIGN_OR_RETURN(const auto files, List());
    // Files without a superblock may be of any boot and format.
    if (!files.empty()) {
      return absl::DataLossError(absl::StrCat(
          path, " is missing, and ", files.begin()->first,
          " cannot be read without it; name an empty directory, and resume from the last "
          "checkpoints"));
    }
    file = FileDescriptor(
        openat(directory_.number(), kSuperblock, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  }
  struct stat facts = {};
  if (!file || fstat(file.number(), &facts) != 0 || !S_ISREG(facts.st_mode) ||
      facts.st_uid != geteuid()) {
    return absl::DataLossError(absl::StrCat(path,
                                            " does not belong to this process's user, or is not a "
                                            "regular file; name another directory"));
  }
  // The parent's child has it already, from the process before.
  if (const auto held = kept_.find(kLockName); held != kept_.end()) {
    struct stat held_facts = {};
    // A lock of flock is the open file's, which the parent has as well. Another descriptor of this
    // file would wait for that lock in vain, so the one that was kept is used, if it is of this
    // directory.
    const bool same = fstat(held->second.number(), &held_facts) == 0 &&
                      held_facts.st_ino == facts.st_ino && held_facts.st_dev == facts.st_dev;
    if (same) lock_ = std::move(held->second);
    kept_.erase(held);
  }
  if (lock_) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(LockOrWait(file));
  lock_ = std::move(file);
  if (options_.others == nullptr) return absl::OkStatus();
  // The parent has the lock from here on, so after this process's death no other service can take
  // the directory before the parent's next child has it.
  return options_.others->Keep(kLockName, lock_.number());
}

absl::Status StateDirectory::CheckOrWriteSuperblock(bool is_new) {
  const std::string path = absl::StrCat(options_.path, "/", kSuperblock);
  struct stat facts = {};
  if (fstat(lock_.number(), &facts) != 0)
    return absl::DataLossError(absl::StrCat(path, ": ", Why()));
  const bool is_cut = facts.st_size < page_bytes_;
  // fallocate, so that a full file system is an error here and not a signal at the first store.
  if (is_cut && is_new &&
      (ftruncate(lock_.number(), page_bytes_) != 0 ||
       fallocate(lock_.number(), 0, 0, page_bytes_) != 0)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot allocate ", page_bytes_, " bytes for ", path, ": ", Why()));
  }
  const std::string instead = "; name an empty directory, and resume from the last checkpoints";
  if (is_cut && !is_new) {
    return absl::DataLossError(
        absl::StrCat(path, " has ", facts.st_size, " bytes, expected ", page_bytes_, instead));
  }
  void* const data =
      mmap(nullptr, page_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, lock_.number(), 0);
  if (data == MAP_FAILED) return absl::ResourceExhaustedError(absl::StrCat(path, ": ", Why()));
  superblock_ = static_cast<Superblock*>(data);
  const auto checksum = [this] {
    return ChecksumOf({reinterpret_cast<const char*>(superblock_), offsetof(Superblock, checksum)});
  };
  const std::string boot = BootId();
  if (is_new) {
    // A process that dies in here leaves a wrong checksum and no files, and the next one writes it
    // anew.
    *superblock_ = {};
    std::memcpy(superblock_->magic, kMagic, sizeof(kMagic));
    superblock_->format = kFormat;
    boot.copy(superblock_->boot_id, sizeof(superblock_->boot_id) - 1);
    superblock_->checksum = checksum();
  }
  const bool is_ours = std::memcmp(superblock_->magic, kMagic, sizeof(kMagic)) == 0;
  if (!is_ours || superblock_->checksum != checksum()) {
    return absl::DataLossError(absl::StrCat(path, " does not match its checksum", instead));
  }
  if (superblock_->format != kFormat) {
    return absl::FailedPreconditionError(absl::StrCat(
        options_.path, " has format ", superblock_->format, ", but this service reads ", kFormat,
        "; start the version that wrote it, save, and load the checkpoints here"));
  }
  // Files in memory do not outlive a boot.
  if (boot != superblock_->boot_id) {
    return absl::FailedPreconditionError(
        absl::StrCat(options_.path, " is from another boot (", superblock_->boot_id, ", now ", boot,
                     "), so it is a copy of unknown age", instead));
  }
  // Not under the checksum, which could not be stored at the same instant.
  superblock_->process = getpid();
  return absl::OkStatus();
}

absl::StatusOr<std::map<std::string, int64_t>> StateDirectory::List() const {
  std::map<std::string, int64_t> files;
  std::error_code error;
  // The directory that is open, whatever has its path by now.
  const std::string directory = absl::StrCat("/proc/self/fd/", directory_.number());
  for (std::filesystem::directory_iterator at(directory, error), end; !error && at != end;
       at.increment(error)) {
    const std::string file = at->path().filename().string();
    if (file == kSuperblock) continue;
    int64_t bytes = 0;
    if (NameOf(absl::StripSuffix(file, kUnfinished), bytes).empty()) {
      return absl::DataLossError(
          absl::StrCat(options_.path, "/", file,
                       " is not a file of named memory; name a directory that "
                       "only the service uses"));
    }
    files.emplace(file, bytes);
  }
  if (error) {
    return absl::DataLossError(absl::StrCat("cannot list ", options_.path, ": ", error.message()));
  }
  return files;
}

std::string StateDirectory::LastCheckpoint(const std::string& uid) const {
  return options_.last_checkpoint ? options_.last_checkpoint(uid) : std::string();
}

absl::StatusOr<StateDirectory::Found> StateDirectory::OpenFile(const std::string& file,
                                                               int64_t bytes) const {
  // What is refused here stays as it is: an operator can put the right file back. The message says
  // how to go on without the job.
  const std::string uid = file.substr(0, file.find('.'));
  const auto refuse = [&](const auto&... what) {
    return absl::DataLossError(absl::StrCat(options_.path, "/", file, what..., LastCheckpoint(uid),
                                            "; to start without its job, remove ", options_.path,
                                            "/", uid, ".*"));
  };
  Found found;
  found.descriptor = FileDescriptor(
      openat(directory_.number(), file.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (!found.descriptor) {
    return errno == ELOOP ? refuse(" is a symbolic link") : refuse(": ", Why());
  }
  struct stat facts = {};
  if (fstat(found.descriptor.number(), &facts) != 0) return refuse(": ", Why());
  if (!S_ISREG(facts.st_mode)) return refuse(" is no file of memory");
  if (facts.st_uid != geteuid()) return refuse(" belongs to user ", facts.st_uid);
  // Its name says how large it was made, so one that was cut short is seen.
  if (facts.st_size != bytes) return refuse(" has ", facts.st_size, " bytes, expected ", bytes);
  found.name = NameOf(file, bytes);
  return found;
}

absl::Status StateDirectory::OpenFiles(const std::map<std::string, int64_t>& files) {
  MutexLock lock(mutex_);
  std::set<std::string> unfinished;
  for (const auto& [file, bytes] : files) {
    if (absl::EndsWith(file, kUnfinished)) {
      unfinished.insert(file);
      continue;
    }
    BALLAST_ASSIGN_OR_RETURN(Found found, OpenFile(file, bytes));
    if (!files_.emplace(found.name, file).second) {
      return absl::DataLossError(absl::StrCat(options_.path, " has ", found.name, " twice: ", file,
                                              " and ", files_[found.name], "; remove both"));
    }
    kept_.emplace(found.name, std::move(found.descriptor));
  }
  // Only after all others were found to be as they were left: a refused start changes nothing.
  for (const std::string& file : unfinished) unlinkat(directory_.number(), file.c_str(), 0);
  return absl::OkStatus();
}

// ---------------------------------------------------------------- a keeper's

absl::StatusOr<FileDescriptor> StateDirectory::MakeFile(const std::string& name, int64_t bytes) {
  const int64_t size = RoundUp(bytes, page_bytes_);
  const std::string file = FileOf(name, size);
  if (file.empty() || name.size() > kMaxKeptName) {
    return absl::InvalidArgumentError(absl::StrCat("named memory cannot be called ", name));
  }
  const std::string unfinished = absl::StrCat(file, kUnfinished);
  // Under a name that says it is not kept yet: a process that dies before Keep leaves what the next
  // one removes.
  FileDescriptor made(openat(directory_.number(), unfinished.c_str(),
                             O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!made || ftruncate(made.number(), size) != 0) {
    const std::string why = Why();
    if (made) unlinkat(directory_.number(), unfinished.c_str(), 0);
    return absl::ResourceExhaustedError(absl::StrCat(
        "cannot allocate ", size, " bytes of named memory in ", options_.path, ": ", why));
  }
  MutexLock lock(mutex_);
  making_[name] = file;
  return made;
}

absl::Status StateDirectory::Keep(const std::string& name, int descriptor) {
  MutexLock lock(mutex_);
  const auto made = making_.find(name);
  if (made == making_.end()) {
    // It was not made here: a sealed file or a socket, which a parent can keep and a directory
    // cannot. Without a parent it ends with this process (keeps_sealed_files).
    return options_.others == nullptr ? absl::OkStatus() : options_.others->Keep(name, descriptor);
  }
  const std::string file = made->second;
  // One of that name whose drop has only been remembered.
  if (const auto older = files_.find(name); older != files_.end()) {
    // Before the rename, because the next start refuses two files of one name. A death in between
    // loses only what was to be dropped.
    unlinkat(directory_.number(), older->second.c_str(), 0);
    dropped_.erase(older->second);
  }
  // From the rename on a later process finds it.
  if (renameat(directory_.number(), absl::StrCat(file, kUnfinished).c_str(), directory_.number(),
               file.c_str()) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat(options_.path, "/", file, ": ", Why()));
  }
  files_[name] = file;
  making_.erase(made);
  return absl::OkStatus();
}

void StateDirectory::Drop(const std::string& name) {
  MutexLock lock(mutex_);
  if (const auto made = making_.find(name); made != making_.end()) {
    unlinkat(directory_.number(), absl::StrCat(made->second, kUnfinished).c_str(), 0);
    making_.erase(made);
    return;
  }
  const auto found = files_.find(name);
  if (found == files_.end()) {
    // It is the other keeper's, or nobody's.
    if (options_.others != nullptr) options_.others->Drop(name);
    return;
  }
  if (!settled_) {
    dropped_.insert(found->second);
    return;
  }
  unlinkat(directory_.number(), found->second.c_str(), 0);
  files_.erase(found);
}

std::map<std::string, FileDescriptor> StateDirectory::TakeKept() {
  MutexLock lock(mutex_);
  return std::exchange(kept_, {});
}

std::optional<FileKeeper::Room> StateDirectory::room() const {
  struct statfs facts = {};
  Room room = {.bytes = std::numeric_limits<int64_t>::max(), .where = description_};
  if (fstatfs(directory_.number(), &facts) != 0) return room;
  // One without a size of its own says 0.
  if (facts.f_blocks > 0) room.bytes = static_cast<int64_t>(facts.f_bavail) * facts.f_bsize;
  if (static_cast<uint32_t>(facts.f_type) == HUGETLBFS_MAGIC) {
    room.is_apart = true;
    room.bytes = std::min(room.bytes, HugePagePoolBytes(facts.f_bsize).value_or(room.bytes));
  }
  return room;
}

std::string StateDirectory::WhatIs(const std::string& name) const {
  MutexLock lock(mutex_);
  const auto found = files_.find(name);
  return absl::StrCat("the file ", options_.path, "/",
                      found != files_.end() ? found->second : WithoutSize(name) + "*");
}

void StateDirectory::Settle() {
  MutexLock lock(mutex_);
  settled_ = true;
  std::erase_if(files_, [this](const auto& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return dropped_.contains(entry.second);
  });
  for (const std::string& file : dropped_) unlinkat(directory_.number(), file.c_str(), 0);
  dropped_.clear();
}

}  // namespace ballast
