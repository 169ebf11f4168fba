#include "cpu_optimizer_service/host/file_system.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"

namespace ballast {
namespace {

// Not an AtomicFile: a checkpoint becomes whole by one exchange of directories, so its files are
// not renamed one by one.
class PosixWritableFile : public WritableFile {
 public:
  PosixWritableFile(int descriptor, std::string path)
      : descriptor_(descriptor), path_(std::move(path)) {}
  ~PosixWritableFile() override {
    if (descriptor_ >= 0) close(descriptor_);
  }

  absl::Status Append(absl::Span<const std::byte> bytes) override {
    return WriteAll(descriptor_, path_,
                    {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }

  absl::Status Close() override {
    const int descriptor = std::exchange(descriptor_, -1);
    const bool synced = fsync(descriptor) == 0;
    const int error = errno;
    if (close(descriptor) != 0 && synced) return FileError(errno, "close", path_);
    return synced ? absl::OkStatus() : FileError(error, "flush", path_);
  }

 private:
  int descriptor_;
  const std::string path_;
};

class PosixReadableFile : public ReadableFile {
 public:
  PosixReadableFile(int descriptor, int64_t size_bytes, std::string path)
      : descriptor_(descriptor), size_bytes_(size_bytes), path_(std::move(path)) {}
  ~PosixReadableFile() override { close(descriptor_); }

  int64_t size_bytes() const override { return size_bytes_; }

  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override {
    while (!out.empty()) {
      const ssize_t got = pread(descriptor_, out.data(), out.size(), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return FileError(errno, "read", path_);
      if (got == 0) {
        return absl::DataLossError(
            absl::StrCat(path_, " ends at byte ", offset, ", more was expected"));
      }
      offset += got;
      out.remove_prefix(static_cast<size_t>(got));
    }
    return absl::OkStatus();
  }

 private:
  const int descriptor_;
  const int64_t size_bytes_;
  const std::string path_;
};

absl::Status SyncDirectory(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return FileError(errno, "open", path);
  // Some file systems do not flush directories, and say so by EINVAL.
  const bool synced = fsync(descriptor) == 0 || errno == EINVAL;
  const int error = errno;
  close(descriptor);
  return synced ? absl::OkStatus() : FileError(error, "flush", path);
}

std::string ParentOf(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

int SystemsRename(const char* from, const char* to, unsigned flags) {
  return renameat2(AT_FDCWD, from, AT_FDCWD, to, flags);
}

absl::Status Rename(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return FileError(errno, "move into place", to);
}

// What Exchange does where renameat2 takes no flags. Killed anywhere in it, what `to` was is whole,
// in its place or aside.
absl::Status ExchangeByRenames(const std::string& from, const std::string& to, bool replaces) {
  // Without flags a directory replaces an empty one only, so nothing is lost here either.
  if (!replaces) return Rename(from, to);
  const std::string aside = AsideOf(to);
  BALLAST_RETURN_IF_ERROR(Rename(to, aside));
  if (absl::Status moved = Rename(from, to); !moved.ok()) {
    Rename(aside, to).IgnoreError();  // If that fails too, what reads `to` looks aside.
    return moved;
  }
  BALLAST_RETURN_IF_ERROR(SyncDirectory(ParentOf(to)));
  return Rename(aside, from);
}

class PosixFileSystemImpl : public FileSystem {
 public:
  explicit PosixFileSystemImpl(RenameWithFlags rename) : rename_(rename) {}

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (descriptor < 0) return FileError(errno, "create", path);
    return std::make_unique<PosixWritableFile>(descriptor, path);
  }

  absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override {
    // Without O_NONBLOCK a FIFO is opened when somebody opens its other end, perhaps never.
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (descriptor < 0) return FileError(errno, "open", path);
    struct stat status;
    if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
      close(descriptor);
      return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
    }
    return std::make_unique<PosixReadableFile>(descriptor, status.st_size, path);
  }

  bool Exists(const std::string& path) override { return access(path.c_str(), F_OK) == 0; }

  absl::Status CreateDirectory(const std::string& path) override {
    std::error_code error;
    std::filesystem::create_directories(path, error);
    return error ? FileError(error.value(), "create directory", path) : absl::OkStatus();
  }

  absl::Status Exchange(const std::string& from, const std::string& to) override {
    // What is moved must be on the disk before its name is, and its name before what it replaces
    // goes.
    if (absl::Status status = SyncDirectory(from); !status.ok()) return status;
    const bool replaces = Exists(to);
    if (rename_(from.c_str(), to.c_str(), replaces ? RENAME_EXCHANGE : RENAME_NOREPLACE) != 0) {
      if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP) {
        return FileError(errno, "move into place", to);
      }
      if (absl::Status status = ExchangeByRenames(from, to, replaces); !status.ok()) return status;
    }
    return SyncDirectory(ParentOf(to));
  }

  absl::Status RemoveAll(const std::string& path) override {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    return error ? FileError(error.value(), "remove", path) : absl::OkStatus();
  }

  absl::StatusOr<std::vector<std::string>> List(const std::string& directory) override {
    std::error_code error;
    std::vector<std::string> names;
    std::filesystem::directory_iterator entry(directory, error);
    for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
      names.push_back(entry->path().filename().string());
    }
    if (error) return FileError(error.value(), "list", directory);
    return names;
  }

  std::shared_ptr<const void> TryLock(const std::string& directory) override {
    auto locked = std::make_shared<FileDescriptor>(
        open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!*locked || flock(locked->number(), LOCK_EX | LOCK_NB) != 0) return nullptr;
    return locked;
  }

 private:
  const RenameWithFlags rename_;
};

}  // namespace

std::string AsideOf(const std::string& path) { return path + ".replaced"; }

FileSystem& PosixFileSystem() {
  static PosixFileSystemImpl& file_system = *new PosixFileSystemImpl(SystemsRename);
  return file_system;
}

std::unique_ptr<FileSystem> MakePosixFileSystem(RenameWithFlags rename) {
  return std::make_unique<PosixFileSystemImpl>(rename);
}

}  // namespace ballast
