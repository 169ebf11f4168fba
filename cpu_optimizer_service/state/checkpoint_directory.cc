#include "cpu_optimizer_service/state/checkpoint_directory.h"

#include <filesystem>
#include <random>
#include <system_error>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/state/checkpoint_writer.h"

namespace ballast {
namespace {

// Files of the operator's own; a larger index is not looked at.
constexpr int64_t kMostIndexBytes = int64_t{256} << 20;

absl::Status TryIn(FileSystem& files, const std::string& probe) {
  const std::string first = probe + "/first";
  const std::string second = probe + "/second";
  for (const std::string& directory : {first, second}) {
    BALLAST_RETURN_IF_ERROR(files.CreateDirectory(directory));
    BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, files.Create(directory + "/file"));
    const std::byte byte{1};
    BALLAST_RETURN_IF_ERROR(file->Append({&byte, 1}));
    BALLAST_RETURN_IF_ERROR(file->Close());
  }
  BALLAST_RETURN_IF_ERROR(files.Exchange(first, second));
  BALLAST_RETURN_IF_ERROR(files.RemoveAll(first));
  return files.Exchange(second, first);  // To where nothing is.
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointDirectory>> CheckpointDirectory::Open(
    FileSystem& file_system, const std::string& given) {
  // Absolute, and without a final slash: it is told to people, and compared.
  std::error_code error;
  std::string path = std::filesystem::absolute(given, error).lexically_normal().string();
  if (error) path = given;
  if (path.size() > 1 && path.back() == '/') path.pop_back();
  std::unique_ptr<CheckpointDirectory> directory(new CheckpointDirectory(path));
  std::random_device random;
  const std::string probe = absl::StrFormat("%s/.try-%08x%08x", path, random(), random());
  absl::Status status = TryIn(file_system, probe);
  const absl::Status removed = file_system.RemoveAll(probe);
  status.Update(removed);
  BALLAST_RETURN_IF_ERROR(Annotate(status, "no job could be saved"));
  BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> names, file_system.List(path));
  MutexLock lock(directory->mutex_);
  for (const std::string& name : names) {
    const absl::StatusOr<CheckpointFacts> facts =
        ReadCheckpointFacts(file_system, absl::StrCat(path, "/", name), kMostIndexBytes);
    if (!facts.ok() || name.find(kPartialSuffix) != std::string::npos) continue;
    // Of a save that was killed while it moved, the checkpoint is aside; a load finds it there.
    const std::string folder =
        absl::EndsWith(name, AsideOf("")) ? name.substr(0, name.size() - AsideOf("").size()) : name;
    if (folder != name && absl::c_linear_search(names, folder)) continue;
    directory->known_[folder] = {.directory = directory->PathOf(folder),
                                 .job = folder,
                                 .uid = facts->uid,
                                 .step = facts->step};
  }
  return directory;
}

std::string CheckpointDirectory::PathOf(const std::string& job) const {
  return absl::StrCat(path_, "/", job);
}

std::vector<CheckpointFacts> CheckpointDirectory::All() const {
  std::vector<CheckpointFacts> all;
  MutexLock lock(mutex_);
  for (const auto& [name, facts] : known_) all.push_back(facts);
  return all;
}

std::optional<CheckpointFacts> CheckpointDirectory::Find(const std::string& job) const {
  MutexLock lock(mutex_);
  const auto found = known_.find(job);
  if (found == known_.end()) return std::nullopt;
  return found->second;
}

void CheckpointDirectory::Saved(const CheckpointFacts& facts) {
  if (facts.directory != PathOf(facts.job)) return;
  MutexLock lock(mutex_);
  known_[facts.job] = facts;
}

std::string ToString(const CheckpointFacts& facts) {
  return absl::StrCat("job ", facts.job, " at step ", facts.step, " in ", facts.directory);
}

std::string HowToResume(const std::string& job) {
  return absl::StrCat("start its workers with --resume=", job,
                      ", or create it and run: ballast load ", job, " ", job);
}

}  // namespace ballast
