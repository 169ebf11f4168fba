#include "client/cli_print.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli_json.h"
#include "client/cli_service.h"
#include "client/cli_text.h"

namespace ballast::client::cli {
namespace {

constexpr Table::Align kRight = Table::Align::kRight;

std::string YesNo(bool value) { return value ? "yes" : "no"; }

std::string RanksText(const v1::Job& job) {
  Table table(
      {{"rank", kRight}, {"process"}, {"micro-steps", kRight}, {"chunks", kRight}, {"sealed"}});
  for (const v1::RankProgress& rank : job.ranks()) {
    table.Add({absl::StrCat(rank.rank()), rank.attached() ? rank.process_id() : "not attached",
               rank.begun() ? absl::StrCat(rank.micro_steps_ended()) : "-",
               absl::StrCat(rank.begun() ? rank.chunks_complete() : 0, "/", rank.chunks()),
               YesNo(rank.sealed())});
  }
  return table.ToString();
}

std::string StepsText(const v1::Job& job) {
  Table table({{"step", kRight},
               {"decision"},
               {"norm", kRight},
               {"clip", kRight},
               {"micro-steps", kRight},
               {"lr", kRight}});
  for (const v1::StepRecord& step : job.recent_steps()) {
    std::string rates;
    for (const v1::HyperParameters& group : step.hyper_parameters()) {
      absl::StrAppend(&rates, rates.empty() ? "" : " ", FormatNumber(group.lr()));
    }
    table.Add({absl::StrCat(step.step()),
               step.applied() ? "applied" : absl::StrCat("skipped: ", step.skip_reason()),
               FormatNumber(step.norm()), FormatNumber(step.clip_coefficient()),
               absl::StrCat(step.micro_steps()), rates});
  }
  return table.ToString();
}

std::string MemoryText(const v1::MemoryUse& memory) {
  return absl::StrCat(
      FormatBytes(memory.total_bytes()), " (state ", FormatBytes(memory.state_bytes()),
      ", gradients ", FormatBytes(memory.gradient_bytes()), ", accumulators ",
      FormatBytes(memory.accumulator_bytes()), ", other ", FormatBytes(OtherBytes(memory)), ")");
}

std::string Line(const std::string& name, const std::string& value) {
  return absl::StrFormat("%-14s%s\n", name, value);
}

}  // namespace

std::string JobsText(const v1::ListJobsResponse& response) {
  const std::string memory =
      absl::StrCat("memory ", FormatBytes(response.memory_used_bytes()), " of ",
                   FormatBytes(response.memory_limit_bytes()), " in use\n");
  if (response.jobs().empty()) return absl::StrCat("no jobs; ", memory);
  Table table({{"job"},
               {"phase"},
               {"step", kRight},
               {"applied", kRight},
               {"skipped", kRight},
               {"generation", kRight},
               {"ranks", kRight},
               {"memory", kRight}});
  for (const v1::Job& job : response.jobs()) {
    table.Add({BareName(job.name()), Name(job.phase()), FormatCount(job.committed_step()),
               FormatCount(job.applied_steps()), FormatCount(job.skipped_steps()),
               absl::StrCat(job.generation()), absl::StrCat(job.world_size()),
               FormatBytes(job.memory().total_bytes())});
  }
  return absl::StrCat(table.ToString(), "\n", memory);
}

std::string JobText(const v1::Job& job) {
  std::string text = absl::StrCat(
      Line("job", BareName(job.name())), Line("uid", job.uid()), Line("phase", Name(job.phase())),
      Line("step", absl::StrCat(FormatCount(job.committed_step()), " committed (",
                                FormatCount(job.applied_steps()), " applied, ",
                                FormatCount(job.skipped_steps()), " skipped)")));
  absl::StrAppend(&text, Line("generation", absl::StrCat(job.generation())),
                  Line("memory", MemoryText(job.memory())),
                  Line("clipping", job.max_norm() > 0 ? FormatNumber(job.max_norm()) : "none"),
                  Line("unused", Name(job.unused_policy())), "\n", RanksText(job));
  if (job.recent_steps().empty()) {
    absl::StrAppend(&text, "\nno step has been decided yet\n");
  } else {
    absl::StrAppend(&text, "\n", StepsText(job));
  }
  return text;
}

std::string GroupsText(const v1::Job& job) {
  Table table({{"group"},
               {"lr", kRight},
               {"betas"},
               {"eps", kRight},
               {"weight decay"},
               {"options"},
               {"parameters", kRight},
               {"elements", kRight},
               {"wire"},
               {"return"}});
  for (const v1::ParamGroup& group : job.groups()) {
    const v1::HyperParameters& values = group.hyper_parameters();
    const std::string options =
        absl::StrCat(values.bias_correction() ? "" : "no-bias-correction ",
                     values.amsgrad() ? "amsgrad " : "", values.maximize() ? "maximize" : "");
    table.Add({BareName(group.name()), FormatNumber(values.lr()),
               absl::StrCat(FormatNumber(values.beta1()), ", ", FormatNumber(values.beta2())),
               FormatNumber(values.eps()),
               absl::StrCat(FormatNumber(values.weight_decay()),
                            values.decoupled_weight_decay() ? " decoupled" : " L2"),
               options.empty() ? "-" : options, FormatCount(group.parameter_count()),
               FormatCount(group.trainable_elements()), Name(group.wire_dtype()),
               Name(group.return_dtype())});
  }
  return table.ToString();
}

std::string GroupText(const v1::ParamGroup& group) {
  v1::Job job;
  *job.add_groups() = group;
  return GroupsText(job);
}

std::string SummaryText(const v1::StateSummary& summary) {
  const std::vector<int64_t> shape(summary.shape().begin(), summary.shape().end());
  int64_t elements = 1;
  for (int64_t extent : shape) elements *= extent;
  std::string text = absl::StrCat(
      Line("parameter", BareName(summary.name())),
      Line("shape", absl::StrCat(FormatShape(shape), " (", FormatCount(elements), " elements)")),
      Line("group", BareName(summary.group())),
      Line("step", absl::StrCat(FormatCount(summary.step()), " committed, updated ",
                                FormatCount(summary.update_count()), " times")));
  if (!summary.trainable()) absl::StrAppend(&text, "frozen: the service holds no state for it\n");
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

}  // namespace ballast::client::cli
