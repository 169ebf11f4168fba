#include "cpu_optimizer_service/state/checkpoint_writer.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/activity.h"
#include "cpu_optimizer_service/common/text/checkpoint_name.h"
#include "cpu_optimizer_service/state/checkpoint.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"

namespace ballast {
namespace {

// Of one step and generation in a folder.
constexpr int kMostOfOneName = 1000;
constexpr char kHint[] = "latest";

absl::Status WriteText(FileSystem& file_system, const std::string& path, absl::string_view text) {
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, file_system.Create(path));
  BALLAST_RETURN_IF_ERROR(file->Append(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(text.data()), text.size())));
  return file->Close();
}

}  // namespace

CheckpointWriter::CheckpointWriter(FileSystem& file_system, Target target, CheckpointIndex index)
    : file_system_(file_system),
      target_(std::move(target)),
      index_(std::move(index)),
      parts_(PartsOf(index_, target_.part_bytes,
                     target_.share.has_value() ? &*target_.share : nullptr)),
      files_(parts_.size()) {
  for (const CheckpointPart& part : parts_) size_bytes_ += part.bytes;
}

absl::Status CheckpointWriter::Begin() {
  const std::filesystem::path folder(target_.folder);
  const std::string name = folder.filename().string();
  // In a folder called step-1000.1 FindCheckpoints would see one checkpoint, not a folder of them.
  if (name.empty() || name == "." || name == ".." || IsVersionName(name)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", target_.folder,
        "' cannot be a folder of checkpoints; name one without a final /, and not step-..."));
  }
  // Made anew, it would be on another disk than the one that is not mounted any more.
  const std::string parent = folder.parent_path().string();
  if (!parent.empty() && !file_system_.Exists(parent)) {
    return absl::NotFoundError(
        absl::StrCat("the directory ", parent,
                     " to save in does not exist; create it, or mount its file system"));
  }
  BALLAST_RETURN_IF_ERROR(file_system_.CreateDirectory(target_.folder));
  // Before anything is written, because leftovers take room that this save may need.
  RemoveLeftovers(file_system_, target_.folder);
  BALLAST_ASSIGN_OR_RETURN(
      Partial partial,
      MakePartial(file_system_,
                  absl::StrCat(target_.folder, "/", VersionName(index_.step, index_.generation))));
  partial_ = std::move(partial.path);
  lock_ = std::move(partial.lock);
  Progress::OfThisThread().Count(0);
  return absl::OkStatus();
}

absl::Status CheckpointWriter::Join(const std::string& partial) {
  // What another service says, which may lead elsewhere, or to a checkpoint that is whole.
  const size_t suffix = partial.find(kPartialSuffix);
  const std::string path = absl::StrCat(target_.folder, "/", partial);
  if (suffix == partial.npos || partial.find('/') != partial.npos ||
      !IsVersionName(partial.substr(0, suffix)) || !file_system_.Exists(path)) {
    return absl::FailedPreconditionError(
        absl::StrCat("it does not see ", path,
                     ", which the lead has made; give all members a --checkpoint-dir on one shared "
                     "file system"));
  }
  partial_ = path;
  return absl::OkStatus();
}

std::string CheckpointWriter::partial() const {
  return std::filesystem::path(partial_).filename().string();
}

bool CheckpointWriter::IsCut(int parameter) const {
  return target_.share.has_value() && !target_.share->HasAll(index_, parameter);
}

absl::Status CheckpointWriter::WritePart(int part, StoredReader read) {
  const CheckpointPart& to = parts_[part];
  Progress& progress = Progress::OfThisThread();
  std::vector<TensorEntry> tensors;
  for (const int parameter : to.parameters) {
    TensorEntry& tensor = tensors.emplace_back(TensorOf(index_.parameters[parameter], to.plane));
    if (!IsCut(parameter)) continue;
    tensor.elements = StoredCount(to.plane, target_.share->held[parameter].elements());
    tensor.shape = {tensor.elements};
  }
  const auto read_piece = [&](int tensor, int64_t offset, absl::Span<std::byte> out) {
    const int parameter = to.parameters[tensor];
    if (!IsCut(parameter)) return read(parameter, to.plane, offset, out);
    const int64_t size = SizeBytes(tensors[tensor].type);
    // What is held of a packed parameter are whole groups, but at its end.
    const int64_t group = ElementsPerNumber(to.plane);
    target_.share->held[parameter].VisitRange(
        offset * group, static_cast<int64_t>(out.size()) / size * group,
        [&](int64_t begin, int64_t elements) {
          const int64_t bytes = StoredCount(to.plane, elements) * size;
          read(parameter, to.plane, begin / group, out.first(bytes));
          out.remove_prefix(bytes);
        });
  };
  BALLAST_ASSIGN_OR_RETURN(files_[part],
                           WriteTensors(file_system_, absl::StrCat(partial_, "/", to.name), tensors,
                                        [&](int tensor, int64_t offset, absl::Span<std::byte> out) {
                                          read_piece(tensor, offset, out);
                                          progress.Count(static_cast<int64_t>(out.size()));
                                          return absl::OkStatus();
                                        }));
  // The file's flush at its end may take long, and its end is progress, too.
  progress.Count(0);
  return absl::OkStatus();
}

std::vector<CheckpointIndex::File> CheckpointWriter::Files() const {
  std::vector<CheckpointIndex::File> files;
  for (size_t part = 0; part < parts_.size(); ++part) {
    files.push_back(
        {.plane = parts_[part].plane, .name = parts_[part].name, .written = files_[part]});
    for (const int parameter : parts_[part].parameters) {
      if (!IsCut(parameter)) continue;
      files.back().cut[index_.parameters[parameter].name] = target_.share->held[parameter];
    }
  }
  return files;
}

void CheckpointWriter::Add(std::vector<CheckpointIndex::File> files) {
  others_.insert(others_.end(), std::make_move_iterator(files.begin()),
                 std::make_move_iterator(files.end()));
}

absl::Status CheckpointWriter::CheckWritten() const {
  const auto opened = Checkpoint::Open(file_system_, partial_, target_.most_index_bytes,
                                       [](const std::string&, int64_t, int64_t) { return false; });
  return Annotate(opened.status(),
                  "what the members have written does not make a checkpoint; is their "
                  "--checkpoint-dir on one shared file system?");
}

absl::StatusOr<int64_t> CheckpointWriter::WriteIndex() {
  index_.files = Files();
  index_.files.insert(index_.files.end(), std::make_move_iterator(others_.begin()),
                      std::make_move_iterator(others_.end()));
  int64_t bytes = 0;
  for (const CheckpointIndex::File& file : index_.files) bytes += file.written.size_bytes;
  // The clock may have gone back. What was saved last is to be known by this number.
  index_.saved_unix_ms =
      std::max(index_.saved_unix_ms, LastSaved(file_system_, target_.folder) + 1);
  const std::string text = ToText(index_);
  if (static_cast<int64_t>(text.size()) > target_.most_index_bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("the index would have ", text.size(),
                     " bytes, and no job would load more than ", target_.most_index_bytes,
                     ": the members hold the parameters in too many pieces; give each member whole "
                     "rows of them"));
  }
  BALLAST_RETURN_IF_ERROR(WriteText(file_system_, IndexPath(partial_), text));
  if (target_.share.has_value()) BALLAST_RETURN_IF_ERROR(CheckWritten());
  return bytes;
}

// The rename fails where there is something, so that nothing is replaced, whoever else saves here.
absl::StatusOr<std::string> CheckpointWriter::GiveName() {
  for (int number = 1; number <= kMostOfOneName; ++number) {
    std::string directory =
        absl::StrCat(target_.folder, "/", VersionName(index_.step, index_.generation, number));
    // Looked at first, because a rename takes the place of an empty directory without an error.
    if (file_system_.Exists(directory)) continue;
    const absl::Status named = file_system_.Rename(partial_, directory);
    if (named.ok()) return directory;
    if (!absl::IsAlreadyExists(named)) return named;
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(target_.folder, " has ", kMostOfOneName, " checkpoints of step ", index_.step,
                   " and generation ", index_.generation, "; delete some"));
}

// It gets its place by a move of its own.
void CheckpointWriter::WriteHint(const std::string& directory) {
  // It is made within the new checkpoint, where no other save writes.
  const std::string made = absl::StrCat(directory, "/", kHint);
  const std::string name = std::filesystem::path(directory).filename().string();
  absl::Status status = WriteText(file_system_, made, name + "\n");
  if (status.ok()) status = file_system_.Rename(made, absl::StrCat(target_.folder, "/", kHint));
  if (!status.ok()) file_system_.RemoveAll(made).IgnoreError();
}

absl::StatusOr<CheckpointFacts> CheckpointWriter::Finish(absl::Status status) {
  CheckpointFacts facts = {.job = index_.job,
                           .uid = index_.uid,
                           .step = index_.step,
                           .epoch = index_.epoch,
                           .generation = index_.generation,
                           .asked_for = index_.asked_for};
  const auto make = [&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(status);
    BALLAST_ASSIGN_OR_RETURN(facts.size_bytes, WriteIndex());
    facts.saved_unix_ms = index_.saved_unix_ms;
    BALLAST_ASSIGN_OR_RETURN(facts.directory, GiveName());
    return absl::OkStatus();
  };
  if (absl::Status made = make(); !made.ok()) {
    // The lock is held until the directory is gone, so that no other save removes it at the same
    // time.
    if (!partial_.empty()) made.Update(file_system_.RemoveAll(partial_));
    lock_ = nullptr;
    return made;
  }
  // The directory has a checkpoint's name now, which nobody takes for a leftover, so the lock is
  // needed no more.
  file_system_.RemoveAll(LockPath(facts.directory)).IgnoreError();
  lock_ = nullptr;
  WriteHint(facts.directory);
  return facts;
}

}  // namespace ballast
