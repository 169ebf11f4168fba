// The tables and texts that the CLI prints for people.
#ifndef BALLAST_CLIENT_CLI_CLI_PRINT_H_
#define BALLAST_CLIENT_CLI_CLI_PRINT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/v1/jobs.pb.h"
#include "ballast/v1/state.pb.h"

namespace ballast::client::cli {

std::string JobsText(const v1::ListJobsResponse& response);
// Two in cli_print_job.cc: `job`, `history`.
std::string JobText(const v1::Job& job);
std::string StepHistoryText(const v1::Job& job);
std::string GroupsText(const v1::Job& job);
std::string GroupText(const v1::ParamGroup& group);
std::string SummaryText(const v1::StateSummary& summary);

// The part of total_bytes outside MemoryUse's named parts.
int64_t OtherBytes(const v1::MemoryUse& memory);

// Lower-case names of enumerators.
std::string Name(v1::JobPhase phase);
std::string Name(v1::DType dtype);
std::string Name(v1::StateFormat format);
std::string Name(v1::UnusedPolicy policy);
std::string Name(v1::UpdateMode mode);
std::string Name(v1::Plane plane);

// The cells "lr", "betas", "eps", "weight decay" and "options" of a table. The digits read back to
// the same numbers.
std::vector<std::string> HyperParameterCells(const v1::HyperParameters& values);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_CLI_PRINT_H_
