// Weights of others as a checkpoint.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/sha256.h"
#include "cpu_optimizer_service/common/text/activity.h"
#include "cpu_optimizer_service/state/checkpoint.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"
#include "cpu_optimizer_service/state/safetensors.h"

namespace ballast {
namespace {

using nlohmann::json;

// 1 MiB of floats.
constexpr int64_t kPieceElements = 1 << 18;

absl::StatusOr<std::string> ReadText(FileSystem& file_system, const std::string& path) {
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<ReadableFile> file, file_system.Open(path));
  if (file->size_bytes() > kMostForeignIndexBytes) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " has ", file->size_bytes(), " bytes, which is no index of weights"));
  }
  std::string text(file->size_bytes(), '\0');
  BALLAST_RETURN_IF_ERROR(
      file->Read(0, absl::MakeSpan(reinterpret_cast<std::byte*>(text.data()), text.size())));
  return text;
}

// The files that hold the weights.
absl::StatusOr<std::vector<std::string>> FilesOf(FileSystem& file_system, const std::string& path) {
  if (absl::EndsWith(path, ".safetensors")) return std::vector<std::string>{path};
  const std::string one = absl::StrCat(path, "/", kModelFile);
  const std::string index = absl::StrCat(one, ".index.json");
  // Where there is an index, it says which files count, also where model.safetensors lies beside
  // it.
  if (!file_system.Exists(index)) {
    if (file_system.Exists(one)) return std::vector<std::string>{one};
    return absl::NotFoundError(absl::StrCat("there is no ", kModelFile, " in ", path,
                                            "; name a directory of Hugging Face's, or the file"));
  }
  BALLAST_ASSIGN_OR_RETURN(const std::string text, ReadText(file_system, index));
  const json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const json map = parsed.is_object() ? parsed.value("weight_map", json()) : json();
  std::set<std::string> names;
  for (const auto& [tensor, file] : map.items()) {
    // The index comes from others. A name with a slash could lead out of the directory.
    if (!file.is_string() || file.get<std::string>().find('/') != std::string::npos) {
      return absl::DataLossError(absl::StrCat(index, " is damaged: ", tensor, " has no file"));
    }
    names.insert(absl::StrCat(path, "/", file.get<std::string>()));
  }
  if (!map.is_object() || names.empty()) {
    return absl::DataLossError(absl::StrCat(index, " is damaged: it has no weight_map"));
  }
  return std::vector<std::string>(names.begin(), names.end());
}

absl::Status CheckFinite(const SafetensorsFile& file, const std::string& path,
                         const CheckpointIndex::Parameter& parameter, Sha256* hash) {
  std::vector<float> values(std::min(kPieceElements, parameter.elements));
  for (int64_t offset = 0; offset < parameter.elements; offset += kPieceElements) {
    const auto piece =
        absl::MakeSpan(values).first(std::min(kPieceElements, parameter.elements - offset));
    BALLAST_RETURN_IF_ERROR(file.Read(parameter.name, offset, piece));
    Progress::OfThisThread().Count(static_cast<int64_t>(piece.size() * sizeof(float)));
    if (hash != nullptr)
      hash->Add(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(piece.data()),
                                    piece.size() * sizeof(float)));
    // There are no checksums of weights of others, so this is the damage that can be seen.
    const auto bad = std::find_if_not(piece.begin(), piece.end(),
                                      [](float value) { return std::isfinite(value); });
    if (bad == piece.end()) continue;
    return absl::DataLossError(absl::StrCat(path, ": ", parameter.name, " is ", *bad,
                                            " at element ", offset + (bad - piece.begin())));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::OpenWeights(FileSystem& file_system, const std::string& path,
                                                   CheckpointIndex index, int64_t most_bytes,
                                                   bool hashes) {
  // Names of others are not bounded by this job's, and their files are the operator's.
  most_bytes = std::max(most_bytes, kMostForeignIndexBytes);
  BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> paths, FilesOf(file_system, path));
  Checkpoint checkpoint;
  checkpoint.weights_ = true;
  PlaneFiles& masters = checkpoint.planes_[Plane::kMaster];
  for (const std::string& file : paths) {
    BALLAST_ASSIGN_OR_RETURN(
        masters.files.emplace_back(),
        SafetensorsFile::Open(file_system, file, most_bytes, SafetensorsFile::Take::kWeights));
  }
  for (const CheckpointIndex::Parameter& parameter : index.parameters) {
    Progress::OfThisThread().Expect(parameter.elements * static_cast<int64_t>(sizeof(float)));
  }
  Sha256 hash;
  for (const CheckpointIndex::Parameter& parameter : index.parameters) {
    const TensorEntry* entry = nullptr;
    int number = 0;
    for (; number < static_cast<int>(masters.files.size()) && entry == nullptr; ++number) {
      entry = masters.files[number].Find(parameter.name);
    }
    if (entry == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, " has no fp32, bf16 or fp16 weights of ", parameter.name,
                       "; give the job's parameters the names in that file"));
    }
    if (entry->shape != parameter.shape) {
      return absl::FailedPreconditionError(
          absl::StrCat(parameter.name, " has shape [", absl::StrJoin(entry->shape, ", "), "] in ",
                       path, " and [", absl::StrJoin(parameter.shape, ", "), "] in the job"));
    }
    // The loop has gone one beyond the file that has the tensor.
    masters.pieces[parameter.name] = {{.elements = parameter.elements, .file = number - 1}};
    BALLAST_RETURN_IF_ERROR(CheckFinite(masters.files[number - 1], paths[number - 1], parameter,
                                        hashes ? &hash : nullptr));
  }
  if (hashes) index.sha256 = hash.Hex();
  checkpoint.index_ = std::move(index);
  return checkpoint;
}

}  // namespace ballast
