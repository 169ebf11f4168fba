#include "cpu_optimizer_service/state/checkpoint.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/activity.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"

namespace ballast {
namespace {

// Saves that delete what is being read leave newer ones to be read.
constexpr int kMostReads = 3;
// Files that are read at once, for their checksums.
constexpr int kThreads = 4;

std::string FilePath(const std::string& directory, const CheckpointIndex::File& file) {
  return absl::StrCat(directory, "/", file.name);
}

// Whether the checkpoint before may be taken. All but what is no fault of the checkpoint: this
// program may be too old for it, or have no memory for it.
bool IsDamage(const absl::Status& status) {
  return !absl::IsFailedPrecondition(status) && !absl::IsResourceExhausted(status);
}

// The first error, by number.
absl::Status ForEach(int count, const std::function<absl::Status(int)>& work) {
  std::vector<absl::Status> statuses(count);
  std::atomic<int> next = 0;
  Progress& progress = Progress::OfThisThread();
  const auto help = [&] {
    const CountsIn here(progress);
    for (int i = next++; i < count; i = next++) statuses[i] = work(i);
  };
  std::vector<std::jthread> threads;
  for (int i = 1; i < std::min(count, kThreads); ++i) threads.emplace_back(help);
  help();
  // Joins them, so that all have said what they found. The error that is told then does not depend
  // on which thread was faster.
  threads.clear();
  for (const absl::Status& status : statuses) BALLAST_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::StatusOr<SafetensorsFile> OpenFile(FileSystem& file_system, const std::string& path,
                                         const CheckpointIndex::File& file, int64_t most_bytes) {
  absl::StatusOr<std::unique_ptr<ReadableFile>> there = file_system.Open(path);
  if (absl::IsNotFound(there.status())) {
    // The index names the file, so there is a checkpoint, and it is damaged.
    return absl::DataLossError(absl::StrCat(path, " is missing; use another checkpoint"));
  }
  BALLAST_RETURN_IF_ERROR(there.status());
  if ((*there)->size_bytes() != file.written.size_bytes) {
    return absl::DataLossError(absl::StrCat(path, " has ", (*there)->size_bytes(),
                                            " bytes, expected ", file.written.size_bytes,
                                            "; use another checkpoint"));
  }
  return SafetensorsFile::Open(*std::move(there), path, most_bytes);
}

absl::Status Verify(const SafetensorsFile& opened, const std::string& path,
                    const CheckpointIndex::File& file) {
  // The planes whose square root the update takes. Values are looked at although there is a
  // checksum, because other programs write checkpoints as well (ballast.torch.to_checkpoint).
  const bool squares = file.plane == Plane::kExpAvgSq || file.plane == Plane::kMaxExpAvgSq;
  BALLAST_ASSIGN_OR_RETURN(const SafetensorsFile::Contents contents,
                           opened.Examine(/*negative_is_bad=*/squares));
  if (contents.crc32 != file.written.crc32) {
    return absl::DataLossError(
        absl::StrCat(path, " does not match the checksum in index.json; use another checkpoint"));
  }
  if (contents.bad.has_value()) {
    return absl::DataLossError(
        absl::StrCat(path, ": ", Name(file.plane), " of ", contents.bad->tensor, " is ",
                     contents.bad->value, " at element ", contents.bad->element,
                     ": an update never produces this; use another checkpoint"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(FileSystem& file_system, const std::string& directory,
                                            int64_t most_bytes) {
  Checkpoint checkpoint;
  BALLAST_ASSIGN_OR_RETURN(checkpoint.index_, ReadIndex(file_system, directory, most_bytes));
  const std::vector<CheckpointIndex::File>& files = checkpoint.index_.files;
  const auto count = static_cast<int>(files.size());
  // All are open before the first is read: a save that deletes them then takes nothing away.
  std::vector<SafetensorsFile> opened;
  for (const CheckpointIndex::File& file : files) {
    BALLAST_ASSIGN_OR_RETURN(opened.emplace_back(),
                             OpenFile(file_system, FilePath(directory, file), file, most_bytes));
    Progress::OfThisThread().Expect(file.written.size_bytes);
  }
  BALLAST_RETURN_IF_ERROR(ForEach(
      count, [&](int i) { return Verify(opened[i], FilePath(directory, files[i]), files[i]); }));
  for (int i = 0; i < count; ++i) {
    checkpoint.planes_[files[i].plane].files.push_back(std::move(opened[i]));
  }
  for (const Plane plane : PlanesOf(checkpoint.index_)) {
    BALLAST_RETURN_IF_ERROR(checkpoint.CheckTensors(directory, plane));
  }
  return checkpoint;
}

absl::Status Checkpoint::CheckTensors(const std::string& directory, Plane plane) {
  PlaneFiles& files = planes_[plane];
  for (const int parameter : ParametersWith(index_, plane)) {
    const CheckpointIndex::Parameter& p = index_.parameters[parameter];
    int found = 0;
    for (int i = 0; i < static_cast<int>(files.files.size()); ++i) {
      const TensorEntry* const entry = files.files[i].Find(p.name);
      if (entry == nullptr || entry->shape != p.shape || entry->elements != p.elements) continue;
      files.file_of[p.name] = i;
      ++found;
    }
    // With a tensor in two files nobody would know which of them is right.
    if (found != 1) {
      return absl::DataLossError(absl::StrCat(directory, " does not hold ", Name(plane), " of ",
                                              p.name, " as index.json describes it"));
    }
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::Read(const std::string& parameter, Plane plane, int64_t offset,
                              absl::Span<float> out) const {
  const auto files = planes_.find(plane);
  if (files == planes_.end()) {  // Of weights alone.
    std::fill(out.begin(), out.end(), 0.0f);
    return absl::OkStatus();
  }
  return files->second.files[files->second.file_of.at(parameter)].Read(parameter, offset, out);
}

absl::StatusOr<OpenedCheckpoint> OpenNewest(FileSystem& file_system, const std::string& path,
                                            int64_t most_bytes, CheckpointUses* uses) {
  // Each time the folder is listed anew, because a save deletes older checkpoints once a newer one
  // is complete.
  for (int attempt = 0; attempt < kMostReads; ++attempt) {
    BALLAST_ASSIGN_OR_RETURN(const std::vector<FoundCheckpoint> all,
                             FindCheckpoints(file_system, path));
    std::vector<std::string> passed_over;
    bool gone = false;
    // Of what has no index that can be read, nobody knows whether it is older.
    for (const FoundCheckpoint& found : all) {
      if (found.problem.ok()) continue;
      if (!IsDamage(found.problem) || all.size() == 1) return found.problem;
      passed_over.emplace_back(found.problem.message());
    }
    // Newest first, and those of the job that saved last before all others (ListCheckpoints).
    for (const FoundCheckpoint& found : all) {
      if (!found.problem.ok()) continue;
      const std::string& directory = found.facts.directory;
      // Before it is opened: what is open is then there until the use ends.
      CheckpointUses::Use use = uses != nullptr ? uses->Read(directory) : nullptr;
      if (uses != nullptr && use == nullptr) {
        gone = true;
        continue;
      }
      absl::StatusOr<Checkpoint> opened = Checkpoint::Open(file_system, directory, most_bytes);
      if (opened.ok()) {
        return OpenedCheckpoint{.checkpoint = *std::move(opened),
                                .directory = directory,
                                .passed_over = std::move(passed_over),
                                .use = std::move(use)};
      }
      if (!file_system.Exists(IndexPath(directory))) {
        gone = true;  // Deleted meanwhile, because there is a newer one.
        continue;
      }
      if (!IsDamage(opened.status()) || all.size() == 1) return opened.status();
      passed_over.emplace_back(opened.status().message());
    }
    // At least one was found, and each was damaged, so there is a first line.
    if (!gone) {
      return absl::DataLossError(absl::StrCat(
          "no checkpoint in ", path, " can be loaded; the newest one fails: ", passed_over[0]));
    }
  }
  return absl::UnavailableError(
      absl::StrCat(path, ": the checkpoint was deleted while it was read, ", kMostReads,
                   " times in a row; load it again when no save is running"));
}

}  // namespace ballast
