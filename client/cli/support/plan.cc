#include "client/cli/support/plan.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cli/cli_print.h"
#include "client/cli/cli_text.h"
#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/plan/memory_need.h"
#include "cpu_optimizer_service/common/rank_memory_layout.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::client::cli {
namespace {

// A size alone does not say which parameters there are: as large as a large matrix.
constexpr int64_t kParameterElements = int64_t{1} << 24;
constexpr int64_t kPlannedColumns = int64_t{1} << 12;  // Of a rule that takes matrices alone.
constexpr int64_t kBucketElements = int64_t{1} << 22;
constexpr size_t kMostFileBytes = size_t{32} << 20;  // As a service takes.

// "7B", "350M", "1.5T"; nullopt: none.
std::optional<int64_t> ParseCount(absl::string_view text) {
  // The empty suffix comes last, since every text ends with it.
  constexpr std::pair<const char*, double> kUnits[] = {
      {"K", 1e3}, {"M", 1e6}, {"B", 1e9}, {"T", 1e12}, {"", 1}};
  for (const auto& [suffix, unit] : kUnits) {
    absl::string_view number = text;
    double value = 0;
    if (!absl::ConsumeSuffix(&number, suffix) || !absl::SimpleAtod(number, &value)) continue;
    // Written so that NaN is refused. 1e15 is far below what llround can return.
    if (!(value > 0) || !(value * unit < 1e15)) return std::nullopt;
    return std::llround(value * unit);
  }
  return std::nullopt;
}

absl::StatusOr<DType> ParseDType(absl::string_view text) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    if (text == Name(dtype)) return dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "' is none of bf16, fp16, fp32, ", RuleNames()));
}

// nullopt: `text` is no size.
absl::StatusOr<std::optional<JobSpec>> FromSize(const std::string& text) {
  const std::vector<std::string> words = absl::StrSplit(text, ':');
  const std::optional<int64_t> count = ParseCount(words[0]);
  if (!count.has_value()) return std::nullopt;
  if (*count > kMaxChunks * kMaxChunkElements) {
    return absl::InvalidArgumentError(absl::StrCat(
        text, " is more than a job may have: ", kMaxChunks * kMaxChunkElements, " elements"));
  }
  JobSpec spec;
  spec.name = "plan";
  GroupSpec& group = spec.groups.emplace_back();
  group.name = "all";
  for (size_t i = 1; i < words.size(); ++i) {
    HyperParameters& values = group.hyper_parameters;
    if (const std::optional<Rule> rule = FindRule(words[i]); rule.has_value()) {
      values = DefaultsOf(*rule);
      continue;
    }
    if (words[i] == "amsgrad" && values.rule == Rule::kAdam) {
      values.amsgrad = true;
      continue;
    }
    if (words[i] == "momentum" && values.rule == Rule::kSgd) {
      values.momentum = 0.9;  // Any above 0: it has a plane.
      continue;
    }
    if (absl::string_view name = words[i]; absl::ConsumePrefix(&name, "state=")) {
      const std::optional<StateFormat> format = FindStateFormat(name);
      if (!format.has_value()) {
        return absl::InvalidArgumentError(
            absl::StrCat("'", text, "' has state '", name, "'; expected fp32, bf16 or 8bit"));
      }
      spec.layout.states = {{.format = *format}};
      // Any that it may have: the sizes are the same.
      if (*format == StateFormat::kBFloat16) values.beta2 = 0.95;
      continue;
    }
    // A size names one format, which counts for both ways.
    BALLAST_ASSIGN_OR_RETURN(group.wire_dtype, ParseDType(words[i]));
    group.return_dtype = group.wire_dtype;
  }
  spec.layout.group_count = 1;
  const auto add = [&](std::vector<int64_t> shape) {
    spec.layout.parameters.push_back(
        {.name = absl::StrCat("p", spec.layout.parameters.size()), .shape = std::move(shape)});
  };
  const bool are_matrices = HasTwoRounds(group.hyper_parameters.rule) || spec.layout.is_packed(0);
  for (int64_t begin = 0; begin < *count; begin += kParameterElements) {
    const int64_t elements = std::min(kParameterElements, *count - begin);
    if (!are_matrices) {
      add({elements});
      continue;
    }
    if (elements >= kPlannedColumns) add({elements / kPlannedColumns, kPlannedColumns});
    if (elements % kPlannedColumns > 0) add({1, elements % kPlannedColumns});
  }
  return spec;
}

// `said` is Protobuf's: "(PLACE) FIELD: why", where the text is JSON.
absl::Status NoJobError(const std::string& path, const std::string& text, const std::string& said) {
  // A second parser tells the two cases apart: text that is no JSON, and JSON that is no job.
  try {
    (void)nlohmann::json::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    const auto end = text.begin() + static_cast<std::ptrdiff_t>(std::min(error.byte, text.size()));
    return absl::InvalidArgumentError(absl::StrCat(path, " is not JSON from line ",
                                                   1 + std::count(text.begin(), end, '\n'),
                                                   " on; correct it there"));
  }
  const std::string place =
      absl::StrReplaceAll(said.substr(0, said.find(':')), {{"(", ""}, {") ", "."}, {")", ""}});
  return absl::InvalidArgumentError(absl::StrCat(
      path, " is not a ballast.v1.Job in JSON: the field ", absl::Utf8SafeCEscape(place),
      " is unknown, or its value has the wrong type; see jobs.proto"));
}

absl::StatusOr<JobSpec> FromFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return absl::NotFoundError(
        absl::StrCat("'", path, "' is neither a size such as 7B:bf16 nor a file that can be read"));
  }
  // One byte more than a file may have shows that it has too many.
  std::string text(kMostFileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMostFileBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, " has more than 32 MiB"));
  }
  v1::Job message;
  const auto parsed = google::protobuf::util::JsonStringToMessage(text, &message);
  if (!parsed.ok()) return NoJobError(path, text, std::string(parsed.message()));
  if (message.name().empty()) message.set_name("jobs/plan");
  if (message.world_size() == 0) message.set_world_size(1);
  if (message.groups().empty()) message.add_groups()->set_name("all");
  // The file's values over the defaults: FullFromProto wants every field.
  for (v1::ParamGroup& group : *message.mutable_groups()) {
    BALLAST_ASSIGN_OR_RETURN(const Rule rule, proto::FromProto(group.hyper_parameters().rule()));
    v1::HyperParameters values = proto::ToProto(DefaultsOf(rule));
    values.MergeFrom(group.hyper_parameters());
    *group.mutable_hyper_parameters() = std::move(values);
  }
  absl::StatusOr<JobSpec> spec = proto::FromProto(message);
  return spec.ok() ? spec : Annotate(spec.status(), path);
}

}  // namespace

absl::StatusOr<JobSpec> ReadPlanSpec(const std::string& text, int world_size,
                                     int default_world_size) {
  BALLAST_ASSIGN_OR_RETURN(std::optional<JobSpec> sized, FromSize(text));
  absl::StatusOr<JobSpec> spec = sized.has_value() ? *std::move(sized) : FromFile(text);
  if (!spec.ok()) return spec;
  LayoutSpec& layout = spec->layout;
  // Partitions or a mesh say for how many ranks they are. Without them any number can be planned.
  if (layout.partitions.empty() && layout.mesh.empty()) {
    if (sized.has_value()) layout.world_size = default_world_size;
    if (world_size > 0) layout.world_size = world_size;
    // Checked first, because groups and sizes are then taken as they are.
    BALLAST_RETURN_IF_ERROR(Annotate(CheckParameters(layout), text));
    BALLAST_RETURN_IF_ERROR(Annotate(CutInBuckets(kBucketElements, layout), text));
  } else if (world_size > 0 && world_size != layout.world_size) {
    return absl::InvalidArgumentError(absl::StrCat(text, " is cut for ", layout.world_size,
                                                   " ranks, not ", world_size,
                                                   "; leave --world-size out, or the partitions"));
  }
  return spec;
}

namespace {

// What one member of the job has, or its only service.
struct Part {
  v1::PlanMember member;
  Layout layout;
  int64_t shared_bytes = 0;
};

absl::StatusOr<std::vector<Part>> PartsOf(const JobSpec& spec, const std::vector<int64_t>& limits) {
  const int members = spec.member_count();
  if (limits.size() != 1 && static_cast<int>(limits.size()) != members) {
    return absl::InvalidArgumentError(absl::StrCat(limits.size(), " sizes of memory are given for ",
                                                   members, members == 1 ? " service" : " members",
                                                   "; give one, or one for each"));
  }
  std::vector<Part> parts;
  for (int i = 0; i < members; ++i) {
    const std::vector<int> ranks = spec.RanksOf(i);
    BALLAST_ASSIGN_OR_RETURN(Layout layout, Layout::CreateForRanks(spec.layout, ranks));
    Part& part = parts.emplace_back(Part{.member = {}, .layout = std::move(layout)});
    if (!spec.members.empty()) part.member.set_address(spec.members[i].address);
    part.member.mutable_ranks()->Add(ranks.begin(), ranks.end());
    part.member.set_limit_bytes(limits[limits.size() == 1 ? 0 : i]);
    for (const int rank : ranks) {
      part.shared_bytes += RankMemoryLayout(part.layout, spec.groups, rank).size_bytes();
    }
  }
  return parts;
}

v1::PlanOption OptionOf(const JobSpec& spec, const Part& part, bool shared) {
  const MemoryNeed need = NeedOf(spec, part.layout);
  v1::PlanOption option;
  option.set_update(spec.update_mode == UpdateMode::kWait ? v1::WAIT : v1::SPECULATE);
  option.set_several_micro_steps(spec.max_micro_steps != 1);
  option.set_shared_memory(shared);
  option.set_state_bytes(need.state_bytes);
  option.set_gradient_bytes(need.gradient_bytes);
  option.set_accumulator_bytes(need.accumulator_bytes);
  option.set_speculation_bytes(need.speculation_bytes);
  option.set_previous_bytes(need.previous_bytes);
  option.set_other_bytes(need.other_bytes);
  option.set_shared_bytes(shared ? part.shared_bytes : 0);
  option.set_total_bytes(need.total_bytes() + option.shared_bytes());
  return option;
}

}  // namespace

absl::StatusOr<v1::JobPlan> MakePlan(JobSpec spec, const std::vector<int64_t>& limits) {
  BALLAST_RETURN_IF_ERROR(Validate(spec));
  BALLAST_ASSIGN_OR_RETURN(std::vector<Part> parts, PartsOf(spec, limits));
  v1::JobPlan plan;
  plan.set_parameters(static_cast<int64_t>(spec.layout.parameters.size()));
  plan.set_world_size(spec.layout.world_size);
  plan.set_limit_bytes(*std::min_element(limits.begin(), limits.end()));
  for (int p = 0; p < static_cast<int>(spec.layout.parameters.size()); ++p) {
    if (!spec.layout.parameters[p].trainable) continue;
    plan.set_elements(plan.elements() + parts[0].layout.place(p).elements);
  }
  std::vector<int64_t> weights(spec.layout.world_size);
  const std::vector<PlaneList> planes = PlanesByGroup(spec);
  // NeedOf counts previous versions only for a job that keeps them, so it is asked for one that
  // does.
  JobSpec undoing = spec;
  undoing.keep_previous = true;
  for (const Part& part : parts) {
    plan.set_chunks(plan.chunks() + static_cast<int64_t>(part.layout.chunks().size()));
    plan.set_keep_previous_bytes(
        std::max(plan.keep_previous_bytes(), NeedOf(undoing, part.layout).previous_bytes));
    for (const Chunk& chunk : part.layout.chunks()) {
      weights[chunk.rank] += chunk.elements * SizeBytes(spec.groups[chunk.group].return_dtype);
      // A checkpoint's other contents, headers and an index, are small beside the planes.
      for (const Plane stored : StoredPlanesOf(planes[chunk.group], chunk.format)) {
        plan.set_checkpoint_bytes(plan.checkpoint_bytes() +
                                  StoredBytes(chunk.format, stored, chunk.elements));
      }
    }
  }
  plan.set_largest_rank_weights_bytes(*std::max_element(weights.begin(), weights.end()));
  plan.set_keep_previous(spec.keep_previous);
  for (const UpdateMode update : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
    for (const bool several : {false, true}) {
      for (const bool shared : {false, true}) {
        spec.update_mode = update;
        spec.max_micro_steps = several ? 0 : 1;
        v1::PlanOption& shown = *plan.add_options();
        std::optional<int64_t> least_left;
        for (Part& part : parts) {
          v1::PlanOption option = OptionOf(spec, part, shared);
          part.member.add_total_bytes(option.total_bytes());
          const int64_t left = part.member.limit_bytes() - option.total_bytes();
          if (least_left.has_value() && left >= *least_left) continue;
          least_left = left;
          shown = std::move(option);
        }
        shown.set_fits(*least_left >= 0);
      }
    }
  }
  if (parts.size() == 1) return plan;
  for (Part& part : parts) *plan.add_members() = std::move(part.member);
  return plan;
}

bool FitsSomehow(const v1::JobPlan& plan) {
  return std::any_of(plan.options().begin(), plan.options().end(),
                     [](const v1::PlanOption& option) { return option.fits(); });
}

namespace {

// On all members.
int64_t TotalBytes(const v1::JobPlan& plan, int option) {
  if (plan.members().empty()) return plan.options(option).total_bytes();
  int64_t bytes = 0;
  for (const v1::PlanMember& member : plan.members()) bytes += member.total_bytes(option);
  return bytes;
}

std::string MembersText(const v1::JobPlan& plan) {
  Table table({{"member"}, {"ranks"}, {"limit", kRight}, {"needs", kRight}, {"to", kRight}, {""}});
  for (const v1::PlanMember& member : plan.members()) {
    const auto [least, most] =
        std::minmax_element(member.total_bytes().begin(), member.total_bytes().end());
    const int64_t limit = member.limit_bytes();
    table.Add({member.address(), RankRanges({member.ranks().begin(), member.ranks().end()}),
               FormatBytes(limit), FormatBytes(*least), FormatBytes(*most),
               *least > limit  ? absl::StrCat("is short of ", FormatBytes(*least - limit))
               : *most > limit ? "fits with some options"
                               : "fits"});
  }
  return table.ToString();
}

}  // namespace

std::string PlanText(const v1::JobPlan& plan) {
  std::string text;
  absl::StrAppend(&text, FormatField("elements", FormatCount(plan.elements())),
                  FormatField("parameters", FormatCount(plan.parameters())),
                  FormatField("chunks", FormatCount(plan.chunks())),
                  FormatField("ranks", FormatCount(plan.world_size())));
  if (plan.members().empty()) {
    absl::StrAppend(&text, FormatField("limit", FormatBytes(plan.limit_bytes())));
  } else {
    absl::StrAppend(&text, "\n", MembersText(plan), "\nThe member with the least to spare:\n");
  }
  absl::StrAppend(&text, "\n");
  Table table({{"update"},
               {"micro-steps"},
               {"shared memory"},
               {"needs", kRight},
               {"bytes/element", kRight},
               {"fits"}});
  bool all = true;
  for (int number = 0; number < plan.options_size(); ++number) {
    const v1::PlanOption& option = plan.options(number);
    all = all && option.fits();
    table.Add(
        {Name(option.update()), option.several_micro_steps() ? "several" : "one",
         option.shared_memory() ? "yes" : "no", FormatBytes(option.total_bytes()),
         // A job may have no trainable elements at all.
         absl::StrFormat("%.2f", static_cast<double>(TotalBytes(plan, number)) /
                                     static_cast<double>(std::max<int64_t>(1, plan.elements()))),
         option.fits() ? "yes" : "no"});
  }
  absl::StrAppend(&text, table.ToString(), "\n");
  if (!FitsSomehow(plan)) {
    const auto least = std::min_element(plan.options().begin(), plan.options().end(),
                                        [](const v1::PlanOption& a, const v1::PlanOption& b) {
                                          return a.total_bytes() < b.total_bytes();
                                        });
    absl::StrAppend(&text,
                    plan.members().empty()
                        ? absl::StrCat("It does not fit: the service needs a --memory-limit of at "
                                       "least ",
                                       FormatBytes(least->total_bytes()))
                        : "It does not fit: a member that is short needs a larger --memory-limit",
                    ".\n");
  } else if (all) {
    absl::StrAppend(&text, "It fits with every option.\n");
  } else {
    absl::StrAppend(
        &text,
        "It fits with the options that say yes. Where only second versions do not fit, a "
        "job that\nasks to speculate is created all the same, and waits.\n");
  }
  absl::StrAppend(
      &text, "A checkpoint has ", FormatBytes(plan.checkpoint_bytes()),
      ". Training goes on during a save where the limit has room for second\nversions "
      "(the rows with speculate); otherwise steps wait for it.\nTo speculate without "
      "shared memory a rank itself needs ",
      FormatBytes(plan.largest_rank_weights_bytes()), " for weights.\n",
      plan.keep_previous() ? "Of this, " : "To keep the previous version, for undo, takes ",
      FormatBytes(plan.keep_previous_bytes()),
      plan.keep_previous() ? " are for the previous version (keep_previous).\n"
                           : " more (keep_previous).\n");
  return text;
}

}  // namespace ballast::client::cli
