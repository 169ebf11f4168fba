// What the CLI prints for people.
#ifndef BALLAST_CLIENT_CLI_PRINT_H_
#define BALLAST_CLIENT_CLI_PRINT_H_

#include <string>

#include "ballast/v1/ballast.pb.h"

namespace ballast::client::cli {

std::string JobsText(const v1::ListJobsResponse& response);
std::string JobText(const v1::Job& job);
std::string GroupsText(const v1::Job& job);
std::string GroupText(const v1::ParamGroup& group);
std::string SummaryText(const v1::StateSummary& summary);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_PRINT_H_
