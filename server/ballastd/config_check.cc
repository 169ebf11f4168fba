#include "server/ballastd/config_check.h"

#include <grp.h>
#include <pwd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/state/checkpoint_directory.h"

namespace ballast::server {
namespace {

const passwd* FindUser(const std::string& user) {
  if (const passwd* const named = getpwnam(user.c_str()); named != nullptr) return named;
  uid_t number = 0;
  return absl::SimpleAtoi(user, &number) ? getpwuid(number) : nullptr;
}

// Whether a directory that is not there could be made, with its parents.
absl::Status CheckCanBeMade(const std::filesystem::path& directory) {
  std::filesystem::path parent = directory;
  std::error_code error;
  do {
    parent = parent.parent_path();
  } while (!std::filesystem::exists(parent, error) && parent != parent.parent_path());
  if (access(parent.c_str(), W_OK | X_OK) == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(directory.string(), " cannot be made in ",
                                                 parent.string(), ": ", std::strerror(errno)));
}

bool IsThere(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

}  // namespace

absl::StatusOr<std::string> BecomeUser(const std::string& user) {
  const bool is_root = geteuid() == 0;
  if (user.empty() && !is_root) return "";
  const passwd* const found = FindUser(user.empty() ? kServiceUser : user);
  if (found == nullptr && user.empty()) return "";
  if (found == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("flag --user: there is no user ", user));
  }
  if (found->pw_uid == geteuid()) return "";
  const std::string name = found->pw_name;
  if (!is_root) {
    return absl::PermissionDeniedError(
        absl::StrCat("flag --user: only root can check as the user ", name));
  }
  // The groups first: a user may not change them.
  if (initgroups(found->pw_name, found->pw_gid) != 0 || setgid(found->pw_gid) != 0 ||
      setuid(found->pw_uid) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("flag --user: cannot become the user ", name, ": ", std::strerror(errno)));
  }
  return name;
}

absl::Status CheckPlaces(const BallastdFlags& flags) {
  if (!flags.checkpoint_directory.empty()) {
    const auto path = std::filesystem::absolute(flags.checkpoint_directory);
    const absl::Status status = IsThere(path)
                                    ? CheckpointDirectory::Open(PosixFileSystem(), path).status()
                                    : CheckCanBeMade(path);
    BALLAST_RETURN_IF_ERROR(Annotate(status, "flag --checkpoint-dir"));
  }
  // One that is there has been checked with the flags.
  if (!flags.state_directory.empty() && !IsThere(flags.state_directory)) {
    BALLAST_RETURN_IF_ERROR(Annotate(
        CheckCanBeMade(std::filesystem::absolute(flags.state_directory)), "flag --state-dir"));
  }
  return absl::OkStatus();
}

}  // namespace ballast::server
