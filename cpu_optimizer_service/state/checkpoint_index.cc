#include "cpu_optimizer_service/state/checkpoint_index.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/common/system/sha256.h"

namespace ballast {
namespace {

using nlohmann::json;

constexpr char kFormat[] = "ballast-checkpoint";
constexpr char kSuffix[] = ".safetensors";
// Of all that ToJson writes.
constexpr int kVersion = 1;

StoredPlanes PlanesOf(const CheckpointIndex& index, const CheckpointIndex::Parameter& parameter) {
  const CheckpointIndex::Group* const group = index.FindGroup(parameter.group);
  if (group == nullptr) return {};
  return StoredPlanesOf(PlanesOf(group->hyper_parameters), parameter.format);
}

TensorType TypeOf(StateFormat format, Plane stored) {
  if (format == StateFormat::kFloat32 || IsScale(stored)) return TensorType::kF32;
  if (stored == Plane::kMasterRemainder) return TensorType::kI16;
  if (stored == Plane::kMaster || format == StateFormat::kBFloat16) return TensorType::kBF16;
  return stored == Plane::kExpAvg ? TensorType::kI8 : TensorType::kU8;
}

// SHA-256 over the index without its own checksum, as it is dumped: keys are sorted, numbers read
// back the same.
std::string Digest(json index) {
  // Names are any bytes, and dump would throw at what is no UTF-8. ToText replaces it in the same
  // way, so what is read back has the same digest.
  index.erase("sha256");
  Sha256 sha256;
  sha256.Add(index.dump(-1, ' ', false, json::error_handler_t::replace));
  return sha256.Hex();
}

json ToJson(const HyperParameters& values) {
  json result = {{"rule", RowOf(values.rule).name}};
  ForEachOf(
      values.rule, [&](const char* name, auto value) { result[name] = value; }, values);
  return result;
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
          {"multipliers", outcome.decision.multipliers},
          {"voted",
           {{"abandon", record->abandoned},
            {"max_norm", record->voted.max_norm},
            {"multipliers", record->voted.multipliers}}},
          {"skip_reason", outcome.skip_reason},
          {"left", outcome.left},
          {"unused_parameters", outcome.unused_parameters},
          {"micro_steps", record->micro_steps},
          {"loss_scale", record->loss_scale},
          {"hyper_parameters", groups}};
}

// Before there were others, it was not written.
std::string RuleIn(const json& values) { return values.value("rule", "adam"); }

HyperParameters HyperParametersFromJson(const json& values) {
  const std::optional<Rule> rule = FindRule(RuleIn(values));
  if (!rule.has_value()) throw json::other_error::create(501, "unknown rule", nullptr);
  HyperParameters result = DefaultsOf(*rule);
  ForEachOf(
      *rule, [&](const char* name, auto& value) { values.at(name).get_to(value); }, result);
  return result;
}

std::optional<StepRecord> RecordFromJson(const json& text, uint64_t step) {
  if (text.is_null()) return std::nullopt;
  StepRecord record;
  // A record is of the step that the checkpoint is at, which stands once in the index.
  record.outcome.step = step;
  text.at("applied").get_to(record.outcome.decision.apply);
  record.outcome.decision.norm = DoubleFromJson(text.at("norm"));
  record.outcome.decision.clip_coefficient = DoubleFromJson(text.at("clip_coefficient"));
  text.at("multipliers").get_to(record.outcome.decision.multipliers);
  const json& voted = text.at("voted");
  voted.at("abandon").get_to(record.abandoned);
  voted.at("max_norm").get_to(record.voted.max_norm);
  voted.at("multipliers").get_to(record.voted.multipliers);
  text.at("skip_reason").get_to(record.outcome.skip_reason);
  text.at("left").get_to(record.outcome.left);
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
  if (!index.last_step.has_value()) return true;
  const StepRecord& last = *index.last_step;
  const std::vector<float>& multipliers = last.outcome.decision.multipliers;
  return last.hyper_parameters.size() == index.groups.size() &&
         // Skipped steps have none.
         (multipliers.empty() || multipliers.size() == index.groups.size()) &&
         Validate(last.voted, static_cast<int>(index.groups.size())).ok() &&
         last.outcome.unused_parameters.size() <= kRecordedNames;
}

// A count that a run could have reached, or -1.
int64_t Count(const json& value) {
  // Up to there every program reads the same integer, also one whose numbers are doubles (RFC 8259,
  // section 6).
  constexpr uint64_t kMax = uint64_t{1} << 53;
  const bool sane = value.is_number_unsigned() && value.get<uint64_t>() <= kMax;
  return sane ? value.get<int64_t>() : -1;
}

// Whether it has as many elements as its shape says.
bool FitsItsShape(const CheckpointIndex::Parameter& parameter) {
  int64_t elements = 1;
  for (const int64_t size : parameter.shape) {
    if (size < 0 || __builtin_mul_overflow(elements, size, &elements)) return false;
  }
  return elements == parameter.elements;
}

bool CountsAreSane(const CheckpointIndex& index) {
  // Count's -1, as an unsigned number, is above every bound.
  bool sane = index.step <= kMaxFirstStep;  // What a job may begin at.
  for (const CheckpointIndex::Parameter& parameter : index.parameters) {
    sane = sane && FitsItsShape(parameter) && parameter.update_count >= 0;
  }
  for (const CheckpointIndex::File& file : index.files) {
    sane = sane && file.written.size_bytes >= 0 && IsFileOf(file.plane, file.name);
  }
  return sane;
}

json ToJson(const ElementRuns& runs) {
  json result = json::array();
  for (const ElementRun& run : runs.runs()) {
    result.push_back({run.begin, run.elements, run.count, run.stride});
  }
  return result;
}

// Those of an absurd cut are empty, which no tensor of the file is.
ElementRuns RunsFromJson(const json& text) {
  std::vector<ElementRun> runs;
  for (const json& run : text) {
    runs.push_back({.begin = Count(run.at(0)),
                    .elements = Count(run.at(1)),
                    .count = Count(run.at(2)),
                    .stride = Count(run.at(3))});
  }
  ElementRuns read;
  return read.Read(runs) ? read : ElementRuns();
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
    if (parameter.format == StateFormat::kFloat32) continue;
    parameters.back()["state"] = Name(parameter.format);
  }
  json files = json::array();
  int64_t size_bytes = 0;
  for (const CheckpointIndex::File& file : index.files) {
    files.push_back({{"plane", Name(file.plane)},
                     {"name", file.name},
                     {"size_bytes", file.written.size_bytes},
                     {"crc32", file.written.crc32}});
    for (const auto& [parameter, runs] : file.cut) files.back()["cut"][parameter] = ToJson(runs);
    size_bytes += file.written.size_bytes;
  }
  return {{"format", kFormat},
          {"version", kVersion},
          {"job", index.job},
          {"uid", index.uid},
          {"step", index.step},
          {"epoch", index.epoch},
          {"generation", index.generation},
          {"saved_unix_ms", index.saved_unix_ms},
          {"size_bytes", size_bytes},
          {"asked_for", index.asked_for},
          {"trainer_state", absl::BytesToHexString(index.trainer_state)},
          {"last_step", ToJson(index.last_step)},
          {"groups", groups},
          {"files", files},
          {"parameters", parameters}};
}

// Throws json::exception where a field is absent or of another type.
std::vector<CheckpointIndex::File> FilesFromJson(const json& text, absl::Span<const Plane> planes) {
  std::vector<CheckpointIndex::File> files;
  for (const Plane plane : planes) {
    for (const json& file : text) {
      if (file.at("plane").get<std::string>() != Name(plane)) continue;
      files.push_back(
          {.plane = plane,
           .name = file.at("name"),
           .written = {.size_bytes = Count(file.at("size_bytes")), .crc32 = file.at("crc32")}});
      if (!file.contains("cut")) continue;
      for (const auto& [parameter, runs] : file.at("cut").items()) {
        files.back().cut[parameter] = RunsFromJson(runs);
      }
    }
  }
  return files;
}

// Throws json::exception where a field is absent or of another type.
CheckpointIndex IndexFromJson(const json& text) {
  CheckpointIndex index;
  text.at("job").get_to(index.job);
  text.at("uid").get_to(index.uid);
  index.step = static_cast<uint64_t>(Count(text.at("step")));
  text.at("epoch").get_to(index.epoch);
  text.at("generation").get_to(index.generation);
  text.at("saved_unix_ms").get_to(index.saved_unix_ms);
  text.at("asked_for").get_to(index.asked_for);
  // ReadIndex looks at the text itself whether it is hexadecimal.
  index.trainer_state = absl::HexStringToBytes(text.at("trainer_state").get<std::string>());
  index.last_step = RecordFromJson(text.at("last_step"), index.step);
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
    if (!parameter.contains("state")) continue;
    index.parameters.back().format =  // CheckRules has looked.
        FindStateFormat(parameter.at("state").get<std::string>()).value();
  }
  index.files = FilesFromJson(text.at("files"), PlanesOf(index));
  index.sha256 = text.at("sha256");
  return index;
}

absl::StatusOr<std::string> ReadText(FileSystem& file_system, const std::string& directory,
                                     int64_t most_bytes) {
  const std::string path = IndexPath(directory);
  const absl::StatusOr<std::unique_ptr<ReadableFile>> file = file_system.Open(path);
  if (absl::IsNotFound(file.status())) {
    return absl::NotFoundError(
        absl::StrCat("there is no checkpoint in ", directory, ": it has no index.json"));
  }
  BALLAST_RETURN_IF_ERROR(file.status());
  if ((*file)->size_bytes() > most_bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " has ", (*file)->size_bytes(), " bytes, expected at most ", most_bytes,
                     ": it belongs to another job, or is not an index"));
  }
  std::string text((*file)->size_bytes(), '\0');
  BALLAST_RETURN_IF_ERROR(
      (*file)->Read(0, absl::MakeSpan(reinterpret_cast<std::byte*>(text.data()), text.size())));
  return text;
}

absl::Status CheckFormat(const json& index, const std::string& path) {
  if (!index.is_object() || index.value("format", json()) != kFormat) {
    return absl::DataLossError(absl::StrCat(path, " is not the index of a Ballast checkpoint"));
  }
  const json version = index.value("version", json());
  // Not damage, so that OpenNewest does not pass over it: to go on from an older checkpoint is
  // somebody's choice.
  if (version != kVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " has format version ", version.dump(), ", but this service reads ",
                     kVersion, "; load it with a newer ballastd, or name an older checkpoint"));
  }
  return absl::OkStatus();
}

// The groups have rules that this service knows. A rule of a newer one is no damage, as a newer
// format is none. Throws json::exception where a field is absent or of another type.
absl::Status CheckRules(const json& index, const std::string& path) {
  for (const json& parameter : index.at("parameters")) {
    const std::string state = parameter.value("state", std::string(Name(StateFormat::kFloat32)));
    if (FindStateFormat(state).has_value()) continue;
    return absl::FailedPreconditionError(absl::StrCat(path, " has state in the format ", state,
                                                      ", but this service knows fp32, bf16 and 8bit"
                                                      "; load it with a newer ballastd"));
  }
  for (const json& group : index.at("groups")) {
    const std::string rule = RuleIn(group.at("hyper_parameters"));
    if (FindRule(rule).has_value()) continue;
    return absl::FailedPreconditionError(absl::StrCat(path, " has a group with the rule ", rule,
                                                      ", but this service knows ", RuleNames(),
                                                      "; load it with a newer ballastd"));
  }
  return absl::OkStatus();
}

// Each group is there once, and so is that of each parameter.
bool GroupsAreSane(const CheckpointIndex& index) {
  std::set<absl::string_view> names;
  for (const CheckpointIndex::Group& group : index.groups) {
    if (!names.insert(group.name).second) return false;
  }
  return std::ranges::all_of(index.parameters, [&](const CheckpointIndex::Parameter& parameter) {
    const CheckpointIndex::Group* const group = index.FindGroup(parameter.group);
    return group != nullptr && CheckStateFormat(group->hyper_parameters, parameter.format).ok();
  });
}

}  // namespace

const CheckpointIndex::Group* CheckpointIndex::FindGroup(absl::string_view name) const {
  const auto found = std::ranges::find(groups, name, &Group::name);
  return found == groups.end() ? nullptr : &*found;
}

std::string IndexPath(const std::string& directory) {
  return absl::StrCat(directory, "/index.json");
}

bool IsFileOf(Plane plane, absl::string_view name) {
  return static_cast<int>(plane) < kStoredPlaneKinds && absl::ConsumePrefix(&name, Name(plane)) &&
         absl::ConsumeSuffix(&name, kSuffix) && (name.empty() || name.front() == '-') &&
         name.find('/') == name.npos;
}

// The parameters, by index, that have this plane.
std::vector<int> ParametersWith(const CheckpointIndex& index, Plane plane) {
  std::vector<int> parameters;
  for (int i = 0; i < static_cast<int>(index.parameters.size()); ++i) {
    if (std::ranges::count(PlanesOf(index, index.parameters[i]), plane) > 0) {
      parameters.push_back(i);
    }
  }
  return parameters;
}

std::vector<Plane> PlanesOf(const CheckpointIndex& index) {
  std::set<Plane> planes = {Plane::kMaster};
  for (const CheckpointIndex::Group& group : index.groups) {
    const PlaneList of_group = PlanesOf(group.hyper_parameters);
    planes.insert(of_group.begin(), of_group.end());
  }
  for (const CheckpointIndex::Parameter& parameter : index.parameters) {
    if (parameter.format == StateFormat::kFloat32) continue;  // Its group has those.
    const StoredPlanes stored = PlanesOf(index, parameter);
    planes.insert(stored.begin(), stored.end());
  }
  return {planes.begin(), planes.end()};
}

TensorEntry TensorOf(const CheckpointIndex::Parameter& parameter, Plane plane) {
  const int64_t count = StoredCount(plane, parameter.elements);
  return {.name = parameter.name,
          .shape = IsScale(plane) ? std::vector<int64_t>{count} : parameter.shape,
          .elements = count,
          .type = TypeOf(parameter.format, plane)};
}

std::vector<CheckpointPart> PartsOf(const CheckpointIndex& index, int64_t most_bytes,
                                    const CheckpointShare* share) {
  std::vector<CheckpointPart> parts;
  const std::string of_member =
      share != nullptr ? absl::StrCat("-member-", share->member) : std::string();
  for (const Plane plane : PlanesOf(index)) {
    // A plane has one file at least, also where it has no parameter.
    const size_t first = parts.size();
    parts.push_back({.plane = plane});
    for (const int parameter : ParametersWith(index, plane)) {
      const int64_t elements = share != nullptr ? share->held[parameter].elements()
                                                : index.parameters[parameter].elements;
      if (elements == 0 && share != nullptr) continue;
      if (parts.back().bytes >= most_bytes) parts.push_back({.plane = plane});
      parts.back().parameters.push_back(parameter);
      parts.back().bytes += StoredBytes(index.parameters[parameter].format, plane, elements);
    }
    // Of wider elements first, as WriteTensors wants them.
    for (size_t i = first; i < parts.size(); ++i) {
      std::ranges::stable_sort(parts[i].parameters, [&](int a, int b) {
        return index.parameters[a].format < index.parameters[b].format;
      });
    }
    const size_t count = parts.size() - first;
    for (size_t i = 0; i < count; ++i) {
      parts[first + i].name =
          count == 1 ? absl::StrCat(Name(plane), of_member, kSuffix)
                     : absl::StrCat(Name(plane), of_member, "-", absl::Dec(i + 1, absl::kZeroPad5),
                                    "-of-", absl::Dec(count, absl::kZeroPad5), kSuffix);
    }
  }
  return parts;
}

int64_t MostIndexBytes(const JobSpec& spec) {
  constexpr int64_t kEscaped = 6;  // JSON writes a byte in up to as many.
  // With a file of its own in each plane, and 64 runs in each, where members hold parts of it.
  constexpr int64_t kOfParameter = 1920 + int64_t{6} * 64 * 64;
  constexpr int64_t kOfDimension = 24;
  constexpr int64_t kOfGroup = 2048;  // Its hyper-parameters, twice.
  constexpr int64_t kOthers = int64_t{2} << 20;
  int64_t longest = 0;
  int64_t bytes = kOthers;
  for (const GroupSpec& group : spec.groups) {
    bytes += kOfGroup + kEscaped * static_cast<int64_t>(group.name.size());
  }
  for (const ParameterSpec& parameter : spec.layout.parameters) {
    const auto name = static_cast<int64_t>(parameter.name.size());
    longest = std::max(longest, name);
    bytes += kOfParameter + kEscaped * name +
             kOfDimension * static_cast<int64_t>(parameter.shape.size());
    if (parameter.group >= 0 && parameter.group < static_cast<int>(spec.groups.size())) {
      bytes += kEscaped * static_cast<int64_t>(spec.groups[parameter.group].name.size());
    }
  }
  // The record of the last step has names of unused parameters, and its reason may have one more.
  return bytes + static_cast<int64_t>(kRecordedNames + 1) * kEscaped * longest;
}

std::string ToText(const CheckpointIndex& index) {
  json text = ToJson(index);
  text["sha256"] = Digest(text);
  return text.dump(1, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<CheckpointIndex> ReadIndex(FileSystem& file_system, const std::string& directory,
                                          int64_t most_bytes) {
  BALLAST_ASSIGN_OR_RETURN(const std::string text, ReadText(file_system, directory, most_bytes));
  const std::string path = IndexPath(directory);
  const json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  // Before the digest, which a newer format may compute in another way.
  BALLAST_RETURN_IF_ERROR(CheckFormat(parsed, path));
  if (parsed.value("sha256", json()) != Digest(parsed)) {
    return absl::DataLossError(
        absl::StrCat(path, " does not match its own checksum; use another checkpoint"));
  }
  CheckpointIndex index;
  // Fields are taken without a look at each: json throws where one is absent or of another type.
  try {
    BALLAST_RETURN_IF_ERROR(CheckRules(parsed, path));
    index = IndexFromJson(parsed);
    if (!LastStepIsSane(index) || !TrainerStateIsSane(parsed.value("trainer_state", ""))) {
      return absl::DataLossError(
          absl::StrCat(path, " is damaged: what it says of its last step is not what one leaves"));
    }
  } catch (const json::exception&) {
    return absl::DataLossError(
        absl::StrCat(path, " is damaged: a field is absent or of another kind"));
  }
  if (!CountsAreSane(index)) {
    return absl::DataLossError(absl::StrCat(path, " is damaged: a count is negative or absurd"));
  }
  if (!GroupsAreSane(index)) {
    return absl::DataLossError(
        absl::StrCat(path, " is damaged: it lists a group twice, or not the group of a parameter"));
  }
  // A load makes these the job's, so they must be such as a new job may have.
  for (const CheckpointIndex::Group& group : index.groups) {
    BALLAST_RETURN_IF_ERROR(
        Annotate(Validate(group.hyper_parameters), absl::StrCat(path, ", group ", group.name)));
  }
  return index;
}

absl::StatusOr<CheckpointFacts> ReadCheckpointFacts(FileSystem& file_system,
                                                    const std::string& directory,
                                                    int64_t most_bytes) {
  BALLAST_ASSIGN_OR_RETURN(const std::string text, ReadText(file_system, directory, most_bytes));
  const std::string path = IndexPath(directory);
  // Lists and objects within the index, which are nearly all of it, are not kept.
  const json::parser_callback_t keep = [](int depth, json::parse_event_t event, json&) {
    const bool begins =
        event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
    return !begins || depth == 0;
  };
  const json parsed = json::parse(text, keep, /*allow_exceptions=*/false);
  BALLAST_RETURN_IF_ERROR(CheckFormat(parsed, path));
  const json job = parsed.value("job", json());
  const json uid = parsed.value("uid", json());
  const int64_t step = Count(parsed.value("step", json()));
  if (!job.is_string() || !uid.is_string() || step < 0) {
    return absl::DataLossError(absl::StrCat(path, " is damaged: it does not say whose it is"));
  }
  // 0 where it is absent or no count, so that one odd number hides no checkpoint from a list. A
  // load reads the index in full, and refuses it.
  const auto number = [&](const char* name) {
    const json value = parsed.value(name, json());
    return value.is_number_unsigned() ? std::max<int64_t>(Count(value), 0) : 0;
  };
  const json asked_for = parsed.value("asked_for", json());
  return CheckpointFacts{.directory = directory,
                         .job = job,
                         .uid = uid,
                         .step = static_cast<uint64_t>(step),
                         .epoch = static_cast<uint64_t>(number("epoch")),
                         .generation = static_cast<uint64_t>(number("generation")),
                         .saved_unix_ms = number("saved_unix_ms"),
                         .size_bytes = number("size_bytes"),
                         .asked_for = asked_for.is_boolean() && asked_for.get<bool>()};
}

}  // namespace ballast
