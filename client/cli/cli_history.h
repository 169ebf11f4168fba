// The hyper-parameters that each group's steps used, from the job's recorded steps.
#ifndef BALLAST_CLIENT_CLI_CLI_HISTORY_H_
#define BALLAST_CLIENT_CLI_CLI_HISTORY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/v1/jobs.pb.h"

namespace ballast::client::cli {

// Consecutive steps that used the same values.
struct HyperParameterRun {
  uint64_t first_step = 0;
  uint64_t last_step = 0;
  v1::HyperParameters values;
};

// For each group of the job, in order: its runs in the order of the decisions, newest last.
std::vector<std::vector<HyperParameterRun>> HistoryOf(const v1::Job& job);

std::string HistoryText(const v1::Job& job);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_CLI_HISTORY_H_
