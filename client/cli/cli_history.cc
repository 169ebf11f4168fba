#include "client/cli/cli_history.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/cli_json.h"
#include "client/cli/cli_print.h"
#include "client/cli/cli_service.h"
#include "client/cli/cli_text.h"
#include "cpu_optimizer_service/common/text/printable.h"

namespace ballast::client::cli {
namespace {

using Json = nlohmann::ordered_json;

// Messages have no operator==.
bool Equal(const v1::HyperParameters& a, const v1::HyperParameters& b) {
  return a.lr() == b.lr() && a.beta1() == b.beta1() && a.beta2() == b.beta2() &&
         a.eps() == b.eps() && a.weight_decay() == b.weight_decay() &&
         a.decoupled_weight_decay() == b.decoupled_weight_decay() &&
         a.bias_correction() == b.bias_correction() && a.amsgrad() == b.amsgrad() &&
         a.maximize() == b.maximize();
}

std::string StepsOf(const HyperParameterRun& run) {
  if (run.first_step == run.last_step) return absl::StrCat("step ", run.first_step);
  return absl::StrCat("steps ", run.first_step, "-", run.last_step);
}

std::string RunsText(const std::vector<HyperParameterRun>& runs) {
  Table table(
      {{"used in"}, {"lr", kRight}, {"betas"}, {"eps", kRight}, {"weight decay"}, {"options"}});
  for (const HyperParameterRun& run : runs) {
    std::vector<std::string> cells = HyperParameterCells(run.values);
    cells.insert(cells.begin(), StepsOf(run));
    table.Add(std::move(cells));
  }
  return table.ToString();
}

}  // namespace

std::vector<std::vector<HyperParameterRun>> HistoryOf(const v1::Job& job) {
  std::vector<std::vector<HyperParameterRun>> history(job.groups_size());
  for (const v1::StepRecord& record : job.recent_steps()) {
    for (int group = 0; group < job.groups_size() && group < record.hyper_parameters_size();
         ++group) {
      std::vector<HyperParameterRun>& runs = history[group];
      const v1::HyperParameters& values = record.hyper_parameters(group);
      // Only consecutive steps join a run. A service has no others in one list: a load makes it
      // forget the records of before, and an undo the last one.
      if (!runs.empty() && runs.back().last_step + 1 == record.step() &&
          Equal(runs.back().values, values)) {
        runs.back().last_step = record.step();
      } else {
        runs.push_back({record.step(), record.step(), values});
      }
    }
  }
  return history;
}

std::string HistoryText(const v1::Job& job) {
  if (job.recent_steps().empty()) return "no step has been decided yet\n";
  const std::vector<std::vector<HyperParameterRun>> history = HistoryOf(job);
  std::string text;
  for (int group = 0; group < job.groups_size(); ++group) {
    absl::StrAppend(&text, group == 0 ? "" : "\n", "group ",
                    Printable(BareName(job.groups(group).name())), "\n", RunsText(history[group]));
  }
  return text;
}

Json HistoryToJson(const v1::Job& job) {
  const std::vector<std::vector<HyperParameterRun>> history = HistoryOf(job);
  Json groups = Json::array();
  for (int group = 0; group < job.groups_size(); ++group) {
    Json runs = Json::array();
    for (const HyperParameterRun& run : history[group]) {
      runs.push_back({{"first_step", run.first_step},
                      {"last_step", run.last_step},
                      {"hyper_parameters", ToJson(run.values)}});
    }
    groups.push_back({{"name", BareName(job.groups(group).name())}, {"history", std::move(runs)}});
  }
  return {{"job", BareName(job.name())}, {"groups", std::move(groups)}};
}

}  // namespace ballast::client::cli
