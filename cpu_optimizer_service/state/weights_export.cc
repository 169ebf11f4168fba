#include "cpu_optimizer_service/state/weights_export.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/activity.h"
#include "cpu_optimizer_service/state/checkpoint.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"
#include "cpu_optimizer_service/state/safetensors.h"

namespace ballast {
namespace {

// "a/b/" is "a/b", beside which another directory can be made.
std::string WithoutSlash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

absl::Status CheckEmpty(FileSystem& file_system, const std::string& directory) {
  if (directory.empty())
    return absl::InvalidArgumentError("the directory to export to has no name");
  const std::string last = directory.substr(directory.rfind('/') + 1);
  if (last == "." || last == "..") {  // No rename takes their place.
    return absl::FailedPreconditionError(
        absl::StrCat(directory,
                     " cannot be replaced by the finished export; name a directory in it that does "
                     "not exist yet: ",
                     directory, "/model"));
  }
  // An empty directory is replaced by the rename at the end. A link to one is not: rename(2) moves
  // no directory over a link.
  const bool is_link = file_system.IsSymbolicLink(directory);
  if (!is_link && !file_system.Exists(directory)) return absl::OkStatus();
  const absl::StatusOr<std::vector<std::string>> names = file_system.List(directory);
  if (!is_link && names.ok() && names->empty()) {
    if (!file_system.IsMountPoint(directory)) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        directory,
        " is where a file system is mounted, which the finished export cannot take the "
        "place of; name a directory in it that does not exist yet: ",
        directory, "/model"));
  }
  return absl::FailedPreconditionError(
      absl::StrCat(directory,
                   " exists and is not an empty directory; an export overwrites nothing: "
                   "name a new directory"));
}

// By file, the numbers of its parameters: in their order, as many as fit.
std::vector<std::vector<int>> Divide(const CheckpointIndex& index, const ExportRequest& request) {
  std::vector<std::vector<int>> files(1);
  int64_t bytes = 0;
  for (int i = 0; i < static_cast<int>(index.parameters.size()); ++i) {
    const int64_t more = index.parameters[i].elements * SizeBytes(request.dtype);
    if (!files.back().empty() && bytes + more > request.most_file_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().push_back(i);
    bytes += more;
  }
  return files;
}

std::string NameOf(size_t number, size_t count) {
  if (count == 1) return kModelFile;
  return absl::StrCat("model-", absl::Dec(number + 1, absl::kZeroPad5), "-of-",
                      absl::Dec(count, absl::kZeroPad5), ".safetensors");
}

absl::Status WriteFile(FileSystem& file_system, const std::string& path,
                       const Checkpoint& checkpoint, const std::vector<int>& parameters,
                       DType dtype) {
  std::vector<TensorEntry> tensors;
  for (const int i : parameters) {
    const CheckpointIndex::Parameter& parameter = checkpoint.index().parameters[i];
    tensors.push_back(
        {.name = parameter.name, .shape = parameter.shape, .elements = parameter.elements});
  }
  absl::Status status;
  const auto read = [&](int tensor, int64_t offset, absl::Span<float> out) {
    // The callback has no way to fail, so its error waits here. What is written after it is removed
    // with the directory.
    if (status.ok()) status = checkpoint.Read(tensors[tensor].name, Plane::kMaster, offset, out);
    Progress::OfThisThread().Count(static_cast<int64_t>(out.size() * sizeof(float)));
  };
  // What libraries of models look for before they read a file.
  const SafetensorsStyle style = {.dtype = dtype, .metadata = {{"format", "pt"}}};
  const absl::StatusOr<WrittenFile> written =
      WriteSafetensors(file_system, path, tensors, read, style);
  BALLAST_RETURN_IF_ERROR(status);
  return written.status();
}

absl::Status WriteText(FileSystem& file_system, const std::string& path, const std::string& text) {
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, file_system.Create(path));
  BALLAST_RETURN_IF_ERROR(file->Append(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(text.data()), text.size())));
  return file->Close();
}

absl::Status WriteAll(FileSystem& file_system, const std::string& directory,
                      const Checkpoint& checkpoint, const ExportRequest& request,
                      ExportedWeights& exported) {
  BALLAST_RETURN_IF_ERROR(file_system.CreateDirectory(directory));
  const CheckpointIndex& index = checkpoint.index();
  const std::vector<std::vector<int>> files = Divide(index, request);
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  for (size_t number = 0; number < files.size(); ++number) {
    const std::string& name = exported.files.emplace_back(NameOf(number, files.size()));
    BALLAST_RETURN_IF_ERROR(WriteFile(file_system, absl::StrCat(directory, "/", name), checkpoint,
                                      files[number], request.dtype));
    for (const int i : files[number]) {
      map[index.parameters[i].name] = name;
      ++exported.tensors;
      exported.bytes += index.parameters[i].elements * SizeBytes(request.dtype);
    }
  }
  // As Hugging Face's libraries have it: an index only where there are several files.
  if (files.size() == 1) return absl::OkStatus();
  const nlohmann::ordered_json text = {{"metadata", {{"total_size", exported.bytes}}},
                                       {"weight_map", map}};
  return WriteText(file_system, absl::StrCat(directory, "/", kModelFile, ".index.json"),
                   text.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

}  // namespace

absl::StatusOr<ExportedWeights> ExportWeights(FileSystem& file_system,
                                              const ExportRequest& request) {
  const std::string directory = WithoutSlash(request.directory);
  // Before checksums are computed, which takes long.
  BALLAST_RETURN_IF_ERROR(CheckEmpty(file_system, directory));
  BALLAST_ASSIGN_OR_RETURN(
      OpenedCheckpoint opened,
      OpenNewest(file_system, WithoutSlash(request.checkpoint), kMostForeignIndexBytes));
  const CheckpointIndex& index = opened.checkpoint.index();
  for (const CheckpointIndex::Parameter& parameter : index.parameters) {
    Progress::OfThisThread().Expect(parameter.elements * static_cast<int64_t>(sizeof(float)));
  }
  ExportedWeights exported = {.checkpoint = opened.directory,
                              .job = index.job,
                              .step = index.step,
                              .passed_over = std::move(opened.passed_over)};

  // Written beside its place, so that the last rename stays within one file system.
  const std::string partial = PartialPath(directory);
  absl::Status status = WriteAll(file_system, partial, opened.checkpoint, request, exported);
  if (status.ok()) {
    status = file_system.Rename(partial, directory);
    if (absl::IsAlreadyExists(status)) {
      // Somebody has put something there meanwhile.
      const absl::Status there = CheckEmpty(file_system, directory);
      if (!there.ok()) status = there;
    }
    if (status.ok()) return exported;
  }
  file_system.RemoveAll(partial).IgnoreError();
  return status;
}

}  // namespace ballast
