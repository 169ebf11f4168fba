#include "cpu_optimizer_service/host/file_system.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"

namespace ballast {
namespace {

// What has been written is on its way to the device while more comes, so that Close waits for
// little, and few pages that are to be written stand in the way of others who need memory.
constexpr int64_t kWriteBackBytes = int64_t{16} << 20;

// The page cache costs as much of a processor as a checksum does, and a checkpoint has no use for
// it. Only where direct writes are known to be fast: NFS flushes the server's disk after each.
bool KnowsDirectWrites(int descriptor) {
  struct statfs is;
  return fstatfs(descriptor, &is) == 0 &&
         (is.f_type == EXT4_SUPER_MAGIC || is.f_type == XFS_SUPER_MAGIC);
}

// Not an AtomicFile: a checkpoint becomes whole by one move of its directory, so its files are not
// renamed one by one.
class PosixWritableFile : public WritableFile {
 public:
  PosixWritableFile(int descriptor, std::string path)
      : descriptor_(descriptor), path_(std::move(path)), direct_(KnowsDirectWrites(descriptor)) {}
  ~PosixWritableFile() override {
    if (descriptor_ >= 0) close(descriptor_);
  }

  absl::Status Append(absl::Span<const std::byte> bytes) override {
    if (direct_ && block_ == nullptr) block_ = std::make_unique_for_overwrite<Block>();
    // A direct write takes whole, aligned blocks only (open(2), O_DIRECT), and callers append any
    // sizes. WriteBlock may end direct writing; the block is empty then, so the rest follows in
    // order.
    while (direct_ && !bytes.empty()) {
      const size_t more = std::min(bytes.size(), sizeof(Block) - block_bytes_);
      std::memcpy(block_->bytes + block_bytes_, bytes.data(), more);
      block_bytes_ += more;
      bytes.remove_prefix(more);
      if (block_bytes_ == sizeof(Block)) BALLAST_RETURN_IF_ERROR(WriteBlock());
    }
    return Write(bytes);
  }

  absl::Status Close() override {
    // The descriptor is closed whatever fails before. fsync is needed after direct writes, too:
    // bytes may still be in the device's cache, and the file's size in the system's memory alone.
    const absl::Status written = block_bytes_ > 0 ? WriteBlock() : absl::OkStatus();
    const int descriptor = std::exchange(descriptor_, -1);
    const bool synced = fsync(descriptor) == 0;
    const int error = errno;
    const bool closed = close(descriptor) == 0;
    // The first failure is told, because those after it may only follow from it.
    BALLAST_RETURN_IF_ERROR(written);
    if (!closed && synced) return FileError(errno, "close", path_);
    return synced ? absl::OkStatus() : FileError(error, "flush", path_);
  }

 private:
  // As large as keeps a device busy, and aligned as devices want it.
  struct alignas(4096) Block {
    std::byte bytes[size_t{1} << 20];
  };

  // What the system does not take so, as the end of a file that is no whole block, goes the other
  // way, where an error is told.
  absl::Status WriteBlock() {
    auto bytes = absl::MakeConstSpan(block_->bytes, std::exchange(block_bytes_, 0));
    if (bytes.size() == sizeof(Block) && fcntl(descriptor_, F_SETFL, O_DIRECT) == 0) {
      const ssize_t written = write(descriptor_, bytes.data(), bytes.size());
      if (written > 0) {
        bytes.remove_prefix(static_cast<size_t>(written));
        written_bytes_ += written;
        sent_bytes_ = written_bytes_;
      }
      if (bytes.empty()) return absl::OkStatus();
      direct_ = false;
    }
    fcntl(descriptor_, F_SETFL, 0);
    return Write(bytes);
  }
  absl::Status Write(absl::Span<const std::byte> bytes) {
    BALLAST_RETURN_IF_ERROR(
        WriteAll(descriptor_, path_, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}));
    written_bytes_ += static_cast<int64_t>(bytes.size());
    if (written_bytes_ - sent_bytes_ >= kWriteBackBytes) {
      // No promise, and no error where a file system knows no such thing.
      sync_file_range(descriptor_, sent_bytes_, written_bytes_ - sent_bytes_,
                      SYNC_FILE_RANGE_WRITE);
      sent_bytes_ = written_bytes_;
    }
    return absl::OkStatus();
  }

  int descriptor_;
  const std::string path_;
  bool direct_;
  std::unique_ptr<Block> block_;
  size_t block_bytes_ = 0;  // Of it that are filled.
  int64_t written_bytes_ = 0;
  int64_t sent_bytes_ = 0;
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

class PosixFileSystemImpl : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (descriptor < 0) return FileError(errno, "create", path);
    return std::make_unique<PosixWritableFile>(descriptor, path);
  }

  absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override {
    // Without O_NONBLOCK a FIFO is opened when somebody opens its other end, perhaps never.
    const int descriptor =
        open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW);
    if (descriptor < 0 && errno == ELOOP) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, " is a symbolic link, not a regular file; put the file itself there"));
    }
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
    std::vector<std::string> missing;
    // A directory's name lies in its parent, which must be flushed when the name is new. Which
    // names are new is known only before they are made. The loop ends at "/" or ".", which exist.
    for (std::string at = path; !std::filesystem::exists(at, error); at = ParentOf(at)) {
      missing.push_back(at);
    }
    std::filesystem::create_directories(path, error);
    if (error) return FileError(error.value(), "create directory", path);
    for (const std::string& made : missing) BALLAST_RETURN_IF_ERROR(SyncDirectory(ParentOf(made)));
    return absl::OkStatus();
  }

  bool IsSymbolicLink(const std::string& path) override {
    std::error_code error;
    return std::filesystem::is_symlink(path, error);
  }

  bool IsMountPoint(const std::string& path) override {
    struct statx is;
    // The attribute is there since Linux 5.8; an older kernel never sets it.
    return statx(AT_FDCWD, path.c_str(), 0, 0, &is) == 0 &&
           (is.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    std::error_code error;
    // What is moved must be on the disk before its name is.
    if (std::filesystem::is_directory(from, error)) BALLAST_RETURN_IF_ERROR(SyncDirectory(from));
    if (rename(from.c_str(), to.c_str()) != 0) {
      const int reason = errno;
      // rename(2): EEXIST or ENOTEMPTY, by file system, where `to` is a directory that has
      // something; ENOTDIR where `to` is a file and `from` is a directory.
      const bool taken = reason == EEXIST || reason == ENOTEMPTY || reason == ENOTDIR;
      const absl::Status status = FileError(reason, "move into place", to);
      return taken ? absl::AlreadyExistsError(status.message()) : status;
    }
    // The new name lies in the parent. Without the flush it may be gone after a power failure.
    return SyncDirectory(ParentOf(to));
  }

  absl::Status RemoveAll(const std::string& path) override {
    // It follows no link out of the tree. Another process may remove the same tree.
    std::error_code error;
    std::filesystem::remove_all(path, error);
    return error && error.value() != ENOENT ? FileError(error.value(), "remove", path)
                                            : absl::OkStatus();
  }

  absl::StatusOr<std::vector<std::string>> List(const std::string& directory) override {
    std::vector<std::string> names;
    std::error_code error;
    for (std::filesystem::directory_iterator at(directory, error), end; !error && at != end;
         at.increment(error)) {
      names.push_back(at->path().filename().string());
    }
    if (error) return FileError(error.value(), "list", directory);
    return names;
  }

  std::shared_ptr<const void> TryLock(const std::string& directory) override {
    // A file, because NFS locks none that is not open for writing, as no directory is.
    auto locked = std::make_shared<FileDescriptor>(open(
        LockPath(directory).c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    // The lock is the open file's, so it ends with the process, however that dies. A file whose
    // mere presence is the lock would stay behind.
    if (!*locked || flock(locked->number(), LOCK_EX | LOCK_NB) != 0) return nullptr;
    return locked;
  }
};

}  // namespace

std::string LockPath(const std::string& directory) { return absl::StrCat(directory, "/lock"); }

FileSystem& PosixFileSystem() {
  static PosixFileSystemImpl& file_system = *new PosixFileSystemImpl();
  return file_system;
}

}  // namespace ballast
