#include "cpu_optimizer_service/state/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/common/system/sha256.h"

namespace ballast {
namespace {

using nlohmann::json;

constexpr char kFormat[] = "ballast-checkpoint";
constexpr int kVersion = 1;
constexpr int64_t kMaxIndexBytes = int64_t{1} << 30;

std::string PathOf(const std::string& directory, Plane plane) {
  const absl::string_view name = Name(plane);
  return absl::StrCat(directory, "/", name, ".safetensors");
}
std::string IndexPath(const std::string& directory) {
  return absl::StrCat(directory, "/index.json");
}

bool HasAmsgrad(const CheckpointIndex& index, const std::string& group) {
  for (const CheckpointIndex::Group& candidate : index.groups) {
    if (candidate.name == group) return candidate.hyper_parameters.amsgrad;
  }
  return false;
}

// SHA-256 over the index without its own checksum, as it is dumped: keys are sorted, numbers read
// back the same.
std::string Digest(json index) {
  index.erase("sha256");
  Sha256 sha256;
  sha256.Add(index.dump(-1, ' ', false, json::error_handler_t::replace));
  return sha256.Hex();
}

// The parameters, by index, that have this plane.
std::vector<int> ParametersWith(const CheckpointIndex& index, Plane plane) {
  std::vector<int> parameters;
  for (int i = 0; i < static_cast<int>(index.parameters.size()); ++i) {
    if (plane != Plane::kMaxExpAvgSq || HasAmsgrad(index, index.parameters[i].group)) {
      parameters.push_back(i);
    }
  }
  return parameters;
}

std::vector<Plane> PlanesOf(const CheckpointIndex& index) {
  std::vector<Plane> planes = {Plane::kMaster, Plane::kExpAvg, Plane::kExpAvgSq};
  for (const CheckpointIndex::Group& group : index.groups) {
    if (group.hyper_parameters.amsgrad) {
      planes.push_back(Plane::kMaxExpAvgSq);
      break;
    }
  }
  return planes;
}

json ToJson(const HyperParameters& values) {
  return {{"lr", values.lr},
          {"beta1", values.beta1},
          {"beta2", values.beta2},
          {"eps", values.eps},
          {"weight_decay", values.weight_decay},
          {"decoupled_weight_decay", values.decoupled_weight_decay},
          {"bias_correction", values.bias_correction},
          {"amsgrad", values.amsgrad},
          {"maximize", values.maximize}};
}

// JSON has no word for what is not finite.
json DoubleToJson(double value) {
  return std::isfinite(value) ? json(value) : json(absl::StrCat(value));
}

double DoubleFromJson(const json& value) {
  double result = 0;
  if (value.is_string() && absl::SimpleAtod(value.get<std::string>(), &result)) return result;
  return value.get<double>();  // Throws for any other string.
}

json ToJson(const std::optional<StepRecord>& record) {
  if (!record.has_value()) return nullptr;
  json groups = json::array();
  for (const HyperParameters& values : record->hyper_parameters) groups.push_back(ToJson(values));
  const StepOutcome& outcome = record->outcome;
  return {{"applied", outcome.decision.apply},
          {"norm", DoubleToJson(outcome.decision.norm)},
          {"clip_coefficient", DoubleToJson(outcome.decision.clip_coefficient)},
          {"skip_reason", outcome.skip_reason},
          {"unused_parameters", outcome.unused_parameters},
          {"micro_steps", record->micro_steps},
          {"loss_scale", record->loss_scale},
          {"hyper_parameters", groups}};
}

json ToJson(const CheckpointIndex& index) {
  json groups = json::array();
  for (const CheckpointIndex::Group& group : index.groups) {
    groups.push_back({{"name", group.name}, {"hyper_parameters", ToJson(group.hyper_parameters)}});
  }
  json parameters = json::array();
  for (const CheckpointIndex::Parameter& parameter : index.parameters) {
    parameters.push_back({{"name", parameter.name},
                          {"shape", parameter.shape},
                          {"group", parameter.group},
                          {"elements", parameter.elements},
                          {"update_count", parameter.update_count}});
  }
  return {{"format", kFormat},
          {"version", kVersion},
          {"job", index.job},
          {"uid", index.uid},
          {"step", index.step},
          {"trainer_state", absl::BytesToHexString(index.trainer_state)},
          {"last_step", ToJson(index.last_step)},
          {"groups", groups},
          {"files", json::object()},
          {"parameters", parameters}};
}

HyperParameters HyperParametersFromJson(const json& values) {
  HyperParameters result;
  values.at("lr").get_to(result.lr);
  values.at("beta1").get_to(result.beta1);
  values.at("beta2").get_to(result.beta2);
  values.at("eps").get_to(result.eps);
  values.at("weight_decay").get_to(result.weight_decay);
  values.at("decoupled_weight_decay").get_to(result.decoupled_weight_decay);
  values.at("bias_correction").get_to(result.bias_correction);
  values.at("amsgrad").get_to(result.amsgrad);
  values.at("maximize").get_to(result.maximize);
  return result;
}

std::optional<StepRecord> RecordFromJson(const json& text, uint64_t step) {
  if (text.is_null()) return std::nullopt;
  StepRecord record;
  record.outcome.step = step;
  text.at("applied").get_to(record.outcome.decision.apply);
  record.outcome.decision.norm = DoubleFromJson(text.at("norm"));
  record.outcome.decision.clip_coefficient = DoubleFromJson(text.at("clip_coefficient"));
  text.at("skip_reason").get_to(record.outcome.skip_reason);
  text.at("unused_parameters").get_to(record.outcome.unused_parameters);
  text.at("micro_steps").get_to(record.micro_steps);
  text.at("loss_scale").get_to(record.loss_scale);
  for (const json& values : text.at("hyper_parameters")) {
    record.hyper_parameters.push_back(HyperParametersFromJson(values));
  }
  return record;
}

bool TrainerStateIsSane(const std::string& hex) {
  return hex.size() % 2 == 0 && hex.size() / 2 <= kMaxTrainerStateBytes &&
         std::all_of(hex.begin(), hex.end(), absl::ascii_isxdigit);
}

bool LastStepIsSane(const CheckpointIndex& index) {
  return !index.last_step.has_value() ||
         (index.last_step->hyper_parameters.size() == index.groups.size() &&
          index.last_step->outcome.unused_parameters.size() <= kRecordedNames);
}

// A count that a run could have reached, or -1.
int64_t Count(const json& value) {
  constexpr uint64_t kMax = uint64_t{1} << 53;
  const bool sane = value.is_number_unsigned() && value.get<uint64_t>() <= kMax;
  return sane ? value.get<int64_t>() : -1;
}

bool CountsAreSane(const CheckpointIndex& index) {
  bool sane = index.step <= uint64_t{1} << 53;
  for (const CheckpointIndex::Parameter& parameter : index.parameters) {
    sane = sane && parameter.elements >= 0 && parameter.update_count >= 0;
  }
  return sane;
}

// Throws json::exception where a field is absent or of another type.
CheckpointIndex IndexFromJson(const json& text) {
  CheckpointIndex index;
  text.at("job").get_to(index.job);
  text.at("uid").get_to(index.uid);
  index.step = static_cast<uint64_t>(Count(text.at("step")));
  index.trainer_state = absl::HexStringToBytes(text.value("trainer_state", ""));
  index.last_step = RecordFromJson(text.value("last_step", json()), index.step);
  for (const json& group : text.at("groups")) {
    index.groups.push_back(
        {.name = group.at("name"),
         .hyper_parameters = HyperParametersFromJson(group.at("hyper_parameters"))});
  }
  for (const json& parameter : text.at("parameters")) {
    index.parameters.push_back({.name = parameter.at("name"),
                                .shape = parameter.at("shape"),
                                .group = parameter.at("group"),
                                .elements = Count(parameter.at("elements")),
                                .update_count = Count(parameter.at("update_count"))});
  }
  return index;
}

absl::StatusOr<json> ReadIndex(FileSystem& file_system, const std::string& directory) {
  const std::string path = IndexPath(directory);
  if (!file_system.Exists(path)) {
    return absl::NotFoundError(
        absl::StrCat("there is no checkpoint in ", directory, ": it has no index.json"));
  }
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<ReadableFile> file, file_system.Open(path));
  if (file->size_bytes() > kMaxIndexBytes) {
    return absl::DataLossError(absl::StrCat(path, " is too large for an index"));
  }
  std::string text(file->size_bytes(), '\0');
  BALLAST_RETURN_IF_ERROR(
      file->Read(0, absl::MakeSpan(reinterpret_cast<std::byte*>(text.data()), text.size())));
  json index = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!index.is_object() || index.value("format", json()) != kFormat) {
    return absl::DataLossError(absl::StrCat(path, " is not the index of a Ballast checkpoint"));
  }
  if (index.value("version", json()) != kVersion) {
    return absl::FailedPreconditionError(absl::StrCat(path, " has format version ",
                                                      index.value("version", json()).dump(),
                                                      ", this service reads ", kVersion));
  }
  if (index.value("sha256", json()) != Digest(index)) {
    return absl::DataLossError(
        absl::StrCat(path, " does not match its own checksum; use another checkpoint"));
  }
  return index;
}

absl::StatusOr<int64_t> WriteInto(FileSystem& file_system, const std::string& directory,
                                  const CheckpointIndex& index, PlaneReader read) {
  BALLAST_RETURN_IF_ERROR(file_system.CreateDirectory(directory));
  json text = ToJson(index);
  int64_t bytes = 0;
  for (const Plane plane : PlanesOf(index)) {
    const std::vector<int> parameters = ParametersWith(index, plane);
    std::vector<TensorEntry> tensors;
    for (const int parameter : parameters) {
      const CheckpointIndex::Parameter& p = index.parameters[parameter];
      tensors.push_back({.name = p.name, .shape = p.shape, .elements = p.elements});
    }
    BALLAST_ASSIGN_OR_RETURN(
        const WrittenFile written,
        WriteSafetensors(file_system, PathOf(directory, plane), tensors,
                         [&](int tensor, int64_t offset, absl::Span<float> out) {
                           read(parameters[tensor], plane, offset, out);
                         }));
    bytes += written.size_bytes;
    text["files"][std::string(Name(plane))] = {{"size_bytes", written.size_bytes},
                                               {"sha256", written.sha256}};
  }
  text["sha256"] = Digest(text);
  const std::string dump = text.dump(1, ' ', false, json::error_handler_t::replace);
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file,
                           file_system.Create(IndexPath(directory)));
  BALLAST_RETURN_IF_ERROR(file->Append(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(dump.data()), dump.size())));
  BALLAST_RETURN_IF_ERROR(file->Close());
  return bytes + static_cast<int64_t>(dump.size());
}

}  // namespace

absl::StatusOr<int64_t> WriteCheckpoint(FileSystem& file_system, const std::string& directory,
                                        const CheckpointIndex& index, PlaneReader read) {
  if (directory.empty() || directory.back() == '/') {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", directory, "' cannot be a checkpoint directory; name one without a final /"));
  }
  if (file_system.Exists(directory)) {
    if (absl::Status status = ReadIndex(file_system, directory).status(); !status.ok()) {
      return absl::FailedPreconditionError(absl::StrCat(
          directory, " exists and is not a checkpoint; choose another directory or remove it"));
    }
  }
  // Random: another process, even one of the same number in another container, may have left its
  // own.
  std::random_device random;
  const std::string partial = absl::StrFormat("%s.partial-%08x%08x", directory, random(), random());
  absl::StatusOr<int64_t> bytes = WriteInto(file_system, partial, index, read);
  absl::Status status = bytes.status();
  if (status.ok()) status = file_system.Exchange(partial, directory);
  // After an exchange `partial` is the older checkpoint; after an error, half of this one.
  const absl::Status removed = file_system.RemoveAll(partial);
  BALLAST_RETURN_IF_ERROR(status);
  BALLAST_RETURN_IF_ERROR(removed);
  return bytes;
}

absl::StatusOr<Checkpoint> Checkpoint::Open(FileSystem& file_system, const std::string& directory) {
  BALLAST_ASSIGN_OR_RETURN(const json text, ReadIndex(file_system, directory));
  Checkpoint checkpoint;
  absl::flat_hash_map<std::string, std::string> sha256;
  try {
    checkpoint.index_ = IndexFromJson(text);
    for (const Plane plane : PlanesOf(checkpoint.index_)) {
      const std::string name(Name(plane));
      sha256[name] = text.at("files").at(name).at("sha256");
    }
  } catch (const json::exception& error) {
    return absl::DataLossError(absl::StrCat(IndexPath(directory), " is damaged: ", error.what()));
  }
  if (!CountsAreSane(checkpoint.index_)) {
    return absl::DataLossError(
        absl::StrCat(IndexPath(directory), " is damaged: a count is negative or absurd"));
  }
  if (!LastStepIsSane(checkpoint.index_) || !TrainerStateIsSane(text.value("trainer_state", ""))) {
    return absl::DataLossError(absl::StrCat(
        IndexPath(directory), " is damaged: what it says of its last step is not what one leaves"));
  }
  for (const CheckpointIndex::Group& group : checkpoint.index_.groups) {
    BALLAST_RETURN_IF_ERROR(Annotate(Validate(group.hyper_parameters),
                                     absl::StrCat(IndexPath(directory), ", group ", group.name)));
  }
  for (const Plane plane : PlanesOf(checkpoint.index_)) {
    const std::string path = PathOf(directory, plane);
    BALLAST_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(file_system, path));
    BALLAST_ASSIGN_OR_RETURN(const std::string found, file.Sha256());
    if (found != sha256[std::string(Name(plane))]) {
      return absl::DataLossError(
          absl::StrCat(path, " does not match the checksum in index.json; use another checkpoint"));
    }
    for (const int parameter : ParametersWith(checkpoint.index_, plane)) {
      const CheckpointIndex::Parameter& p = checkpoint.index_.parameters[parameter];
      const TensorEntry* entry = file.Find(p.name);
      if (entry == nullptr || entry->shape != p.shape || entry->elements != p.elements) {
        return absl::DataLossError(
            absl::StrCat(path, " does not hold ", p.name, " as index.json describes it"));
      }
    }
    checkpoint.files_.emplace(plane, std::move(file));
  }
  return checkpoint;
}

absl::Status Checkpoint::Read(const std::string& parameter, Plane plane, int64_t offset,
                              absl::Span<float> out) const {
  return files_.at(plane).Read(parameter, offset, out);
}

}  // namespace ballast
