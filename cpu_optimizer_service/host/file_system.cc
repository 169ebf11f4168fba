#include "cpu_optimizer_service/host/file_system.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

absl::Status ErrnoStatus(int error, absl::string_view doing, const std::string& path) {
  const std::string message = absl::StrCat("cannot ", doing, " ", path, ": ", std::strerror(error));
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return absl::ResourceExhaustedError(absl::StrCat(message, "; make room and try again"));
    case ENOENT:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(message);
    default:
      return absl::UnknownError(message);
  }
}

class PosixWritableFile : public WritableFile {
 public:
  PosixWritableFile(int descriptor, std::string path)
      : descriptor_(descriptor), path_(std::move(path)) {}
  ~PosixWritableFile() override {
    if (descriptor_ >= 0) close(descriptor_);
  }

  absl::Status Append(absl::Span<const std::byte> bytes) override {
    while (!bytes.empty()) {
      const ssize_t written = write(descriptor_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return ErrnoStatus(errno, "write", path_);
      bytes.remove_prefix(static_cast<size_t>(written));
    }
    return absl::OkStatus();
  }

  absl::Status Close() override {
    const int descriptor = std::exchange(descriptor_, -1);
    const bool synced = fsync(descriptor) == 0;
    const int error = errno;
    if (close(descriptor) != 0 && synced) return ErrnoStatus(errno, "close", path_);
    return synced ? absl::OkStatus() : ErrnoStatus(error, "flush", path_);
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
      if (got < 0) return ErrnoStatus(errno, "read", path_);
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
  if (descriptor < 0) return ErrnoStatus(errno, "open", path);
  const bool synced = fsync(descriptor) == 0;
  const int error = errno;
  close(descriptor);
  return synced ? absl::OkStatus() : ErrnoStatus(error, "flush", path);
}

class PosixFileSystemImpl : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (descriptor < 0) return ErrnoStatus(errno, "create", path);
    return std::make_unique<PosixWritableFile>(descriptor, path);
  }

  absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override {
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return ErrnoStatus(errno, "open", path);
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
    return error ? ErrnoStatus(error.value(), "create directory", path) : absl::OkStatus();
  }

  absl::Status Exchange(const std::string& from, const std::string& to) override {
    // What is moved must be on the disk before its name is, and its name before what it replaces
    // goes.
    if (absl::Status status = SyncDirectory(from); !status.ok()) return status;
    const unsigned flags = Exists(to) ? RENAME_EXCHANGE : RENAME_NOREPLACE;
    if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) != 0) {
      return ErrnoStatus(errno, "move into place", to);
    }
    const std::string parent = std::filesystem::path(to).parent_path().string();
    return SyncDirectory(parent.empty() ? "." : parent);
  }

  absl::Status RemoveAll(const std::string& path) override {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    return error ? ErrnoStatus(error.value(), "remove", path) : absl::OkStatus();
  }
};

}  // namespace

FileSystem& PosixFileSystem() {
  static PosixFileSystemImpl& file_system = *new PosixFileSystemImpl;
  return file_system;
}

}  // namespace ballast
