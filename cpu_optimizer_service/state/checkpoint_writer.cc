#include "cpu_optimizer_service/state/checkpoint_writer.h"

#include <filesystem>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {

CheckpointWriter::CheckpointWriter(FileSystem& file_system, Target target, CheckpointIndex index)
    : file_system_(file_system), target_(std::move(target)), index_(std::move(index)) {
  for (const Plane plane : PlanesOf(index_)) {
    for (const int parameter : ParametersWith(index_, plane)) {
      size_bytes_ += index_.parameters[parameter].elements * static_cast<int64_t>(sizeof(float));
    }
  }
}

double CheckpointWriter::SecondsSinceProgress() const {
  return std::chrono::duration<double>(Clock::now() - progress_.load()).count();
}

void CheckpointWriter::Progress(int64_t bytes) {
  written_bytes_ += bytes;
  progress_ = Clock::now();
}

absl::Status CheckpointWriter::Begin() {
  const std::string& directory = target_.directory;
  if (directory.empty() || directory.back() == '/') {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", directory, "' cannot be a checkpoint directory; name one without a final /"));
  }
  const std::string aside = AsideOf(directory);
  // A save was killed while it moved.
  if (!file_system_.Exists(directory) && file_system_.Exists(IndexPath(aside))) {
    BALLAST_RETURN_IF_ERROR(file_system_.Exchange(aside, directory));
  }
  BALLAST_RETURN_IF_ERROR(CheckReplaceable());
  RemoveLeftovers();
  BALLAST_RETURN_IF_ERROR(MakePartial());
  Progress(0);
  return absl::OkStatus();
}

absl::Status CheckpointWriter::CheckReplaceable() const {
  const std::string& directory = target_.directory;
  if (!file_system_.Exists(directory)) return absl::OkStatus();
  const absl::StatusOr<CheckpointFacts> there =
      ReadCheckpointFacts(file_system_, directory, target_.most_index_bytes);
  if (absl::IsNotFound(there.status()) || absl::IsDataLoss(there.status())) {
    return absl::FailedPreconditionError(absl::StrCat(
        directory, " exists and is not a checkpoint; choose another directory or remove it"));
  }
  BALLAST_RETURN_IF_ERROR(there.status());
  if (target_.replace == Replace::kAny) return absl::OkStatus();
  const bool same = there->uid == index_.uid || there->uid == target_.resumed_uid;
  if (same && there->step <= index_.step) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      directory, " has a checkpoint of ", same ? "a later step" : "another job", ": of job ",
      absl::Utf8SafeCEscape(there->job), " (uid ", absl::Utf8SafeCEscape(there->uid), ") at step ",
      there->step, ", and this is job ", index_.job, " (uid ", index_.uid, ") at step ",
      index_.step,
      "; load that one to go on from it, save to another directory, or replace it with ballast "
      "save --force"));
}

void CheckpointWriter::RemoveLeftovers() {
  const std::filesystem::path directory(target_.directory);
  const std::string parent = directory.parent_path().string();
  const std::string prefix = directory.filename().string() + kPartialSuffix;
  const absl::StatusOr<std::vector<std::string>> names =
      file_system_.List(parent.empty() ? "." : parent);
  if (!names.ok()) return;  // There is no parent yet. Any other reason shows when it is written to.
  for (const std::string& name : *names) {
    if (!absl::StartsWith(name, prefix)) continue;
    const std::string left = absl::StrCat(parent, parent.empty() ? "" : "/", name);
    // Null: another save is writing there.
    const std::shared_ptr<const void> lock = file_system_.TryLock(left);
    if (lock != nullptr) file_system_.RemoveAll(left).IgnoreError();
  }
  if (file_system_.Exists(target_.directory)) {
    file_system_.RemoveAll(AsideOf(target_.directory)).IgnoreError();
  }
}

absl::Status CheckpointWriter::MakePartial() {
  // Random: another process, even one of the same number in another container, may have left its
  // own.
  std::random_device random;
  partial_ = absl::StrFormat("%s%s%08x%08x", target_.directory, kPartialSuffix, random(), random());
  BALLAST_RETURN_IF_ERROR(file_system_.CreateDirectory(partial_));
  lock_ = file_system_.TryLock(partial_);
  return absl::OkStatus();
}

absl::Status CheckpointWriter::WritePlane(Plane plane, PlaneReader read) {
  const std::vector<int> parameters = ParametersWith(index_, plane);
  std::vector<TensorEntry> tensors;
  for (const int parameter : parameters) {
    const CheckpointIndex::Parameter& p = index_.parameters[parameter];
    tensors.push_back({.name = p.name, .shape = p.shape, .elements = p.elements});
  }
  BALLAST_ASSIGN_OR_RETURN(
      files_[static_cast<int>(plane)],
      WriteSafetensors(file_system_, PlanePath(partial_, plane), tensors,
                       [&](int tensor, int64_t offset, absl::Span<float> out) {
                         read(parameters[tensor], plane, offset, out);
                         Progress(static_cast<int64_t>(out.size() * sizeof(float)));
                       }));
  Progress(0);
  return absl::OkStatus();
}

absl::StatusOr<int64_t> CheckpointWriter::WriteIndex() {
  int64_t bytes = 0;
  for (const Plane plane : PlanesOf(index_)) {
    const WrittenFile& file = files_[static_cast<int>(plane)];
    index_.files[plane] = file;
    bytes += file.size_bytes;
  }
  const std::string text = ToText(index_);
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file,
                           file_system_.Create(IndexPath(partial_)));
  BALLAST_RETURN_IF_ERROR(file->Append(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(text.data()), text.size())));
  BALLAST_RETURN_IF_ERROR(file->Close());
  return bytes + static_cast<int64_t>(text.size());
}

absl::StatusOr<int64_t> CheckpointWriter::Finish(absl::Status status) {
  absl::StatusOr<int64_t> bytes = 0;
  if (status.ok()) {
    bytes = WriteIndex();
    status = bytes.status();
  }
  // Again: another save may have come there meanwhile.
  if (status.ok()) status = CheckReplaceable();
  if (status.ok()) status = file_system_.Exchange(partial_, target_.directory);
  // After an exchange it is the older checkpoint; after an error, half of this one.
  if (!partial_.empty()) status.Update(file_system_.RemoveAll(partial_));
  lock_ = nullptr;
  BALLAST_RETURN_IF_ERROR(status);
  return bytes;
}

}  // namespace ballast
