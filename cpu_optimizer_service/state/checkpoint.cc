#include "cpu_optimizer_service/state/checkpoint.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

// A save that replaces the checkpoint while it is read leaves the newer one to be read.
constexpr int kMostAttempts = 3;

// Where the checkpoint is: aside, if a save was killed while it moved (FileSystem::Exchange).
std::string FindIn(FileSystem& file_system, const std::string& directory) {
  const std::string aside = AsideOf(directory);
  const bool moved = !file_system.Exists(directory) && file_system.Exists(IndexPath(aside));
  return moved ? aside : directory;
}

}  // namespace

absl::Status Checkpoint::Open(FileSystem& file_system, const std::string& directory, Plane plane,
                              int64_t most_bytes) {
  const std::string path = PlanePath(directory, plane);
  BALLAST_ASSIGN_OR_RETURN(SafetensorsFile file,
                           SafetensorsFile::Open(file_system, path, most_bytes));
  const bool squares = plane == Plane::kExpAvgSq || plane == Plane::kMaxExpAvgSq;
  BALLAST_ASSIGN_OR_RETURN(const SafetensorsFile::Contents contents,
                           file.Examine(/*negative_is_bad=*/squares));
  if (contents.sha256 != index_.files.at(plane).sha256) {
    return absl::DataLossError(
        absl::StrCat(path, " does not match the checksum in index.json; use another checkpoint"));
  }
  for (const int parameter : ParametersWith(index_, plane)) {
    const CheckpointIndex::Parameter& p = index_.parameters[parameter];
    const TensorEntry* entry = file.Find(p.name);
    if (entry == nullptr || entry->shape != p.shape || entry->elements != p.elements) {
      return absl::DataLossError(
          absl::StrCat(path, " does not hold ", p.name, " as index.json describes it"));
    }
  }
  if (contents.bad.has_value()) {
    return absl::DataLossError(absl::StrCat(
        path, ": ", Name(plane), " of ", contents.bad->tensor, " is ", contents.bad->value,
        " at element ", contents.bad->element, ", which no update leaves; use another checkpoint"));
  }
  files_.emplace(plane, std::move(file));
  return absl::OkStatus();
}

absl::StatusOr<Checkpoint> Checkpoint::Open(FileSystem& file_system, const std::string& directory,
                                            int64_t most_bytes) {
  for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
    const std::string found = FindIn(file_system, directory);
    Checkpoint checkpoint;
    BALLAST_ASSIGN_OR_RETURN(checkpoint.index_, ReadIndex(file_system, found, most_bytes));
    absl::Status status;
    for (const Plane plane : PlanesOf(checkpoint.index_)) {
      if (status.ok()) status = checkpoint.Open(file_system, found, plane, most_bytes);
    }
    if (status.ok()) return checkpoint;
    const absl::StatusOr<CheckpointIndex> now = ReadIndex(file_system, found, most_bytes);
    if (now.ok() && now->sha256 == checkpoint.index_.sha256) return status;
  }
  return absl::UnavailableError(
      absl::StrCat(directory, " was replaced by a save each time that it was read, ", kMostAttempts,
                   " times; load it again when no save is under way"));
}

absl::Status Checkpoint::Read(const std::string& parameter, Plane plane, int64_t offset,
                              absl::Span<float> out) const {
  return files_.at(plane).Read(parameter, offset, out);
}

}  // namespace ballast
