#include "cpu_optimizer_service/state/checkpoint_folder.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/checkpoint_name.h"

namespace ballast {
namespace {

// At a directory of one's own.
constexpr int kMostFolders = 4;

std::string In(const std::string& folder, absl::string_view name) {
  return absl::StrCat(folder, "/", name);
}

FoundCheckpoint Look(FileSystem& file_system, const std::string& directory) {
  FoundCheckpoint found = {.facts = {.directory = directory}, .problem = {}};
  if (file_system.IsSymbolicLink(directory)) {
    found.problem = absl::DataLossError(
        absl::StrCat(directory, " is a symbolic link; put the checkpoint itself there"));
    return found;
  }
  absl::StatusOr<CheckpointFacts> facts =
      ReadCheckpointFacts(file_system, directory, kMostForeignIndexBytes);
  if (!facts.ok()) {
    found.problem = facts.status();
    // It has the name of a checkpoint, which comes after the index.
    if (absl::IsNotFound(found.problem)) {
      found.problem = absl::DataLossError(found.problem.message());
    }
    return found;
  }
  found.facts = *std::move(facts);
  // People go by the name, and so does a load of FOLDER/step-STEP.
  const std::string name = std::filesystem::path(directory).filename().string();
  const std::string saved_as = VersionName(found.facts.step, found.facts.generation);
  if (IsVersionName(name) && name != saved_as && !absl::StartsWith(name, saved_as + ".")) {
    found.problem = absl::DataLossError(
        absl::StrCat(directory, " was renamed: its index calls it ", saved_as, "; rename it back"));
  }
  return found;
}

// First what has the highest epoch, and of that what saved last; of one job what is newest. `saved`: when each job saved last.
void Sort(std::vector<FoundCheckpoint>& all) {
  std::map<std::string, int64_t> saved;
  for (const FoundCheckpoint& found : all) {
    int64_t& last = saved[found.facts.uid];
    last = std::max(last, found.facts.saved_unix_ms);
  }
  std::sort(all.begin(), all.end(), [&](const FoundCheckpoint& x, const FoundCheckpoint& y) {
    const CheckpointFacts& a = x.facts;
    const CheckpointFacts& b = y.facts;
    // The epoch before the clock: hosts of a cluster may differ in that. The generation before the
    // step: after a load or an undo a job may go on from a lower step in a higher generation. The
    // clock comes after both, because it may have gone back.
    return std::tuple(x.problem.ok(), a.epoch, saved[a.uid], a.uid, a.generation, a.step,
                      a.saved_unix_ms,
                      a.directory) > std::tuple(y.problem.ok(), b.epoch, saved[b.uid], b.uid,
                                                b.generation, b.step, b.saved_unix_ms, b.directory);
  });
}

// Killed anywhere in it, the checkpoint is whole, or known to be none.
absl::Status Delete(FileSystem& file_system, const std::string& directory) {
  const std::string partial = PartialPath(directory);
  BALLAST_RETURN_IF_ERROR(file_system.Rename(directory, partial));
  file_system.RemoveAll(partial).IgnoreError();  // What is left goes with the next save.
  return absl::OkStatus();
}

}  // namespace

std::string PartialPath(const std::string& path) {
  // Random: another process, even one of the same number in another container, may have left its
  // own.
  std::random_device random;
  return absl::StrCat(path, kPartialSuffix, absl::Hex(random(), absl::kZeroPad8),
                      absl::Hex(random(), absl::kZeroPad8));
}

absl::StatusOr<Partial> MakePartial(FileSystem& file_system, const std::string& path) {
  Partial made;
  for (int attempt = 1; attempt <= kMostFolders; ++attempt) {
    made.path = PartialPath(path);
    BALLAST_RETURN_IF_ERROR(file_system.CreateDirectory(made.path));
    made.lock = file_system.TryLock(made.path);
    // Another process, which looks for leftovers, may have been faster; or nothing can be locked
    // here, and then it removes nothing either.
    if (made.lock != nullptr && file_system.Exists(LockPath(made.path))) break;
    // The other one may be removing it, too; what is left goes with a later one.
    if (attempt < kMostFolders) file_system.RemoveAll(made.path).IgnoreError();
  }
  return made;
}

absl::StatusOr<std::vector<FoundCheckpoint>> ListCheckpoints(FileSystem& file_system,
                                                             const std::string& folder) {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> names, file_system.List(folder));
  std::vector<FoundCheckpoint> all;
  for (const std::string& name : names) {
    if (IsVersionName(name)) all.push_back(Look(file_system, In(folder, name)));
  }
  Sort(all);
  return all;
}

namespace {

absl::StatusOr<std::vector<FoundCheckpoint>> FindStep(FileSystem& file_system,
                                                      const std::string& folder, uint64_t step) {
  absl::StatusOr<std::vector<FoundCheckpoint>> all = ListCheckpoints(file_system, folder);
  // Without the folder the answer is the same as without the step.
  if (!all.ok() && !absl::IsNotFound(all.status())) return all;
  std::vector<FoundCheckpoint> found;
  std::set<uint64_t> steps;
  if (all.ok()) {
    for (FoundCheckpoint& each : *all) {
      // Where there is a problem, its name may be all that is known.
      const std::string name = std::filesystem::path(each.facts.directory).filename().string();
      const bool is_meant = absl::StartsWith(name, absl::StrCat("step-", step, "."));
      if (each.problem.ok()) steps.insert(each.facts.step);
      if (is_meant) found.push_back(std::move(each));
    }
  }
  if (!found.empty()) return found;
  return absl::NotFoundError(
      absl::StrCat("there is no checkpoint of step ", step, " in ", folder, " (there are steps ",
                   steps.empty() ? "none" : absl::StrJoin(steps, ", "), ")"));
}

}  // namespace

absl::StatusOr<std::vector<FoundCheckpoint>> FindCheckpoints(FileSystem& file_system,
                                                             const std::string& path) {
  const std::filesystem::path parts(path);
  const std::optional<uint64_t> step = StepNamed(parts.filename().string());
  // A job may itself be called step-1000; then its folder is meant.
  if (step.has_value() && !file_system.Exists(path)) {
    return FindStep(file_system, parts.parent_path().string(), *step);
  }
  if (IsVersionName(std::filesystem::path(path).filename().string())) {
    if (!file_system.Exists(path)) {
      return absl::NotFoundError(absl::StrCat("there is no checkpoint ", path));
    }
    return std::vector<FoundCheckpoint>{Look(file_system, path)};
  }
  absl::StatusOr<std::vector<FoundCheckpoint>> all = ListCheckpoints(file_system, path);
  if (all.ok() && all->empty() && file_system.Exists(IndexPath(path))) {
    return std::vector<FoundCheckpoint>{Look(file_system, path)};
  }
  if (absl::IsNotFound(all.status()) || (all.ok() && all->empty())) {
    return absl::NotFoundError(absl::StrCat("there is no checkpoint in ", path));
  }
  return all;
}

int64_t LastSaved(FileSystem& file_system, const std::string& folder) {
  const absl::StatusOr<std::vector<FoundCheckpoint>> all = ListCheckpoints(file_system, folder);
  int64_t last = 0;
  if (!all.ok()) return last;
  for (const FoundCheckpoint& found : *all) last = std::max(last, found.facts.saved_unix_ms);
  return std::min(last, std::numeric_limits<int64_t>::max() - 1);
}

uint64_t HighestEpoch(FileSystem& file_system, const std::string& folder) {
  uint64_t highest = 0;
  const absl::StatusOr<std::vector<FoundCheckpoint>> all = ListCheckpoints(file_system, folder);
  if (!all.ok()) return highest;
  for (const FoundCheckpoint& found : *all) highest = std::max(highest, found.facts.epoch);
  return highest;
}

std::vector<CheckpointFacts> DeleteOlder(FileSystem& file_system, CheckpointUses& uses,
                                         const std::string& folder, const std::string& uid,
                                         bool asked_for, int keep) {
  std::vector<CheckpointFacts> deleted;
  const absl::StatusOr<std::vector<FoundCheckpoint>> all = ListCheckpoints(file_system, folder);
  if (!all.ok()) return deleted;
  // The list has the newest first, so the first `keep` of them stay. A damaged one is never
  // deleted: nobody knows whose it is.
  std::set<std::pair<uint64_t, uint64_t>> kept;
  for (const FoundCheckpoint& found : *all) {
    const CheckpointFacts& facts = found.facts;
    if (!found.problem.ok() || facts.uid != uid || facts.asked_for != asked_for) continue;
    const bool room = static_cast<int>(kept.size()) < keep;
    if (room && kept.emplace(facts.generation, facts.step).second) continue;
    // One that is read goes with the next save. Readers in another process that have its files open
    // read on (Checkpoint::Open); others take a newer checkpoint (OpenNewest).
    const CheckpointUses::Use use = uses.Delete(facts.directory);
    if (use != nullptr && Delete(file_system, facts.directory).ok()) deleted.push_back(facts);
  }
  return deleted;
}

namespace {

// Those of FOLDER/step-STEP that DeleteCheckpoints takes.
absl::StatusOr<std::vector<FoundCheckpoint>> AskedForAt(FileSystem& file_system,
                                                        const std::string& path,
                                                        const std::string& uid) {
  BALLAST_ASSIGN_OR_RETURN(std::vector<FoundCheckpoint> found, FindCheckpoints(file_system, path));
  std::vector<std::string> others;
  std::set<std::string> uids;
  std::erase_if(found, [&](const FoundCheckpoint& each) {
    const CheckpointFacts& facts = each.facts;
    if (each.problem.ok() && facts.asked_for && (uid.empty() || facts.uid == uid)) {
      uids.insert(facts.uid);
      return false;
    }
    others.push_back(std::filesystem::path(facts.directory).filename().string());
    return true;
  });
  if (uids.size() > 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, " has checkpoints of ", uids.size(), " jobs of this name; name the one to delete, ",
        path, ".GENERATION, or the job's uid"));
  }
  if (!found.empty()) return found;
  return absl::NotFoundError(
      absl::StrCat("there is no checkpoint ", path, uid.empty() ? "" : " of job ", uid,
                   " that a call saved; to delete another one, give its full name (there are: ",
                   absl::StrJoin(others, ", "), ")"));
}

}  // namespace

absl::StatusOr<std::vector<FoundCheckpoint>> DeleteCheckpoints(FileSystem& file_system,
                                                               CheckpointUses& uses,
                                                               const std::string& path,
                                                               const std::string& uid) {
  const std::string name = std::filesystem::path(path).filename().string();
  const bool is_one = IsVersionName(name);
  // A folder of all checkpoints of a job may be called step-1000, as the job is.
  if (!is_one && (!StepNamed(name).has_value() || file_system.Exists(path))) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is not one checkpoint; name it, ", path, "/step-STEP.GENERATION, or ",
                     path, "/step-STEP for those of a step that were asked for"));
  }
  BALLAST_ASSIGN_OR_RETURN(
      std::vector<FoundCheckpoint> found,
      is_one ? FindCheckpoints(file_system, path) : AskedForAt(file_system, path, uid));
  if (!uid.empty() && found[0].facts.uid != uid) {
    return absl::NotFoundError(absl::StrCat("there is no checkpoint ", path, " of job ", uid));
  }
  std::vector<CheckpointUses::Use> held;
  for (const FoundCheckpoint& each : found) {
    held.push_back(uses.Delete(each.facts.directory));
    if (held.back() != nullptr) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(each.facts.directory,
                     " is being loaded, verified or deleted; delete it when that has ended "
                     "(ballast jobs shows it)"));
  }
  for (const FoundCheckpoint& each : found) {
    BALLAST_RETURN_IF_ERROR(Delete(file_system, each.facts.directory));
  }
  return found;
}

void RemoveLeftovers(FileSystem& file_system, const std::string& folder, absl::string_view of) {
  const absl::StatusOr<std::vector<std::string>> names = file_system.List(folder);
  if (!names.ok()) return;  // Why shows when it is written to.
  for (const std::string& name : *names) {
    const size_t partial = name.find(kPartialSuffix);
    if (partial == name.npos) continue;
    const std::string made_for = name.substr(0, partial);
    // Only what a save or a trial has made: other files that are called so are somebody else's.
    if (of.empty() ? !IsVersionName(made_for) : made_for != of) continue;
    const std::string left = In(folder, name);
    // Null: another process is writing there.
    const std::shared_ptr<const void> lock = file_system.TryLock(left);
    if (lock != nullptr) file_system.RemoveAll(left).IgnoreError();
  }
}

}  // namespace ballast
