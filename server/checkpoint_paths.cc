#include "server/checkpoint_paths.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/checkpoint_name.h"

namespace ballast::server {
namespace {

// With room for the names of the files in it.
constexpr size_t kMostPathBytes = 3500;

// Connecting needs the right to write to the socket's file, and root may do anything.
bool OnlyThisUserConnects(const std::string& socket) {
  struct stat status;
  return stat(socket.c_str(), &status) == 0 && status.st_uid == geteuid() &&
         (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

}  // namespace

bool CheckpointPaths::MayNamePaths(const std::string& peer) const {
  if (allow_paths_) return true;
  // gRPC's name of a peer does not say which unix socket it came through, so all of them must be
  // closed to other users. They are looked at for each call, because a mode may change.
  return absl::StartsWith(peer, "unix:") && !unix_sockets_.empty() &&
         std::all_of(unix_sockets_.begin(), unix_sockets_.end(), OnlyThisUserConnects);
}

absl::StatusOr<std::string> CheckpointPaths::Resolve(const std::string& directory,
                                                     const std::string& peer) const {
  if (IsCheckpointName(directory)) {
    if (names_ != nullptr) return names_->PathOf(directory);
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(
            "'", directory,
            "' is a name under --checkpoint-dir, but the service runs without one; start ballastd "
            "with --checkpoint-dir, or give an absolute path on its host")),
        reason::kNoCheckpointDir);
  }
  BALLAST_RETURN_IF_ERROR(CheckCheckpointDirectory(directory));
  // A zero byte would end the path for the system, behind all that was checked here.
  if (directory.size() > kMostPathBytes || directory.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", absl::Utf8SafeCEscape(directory.substr(0, 128)), "' is too long a path (",
                     kMostPathBytes, " bytes at most), or has a zero byte"));
  }
  if (MayNamePaths(peer)) return directory;
  return absl::PermissionDeniedError(
      absl::StrCat("absolute paths such as '", absl::Utf8SafeCEscape(directory.substr(0, 128)),
                   "' need a unix socket to which only the service's user can connect, or ballastd "
                   "--allow-paths; give a name under its --checkpoint-dir"));
}

absl::StatusOr<std::string> CheckpointPaths::Resolve(const std::string& directory,
                                                     const Caller& caller) const {
  if (IsCheckpointName(directory)) {
    BALLAST_RETURN_IF_ERROR(caller.Check(directory.substr(0, directory.find('/'))));
  }
  return Resolve(directory, caller.peer());
}

}  // namespace ballast::server
