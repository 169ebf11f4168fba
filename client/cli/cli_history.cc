#include "client/cli/cli_history.h"

#include <google/protobuf/util/message_differencer.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/cli_print.h"
#include "client/cli/cli_text.h"
#include "cpu_optimizer_service/common/text/printable.h"
#include "proto/convert.h"

namespace ballast::client::cli {
namespace {

using google::protobuf::util::MessageDifferencer;

std::string StepsOf(const HyperParameterRun& run) {
  if (run.first_step == run.last_step) return absl::StrCat("step ", run.first_step);
  return absl::StrCat("steps ", run.first_step, "-", run.last_step);
}

std::string RunsText(const std::vector<HyperParameterRun>& runs) {
  Table table({{"used in"}, {"optimizer"}, {"lr", kRight}, {"hyper-parameters"}});
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
          MessageDifferencer::Equals(runs.back().values, values)) {
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
                    Printable(proto::BareName(job.groups(group).name())), "\n",
                    RunsText(history[group]));
  }
  return text;
}

}  // namespace ballast::client::cli
