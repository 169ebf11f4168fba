// The output of --json. Field names are snake_case and do not change; numbers that are not finite
// are null.
#ifndef BALLAST_CLIENT_CLI_CLI_JSON_H_
#define BALLAST_CLIENT_CLI_CLI_JSON_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "ballast/v1/ballast.pb.h"

namespace ballast::client::cli {

nlohmann::ordered_json ToJson(const v1::ListJobsResponse& response);
nlohmann::ordered_json ToJson(const v1::Job& job);
nlohmann::ordered_json ToJson(const v1::HyperParameters& values);
nlohmann::ordered_json ToJson(const v1::ParamGroup& group);
nlohmann::ordered_json ToJson(const v1::StateSummary& summary);
nlohmann::ordered_json GroupsToJson(const v1::Job& job);

// The part of total_bytes that is in none of the parts that MemoryUse names.
int64_t OtherBytes(const v1::MemoryUse& memory);

// With indentation and a newline, in ASCII, so that no text in it acts on a terminal. Bytes that
// are not UTF-8 are replaced.
std::string Dump(const nlohmann::ordered_json& json);

// Lower-case names of enumerators, the same for people and in JSON.
std::string Name(v1::JobPhase phase);
std::string Name(v1::DType dtype);
std::string Name(v1::UnusedPolicy policy);
std::string Name(v1::UpdateMode mode);
std::string Name(v1::Plane plane);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_CLI_JSON_H_
