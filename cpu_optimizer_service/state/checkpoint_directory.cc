#include "cpu_optimizer_service/state/checkpoint_directory.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"

namespace ballast {
namespace {

// No job may be called so: names of jobs begin without a dot.
constexpr char kProbe[] = ".try";

absl::Status TryIn(FileSystem& files, const std::string& probe) {
  // A save makes a directory, flushes files in it, gives the directory its name by a move, and its
  // hint a place by the move of a file.
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
  // This makes the directory itself as well, with its parents.
  absl::StatusOr<Partial> probe = MakePartial(file_system, absl::StrCat(path, "/", kProbe));
  absl::Status status = probe.status();
  if (probe.ok()) {
    status = TryIn(file_system, probe->path);
    // No save needs it gone, and another start may be removing it, too. What stays goes with a later
    // start, as does what starts and trials left that were killed.
    file_system.RemoveAll(probe->path).IgnoreError();
    probe->lock = nullptr;
    RemoveLeftovers(file_system, path, kProbe);
  }
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
    if (!found.ok()) continue;
    for (const FoundCheckpoint& each : *found) {
      if (!each.problem.ok()) continue;
      // The folder's name, whatever the index says: it is what --resume takes, and a folder may
      // have been copied.
      directory->known_[folder].push_back(each.facts);
      directory->known_[folder].back().job = name;
    }
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
  for (const auto& [folder, known] : known_) all.push_back(known.front());
  return all;
}

CheckpointDirectory::Total CheckpointDirectory::TotalOf(const std::string& job) const {
  Total total;
  MutexLock lock(mutex_);
  const auto found = known_.find(PathOf(job));
  if (found == known_.end()) return total;
  for (const CheckpointFacts& facts : found->second) {
    ++total.checkpoints;
    total.bytes += facts.size_bytes;
  }
  return total;
}

std::optional<CheckpointFacts> CheckpointDirectory::Find(const std::string& job) const {
  MutexLock lock(mutex_);
  const auto found = known_.find(PathOf(job));
  if (found == known_.end()) return std::nullopt;
  return found->second.front();
}

std::optional<CheckpointFacts> CheckpointDirectory::NewestOf(const std::string& uid) const {
  MutexLock lock(mutex_);
  for (const auto& [folder, known] : known_) {
    for (const CheckpointFacts& facts : known) {
      if (facts.uid == uid) return facts;
    }
  }
  return std::nullopt;
}

std::string CheckpointDirectory::LastOf(const std::string& uid) const {
  const std::optional<CheckpointFacts> last = NewestOf(uid);
  if (!last.has_value()) return absl::StrCat("; ", path_, " has no checkpoint of it");
  return absl::StrCat("; resume from its last checkpoint, ", ToString(*last), ": ",
                      HowToResume(last->job));
}

void CheckpointDirectory::Saved(const std::string& folder, const CheckpointFacts& facts) {
  // A caller may name another folder for its save. What is there is not this directory's.
  if (folder != PathOf(std::filesystem::path(folder).filename().string())) return;
  MutexLock lock(mutex_);
  std::vector<CheckpointFacts>& known = known_[folder];
  // A save that has just ended is the newest of its job, even at a lower step, and its job is the
  // one that saved last.
  known.insert(known.begin(), facts);
  std::stable_partition(known.begin(), known.end(),
                        [&](const CheckpointFacts& other) { return other.uid == facts.uid; });
}

void CheckpointDirectory::ForgetMissing(FileSystem& file_system, const std::string& folder) {
  std::set<std::string> missing;
  {
    MutexLock lock(mutex_);
    const auto found = known_.find(folder);
    if (found == known_.end()) return;
    for (const CheckpointFacts& facts : found->second) missing.insert(facts.directory);
  }
  std::erase_if(missing, [&](const std::string& directory) {
    return file_system.Exists(IndexPath(directory));
  });
  MutexLock lock(mutex_);
  const auto found = known_.find(folder);
  if (found == known_.end()) return;
  std::erase_if(found->second,
                [&](const CheckpointFacts& facts) { return missing.count(facts.directory) > 0; });
  if (found->second.empty()) known_.erase(found);
}

std::string ToString(const CheckpointFacts& facts) {
  return absl::StrCat("job ", facts.job, " at step ", facts.step, " in ", facts.directory);
}

std::string HowToResume(const std::string& job) {
  return absl::StrCat("start its workers with --resume=", job,
                      ", or create it and run ballast load ", job);
}

}  // namespace ballast
