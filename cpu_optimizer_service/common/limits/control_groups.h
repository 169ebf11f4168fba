// The control groups that bound this process, of versions 1 and 2.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_LIMITS_CONTROL_GROUPS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_LIMITS_CONTROL_GROUPS_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"

namespace ballast {

struct ControlGroupFiles {
  std::string groups_of_process = "/proc/self/cgroup";
  std::string groups = "/sys/fs/cgroup";  // Where control groups are mounted.
};

enum class ControlGroupVersion { k1, k2 };

// Calls `look` with the folder of each group whose `controller` ("memory", "cpu") bounds this
// process: its own group and all above it, as far as the mount shows them. A folder may come twice,
// or not exist.
void VisitControlGroups(
    const ControlGroupFiles& files, absl::string_view controller,
    absl::FunctionRef<void(const std::string& folder, ControlGroupVersion version)> look);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_LIMITS_CONTROL_GROUPS_H_
