#include "cpu_optimizer_service/common/limits/control_groups.h"

#include <algorithm>
#include <fstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ballast {
namespace {

using Look = absl::FunctionRef<void(const std::string& folder, ControlGroupVersion version)>;

// The group at `path` in the hierarchy that is mounted at `mount`, and all above it. In a container
// the path may be the host's, of which the mount shows only the lower end: then the mount itself is
// the group.
void VisitPath(const std::string& mount, absl::string_view path, ControlGroupVersion version,
               Look look) {
  look(mount, version);
  std::string folder = mount;
  for (const absl::string_view part : absl::StrSplit(path, '/', absl::SkipEmpty())) {
    if (part == "..") return;  // The group lies outside what the mount shows.
    absl::StrAppend(&folder, "/", part);
    look(folder, version);
  }
}

}  // namespace

void VisitControlGroups(const ControlGroupFiles& files, absl::string_view controller, Look look) {
  // The group at the mount counts also where the file that names the process's groups cannot be
  // read.
  look(files.groups, ControlGroupVersion::k2);
  // Lines are "4:cpu,cpuacct:/path" of version 1, and "0::/path" of version 2.
  std::ifstream lines(files.groups_of_process);
  std::string line;
  while (std::getline(lines, line)) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const std::vector<std::string> controllers = absl::StrSplit(fields[1], ',');
    if (std::find(controllers.begin(), controllers.end(), controller) != controllers.end()) {
      // Some systems mount several controllers in one folder, and link each one's name to it.
      VisitPath(absl::StrCat(files.groups, "/", controller), fields[2], ControlGroupVersion::k1,
                look);
      if (controllers.size() > 1) {
        VisitPath(absl::StrCat(files.groups, "/", fields[1]), fields[2], ControlGroupVersion::k1,
                  look);
      }
    }
    if (!fields[1].empty()) continue;
    // Beside hierarchies of version 1 it has a folder of its own.
    for (const char* mount : {"", "/unified"}) {
      VisitPath(files.groups + mount, fields[2], ControlGroupVersion::k2, look);
    }
  }
}

}  // namespace ballast
