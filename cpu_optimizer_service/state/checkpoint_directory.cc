#include "cpu_optimizer_service/state/checkpoint_directory.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"

namespace ballast {
namespace {

absl::Status TryIn(FileSystem& files, const std::string& probe) {
  const std::string first = probe + "/first";
  BALLAST_RETURN_IF_ERROR(files.CreateDirectory(first));
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, files.Create(first + "/file"));
  const std::byte byte{1};
  BALLAST_RETURN_IF_ERROR(file->Append({&byte, 1}));
  BALLAST_RETURN_IF_ERROR(file->Close());
  BALLAST_RETURN_IF_ERROR(files.Rename(first, probe + "/second"));
  return files.Rename(probe + "/second/file", probe + "/file");
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointDirectory>> CheckpointDirectory::Open(
    FileSystem& file_system, const std::string& given, const CheckpointPolicy& policy,
    absl::Status* problem) {
  // Absolute, and without a final slash: it is told to people, and compared.
  std::error_code error;
  std::string path = std::filesystem::absolute(given, error).lexically_normal().string();
  if (error) path = given;
  if (path.size() > 1 && path.back() == '/') path.pop_back();
  std::unique_ptr<CheckpointDirectory> directory(new CheckpointDirectory(path, policy));
  const std::string probe = PartialPath(path + "/.try");
  absl::Status status = TryIn(file_system, probe);
  const absl::Status removed = file_system.RemoveAll(probe);
  status.Update(removed);
  const absl::StatusOr<std::vector<std::string>> names = file_system.List(path);
  status.Update(names.status());
  status = Annotate(status, "no job could be saved");
  if (problem != nullptr) {
    *problem = status;
  } else {
    BALLAST_RETURN_IF_ERROR(status);
  }
  if (!names.ok()) return directory;
  MutexLock lock(directory->mutex_);
  for (const std::string& name : *names) {
    if (!IsJobName(name)) continue;
    const std::string folder = directory->PathOf(name);
    const auto found = ListCheckpoints(file_system, folder);
    if (!found.ok() || found->empty() || !found->front().problem.ok()) continue;
    CheckpointFacts& facts = directory->known_[folder] = found->front().facts;
    facts.job = name;
  }
  return directory;
}

std::string CheckpointDirectory::PathOf(const std::string& job) const {
  return absl::StrCat(path_, "/", job);
}

std::string CheckpointDirectory::NameOf(const std::string& directory) const {
  absl::string_view name = directory;
  return absl::ConsumePrefix(&name, path_) && absl::ConsumePrefix(&name, "/") ? std::string(name)
                                                                              : directory;
}

std::vector<CheckpointFacts> CheckpointDirectory::All() const {
  std::vector<CheckpointFacts> all;
  MutexLock lock(mutex_);
  for (const auto& [name, facts] : known_) all.push_back(facts);
  return all;
}

std::optional<CheckpointFacts> CheckpointDirectory::Find(const std::string& job) const {
  MutexLock lock(mutex_);
  const auto found = known_.find(PathOf(job));
  if (found == known_.end()) return std::nullopt;
  return found->second;
}

std::string CheckpointDirectory::LastOf(const std::string& uid) const {
  const CheckpointFacts* last = nullptr;
  MutexLock lock(mutex_);
  for (const auto& [folder, facts] : known_) {
    if (facts.uid == uid) last = &facts;
  }
  if (last == nullptr) return absl::StrCat("; ", path_, " has no checkpoint of it");
  return absl::StrCat("; go on from its last checkpoint, ", ToString(*last), ": ",
                      HowToResume(last->job));
}

void CheckpointDirectory::Saved(const std::string& folder, const CheckpointFacts& facts) {
  if (folder != PathOf(std::filesystem::path(folder).filename().string())) return;
  MutexLock lock(mutex_);
  known_[folder] = facts;
}

std::string ToString(const CheckpointFacts& facts) {
  return absl::StrCat("job ", facts.job, " at step ", facts.step, " in ", facts.directory);
}

std::string HowToResume(const std::string& job) {
  return absl::StrCat("start its workers with --resume=", job,
                      ", or create it and run: ballast load ", job);
}

}  // namespace ballast
