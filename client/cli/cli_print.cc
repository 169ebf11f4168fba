#include "client/cli/cli_print.h"

#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/cli/cli_text.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/text/amounts.h"
#include "cpu_optimizer_service/common/text/printable.h"
#include "proto/convert.h"

namespace ballast::client::cli {

std::string JobsText(const v1::ListJobsResponse& response) {
  std::string memory = absl::StrCat("memory ", FormatBytes(response.memory_used_bytes()), " of ",
                                    FormatBytes(response.memory_limit_bytes()), " in use\n");
  for (const std::string& problem : response.problems()) {
    absl::StrAppend(&memory, Printable(problem), "\n");
  }
  if (response.jobs().empty()) return absl::StrCat("no jobs; ", memory);
  Table table({{"job"},
               {"phase"},
               {"step", kRight},
               {"applied", kRight},
               {"skipped", kRight},
               {"generation", kRight},
               {"ranks", kRight},
               {"memory", kRight}});
  std::string problems;
  std::string work;
  for (const v1::Job& job : response.jobs()) {
    if (!job.problem().empty()) absl::StrAppend(&problems, Printable(job.problem()), "\n");
    table.Add({proto::BareName(job.name()), Name(job.phase()), FormatCount(job.committed_step()),
               FormatCount(job.applied_steps()), FormatCount(job.skipped_steps()),
               ToString(proto::FromProto(job.generation())), absl::StrCat(job.world_size()),
               FormatBytes(job.memory().total_bytes())});
    if (!job.waits_for().empty()) {
      absl::StrAppend(&work, proto::BareName(job.name()), " waits: ", job.waits_for(), "\n");
    }
    for (const v1::Activity& activity : job.activities()) {
      absl::StrAppend(&work, proto::BareName(job.name()), ": ", ToLine(proto::FromProto(activity)),
                      "\n");
    }
  }
  for (const v1::Activity& activity : response.activities()) {
    absl::StrAppend(&work, ToLine(proto::FromProto(activity)), "\n");
  }
  return absl::StrCat(table.ToString(), "\n", problems, work, memory);
}

namespace {

void AddText(std::vector<std::string>& words, absl::string_view name, double value) {
  words.push_back(absl::StrCat(name, "=", FormatExactly(value)));
}
void AddText(std::vector<std::string>& words, absl::string_view name, int32_t value) {
  words.push_back(absl::StrCat(name, "=", value));
}
void AddText(std::vector<std::string>& words, absl::string_view name, bool value) {
  // The optimizer's name says it.
  if (name == "decoupled_weight_decay") return;
  const bool usual = name == "bias_correction";
  if (value != usual) words.push_back(absl::StrCat(value ? "" : "no ", name));
}

}  // namespace

std::vector<std::string> HyperParameterCells(const v1::HyperParameters& message) {
  const absl::StatusOr<HyperParameters> values = proto::FullFromProto(message);
  if (!values.ok()) return {"unknown", FormatExactly(message.lr()), "-"};  // Of a newer service.
  std::vector<std::string> others;
  ForEachOf(
      values->rule,
      [&](absl::string_view name, const auto& value) {
        if (name != "lr") AddText(others, name, value);
      },
      *values);
  return {std::string(TitleOf(*values)), FormatExactly(values->lr), absl::StrJoin(others, " ")};
}

std::string GroupsText(const v1::Job& job) {
  Table table({{"group"},
               {"optimizer"},
               {"lr", kRight},
               {"hyper-parameters"},
               {"parameters", kRight},
               {"elements", kRight},
               {"wire"},
               {"return"},
               {"state"}});
  std::string fell_back;
  for (const v1::ParamGroup& group : job.groups()) {
    std::vector<std::string> cells = HyperParameterCells(group.hyper_parameters());
    cells.insert(cells.begin(), proto::BareName(group.name()));
    cells.insert(cells.end(),
                 {FormatCount(group.parameter_count()), FormatCount(group.trainable_elements()),
                  Name(group.wire_dtype()), Name(group.return_dtype()), Name(group.state())});
    table.Add(std::move(cells));
    if (group.in_fp32().empty()) continue;
    absl::StrAppend(
        &fell_back,
        FormatNames(absl::StrCat("in fp32 in group ", proto::BareName(group.name()),
                                 ", because shards cut groups of 64 elements:"),
                    std::vector<std::string>(group.in_fp32().begin(), group.in_fp32().end())));
  }
  return table.ToString() + fell_back;
}

std::string GroupText(const v1::ParamGroup& group) {
  // A table with one row.
  v1::Job job;
  *job.add_groups() = group;
  return GroupsText(job);
}

std::string SummaryText(const v1::StateSummary& summary) {
  const std::vector<int64_t> shape(summary.shape().begin(), summary.shape().end());
  int64_t elements = 1;
  for (int64_t extent : shape) elements *= extent;
  std::string text = absl::StrCat(
      FormatField("parameter", proto::BareName(summary.name())),
      FormatField("shape",
                  absl::StrCat(FormatShape(shape), " (", FormatCount(elements), " elements)")),
      FormatField("group", proto::BareName(summary.group())),
      FormatField("step", absl::StrCat(FormatCount(summary.step()), " committed, updated ",
                                       FormatCount(summary.update_count()), " times")));
  if (!summary.trainable()) absl::StrAppend(&text, "frozen: the service has no state for it\n");
  for (const v1::PlaneSummary& plane : summary.planes()) {
    absl::StrAppend(&text, "\n", Name(plane.plane()), ": norm ", FormatNumber(plane.norm()),
                    ", mean ", FormatNumber(plane.mean()), ", min ", FormatNumber(plane.min()),
                    ", max ", FormatNumber(plane.max()), "; ", FormatCount(plane.zeros()),
                    " zeros, ", FormatCount(plane.non_finite()), " not finite\n");
    const std::vector<int64_t> counts(plane.magnitude_histogram().begin(),
                                      plane.magnitude_histogram().end());
    const std::string magnitudes = FormatMagnitudes(counts);
    if (!magnitudes.empty()) absl::StrAppend(&text, "  magnitudes\n", magnitudes);
  }
  return text;
}

int64_t OtherBytes(const v1::MemoryUse& memory) {
  // shared_bytes are beside the total, and so are not subtracted.
  return memory.total_bytes() - memory.state_bytes() - memory.gradient_bytes() -
         memory.accumulator_bytes() - memory.speculation_bytes() - memory.previous_bytes();
}

std::string Name(v1::JobPhase phase) { return absl::AsciiStrToLower(v1::JobPhase_Name(phase)); }
std::string Name(v1::DType dtype) { return absl::AsciiStrToLower(v1::DType_Name(dtype)); }
std::string Name(v1::StateFormat format) {
  if (format == v1::STATE_FORMAT_UNSPECIFIED) return "fp32";
  return absl::AsciiStrToLower(absl::StripPrefix(v1::StateFormat_Name(format), "STATE_"));
}
std::string Name(v1::UnusedPolicy policy) {
  return absl::AsciiStrToLower(v1::UnusedPolicy_Name(policy));
}
std::string Name(v1::UpdateMode mode) {
  // A mode that is not set means WAIT.
  return mode == v1::SPECULATE ? "speculate" : "wait";
}
std::string Name(v1::Plane plane) { return absl::AsciiStrToLower(v1::Plane_Name(plane)); }

}  // namespace ballast::client::cli
