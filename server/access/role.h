// What a principal may do with a job. Each role includes those before it.
#ifndef BALLAST_SERVER_ACCESS_ROLE_H_
#define BALLAST_SERVER_ACCESS_ROLE_H_

#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"

namespace ballast::server {

enum class Role : uint8_t {
  kNobody,    // Nothing.
  kViewer,    // Looks.
  kTrainer,   // Creates the job, attaches to it and trains.
  kMember,    // A service that leads the job: it creates a part here, and ends it.
  kOperator,  // Everything else.
};

constexpr absl::string_view Name(Role role) {
  switch (role) {
    case Role::kNobody:
      return "nobody";
    case Role::kViewer:
      return "viewer";
    case Role::kTrainer:
      return "trainer";
    case Role::kMember:
      return "member";
    case Role::kOperator:
      return "operator";
  }
  return "nobody";
}

// nullopt: a line cannot give such a role.
constexpr std::optional<Role> ParseRole(absl::string_view name) {
  for (const Role role : {Role::kViewer, Role::kTrainer, Role::kMember, Role::kOperator}) {
    if (name == Name(role)) return role;
  }
  return std::nullopt;
}

}  // namespace ballast::server

#endif  // BALLAST_SERVER_ACCESS_ROLE_H_
