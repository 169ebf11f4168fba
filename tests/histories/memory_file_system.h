// Checkpoints in memory.
#ifndef BALLAST_TESTS_HISTORIES_MEMORY_FILE_SYSTEM_H_
#define BALLAST_TESTS_HISTORIES_MEMORY_FILE_SYSTEM_H_

#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/host/file_system.h"

namespace ballast::histories {

// Thread-safe.
class MemoryFileSystem final : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    MutexLock lock(mutex_);
    return std::make_unique<Writer>(files_[path] = std::make_shared<Bytes>());
  }
  absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override {
    MutexLock lock(mutex_);
    const auto found = files_.find(path);
    if (found == files_.end()) return absl::NotFoundError(path);
    return std::make_unique<Reader>(found->second);
  }
  bool Exists(const std::string& path) override {
    MutexLock lock(mutex_);
    return path == "/" || directories_.count(path) > 0 || !Inside(path).empty();
  }
  absl::Status CreateDirectory(const std::string& path) override {
    MutexLock lock(mutex_);
    for (size_t end = 0; end != std::string::npos;) {
      end = path.find('/', end + 1);
      directories_.insert(path.substr(0, end));
    }
    return absl::OkStatus();
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    MutexLock lock(mutex_);
    if (files_.count(from) == 0 && !Inside(to).empty()) return absl::AlreadyExistsError(to);
    std::map<std::string, std::shared_ptr<Bytes>> moved;
    for (const std::string& path : Inside(from)) {
      moved[to + path.substr(from.size())] = files_[path];
      files_.erase(path);
    }
    for (auto& [path, bytes] : moved) files_[path] = std::move(bytes);
    if (directories_.erase(from) > 0) directories_.insert(to);
    return absl::OkStatus();
  }
  absl::Status RemoveAll(const std::string& path) override {
    MutexLock lock(mutex_);
    for (const std::string& file : Inside(path)) files_.erase(file);
    std::erase_if(directories_, [&](const std::string& directory) {
      return directory == path || absl::StartsWith(directory, absl::StrCat(path, "/"));
    });
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<std::string>> List(const std::string& directory) override {
    MutexLock lock(mutex_);
    std::set<std::string> names;
    const size_t prefix = directory.size() + 1;
    for (const std::string& path : Inside(directory)) {
      if (path.size() > prefix) names.insert(path.substr(prefix, path.find('/', prefix) - prefix));
    }
    return std::vector<std::string>(names.begin(), names.end());
  }
  std::shared_ptr<const void> TryLock(const std::string& directory) override { return nullptr; }

 private:
  using Bytes = std::vector<std::byte>;

  class Writer final : public WritableFile {
   public:
    explicit Writer(std::shared_ptr<Bytes> bytes) : bytes_(std::move(bytes)) {}
    absl::Status Append(absl::Span<const std::byte> bytes) override {
      bytes_->insert(bytes_->end(), bytes.begin(), bytes.end());
      return absl::OkStatus();
    }
    absl::Status Close() override { return absl::OkStatus(); }

   private:
    const std::shared_ptr<Bytes> bytes_;
  };

  class Reader final : public ReadableFile {
   public:
    explicit Reader(std::shared_ptr<const Bytes> bytes) : bytes_(std::move(bytes)) {}
    int64_t size_bytes() const override { return static_cast<int64_t>(bytes_->size()); }
    absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override {
      if (offset + static_cast<int64_t>(out.size()) > size_bytes()) {
        return absl::DataLossError("the file ends before");
      }
      if (!out.empty()) std::memcpy(out.data(), bytes_->data() + offset, out.size());
      return absl::OkStatus();
    }

   private:
    const std::shared_ptr<const Bytes> bytes_;
  };

  // The file, or all files in the directory.
  std::vector<std::string> Inside(const std::string& path) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::vector<std::string> inside;
    for (const auto& [name, bytes] : files_) {
      if (name == path || absl::StartsWith(name, absl::StrCat(path, "/"))) inside.push_back(name);
    }
    return inside;
  }

  Mutex mutex_;
  std::map<std::string, std::shared_ptr<Bytes>> files_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> directories_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_MEMORY_FILE_SYSTEM_H_
