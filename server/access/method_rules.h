// The table of methods and their roles.
#ifndef BALLAST_SERVER_ACCESS_METHOD_RULES_H_
#define BALLAST_SERVER_ACCESS_METHOD_RULES_H_

#include <optional>

#include "absl/strings/string_view.h"
#include "server/access/role.h"

namespace ballast::server {

// `method` is "Service.Method" in package ballast.v1: "JobService.CloseJob". nullopt: the table
// lacks it. Then it takes an operator, and a test fails.
std::optional<Role> RuleOf(absl::string_view method);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_ACCESS_METHOD_RULES_H_
