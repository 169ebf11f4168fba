// A process's way to the disk, which ends with the process.
#ifndef BALLAST_TESTS_HISTORIES_MEMBERS_MORTAL_FILES_H_
#define BALLAST_TESTS_HISTORIES_MEMBERS_MORTAL_FILES_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/host/file_system.h"
#include "tests/histories/engine/deaths.h"

namespace ballast::histories {

class MortalFiles final : public FileSystem {
 public:
  // `dead` may be null: the process does not die.
  MortalFiles(FileSystem& files, DeathFlag dead) : files_(files), dead_(std::move(dead)) {}

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    BALLAST_RETURN_IF_ERROR(Check(dead_));
    BALLAST_ASSIGN_OR_RETURN(auto file, files_.Create(path));
    return std::make_unique<Writer>(std::move(file), dead_);
  }
  absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override {
    return files_.Open(path);
  }
  bool Exists(const std::string& path) override { return files_.Exists(path); }
  absl::Status CreateDirectory(const std::string& path) override {
    BALLAST_RETURN_IF_ERROR(Check(dead_));
    return files_.CreateDirectory(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    BALLAST_RETURN_IF_ERROR(Check(dead_));
    return files_.Rename(from, to);
  }
  absl::Status RemoveAll(const std::string& path) override {
    BALLAST_RETURN_IF_ERROR(Check(dead_));
    return files_.RemoveAll(path);
  }
  absl::StatusOr<std::vector<std::string>> List(const std::string& directory) override {
    return files_.List(directory);
  }
  std::shared_ptr<const void> TryLock(const std::string& directory) override {
    return files_.TryLock(directory);
  }

 private:
  static absl::Status Check(const DeathFlag& dead) {
    if (dead == nullptr || !*dead) return absl::OkStatus();
    return absl::UnavailableError("the process died");
  }

  class Writer final : public WritableFile {
   public:
    Writer(std::unique_ptr<WritableFile> file, DeathFlag dead)
        : file_(std::move(file)), dead_(std::move(dead)) {}
    absl::Status Append(absl::Span<const std::byte> bytes) override {
      BALLAST_RETURN_IF_ERROR(Check(dead_));
      return file_->Append(bytes);
    }
    absl::Status Close() override {
      BALLAST_RETURN_IF_ERROR(Check(dead_));
      return file_->Close();
    }

   private:
    const std::unique_ptr<WritableFile> file_;
    const DeathFlag dead_;
  };

  FileSystem& files_;
  const DeathFlag dead_;
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_MEMBERS_MORTAL_FILES_H_
