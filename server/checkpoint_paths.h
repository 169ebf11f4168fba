// Where callers may let the service write and read checkpoints: by name, under its
// --checkpoint-dir; by path only callers who could do so without the service.
#ifndef BALLAST_SERVER_CHECKPOINT_PATHS_H_
#define BALLAST_SERVER_CHECKPOINT_PATHS_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/state/checkpoint_directory.h"
#include "server/access/access.h"

namespace ballast::server {

// Thread-safe.
class CheckpointPaths {
 public:
  // If `names` is null, names do not work. `allow_paths`: paths from every caller. `unix_sockets`:
  // the files of the listening ones.
  CheckpointPaths(const CheckpointDirectory* names, bool allow_paths,
                  std::vector<std::string> unix_sockets)
      : names_(names), allow_paths_(allow_paths), unix_sockets_(std::move(unix_sockets)) {}

  // The directory that a request of `peer` (gRPC's name for it) means: a name, "gpt"; a checkpoint
  // there, "gpt/step-1000.2"; or an absolute path. INVALID_ARGUMENT: another form.
  // FAILED_PRECONDITION: a name, without a --checkpoint-dir. PERMISSION_DENIED: a path, unless the
  // peer is on a unix socket to which only this process's user can connect.
  absl::StatusOr<std::string> Resolve(const std::string& directory, const std::string& peer) const;
  // For a request of this caller. PERMISSION_DENIED also if the name belongs to a job that the
  // caller may not use.
  absl::StatusOr<std::string> Resolve(const std::string& directory, const Caller& caller) const;

 private:
  bool MayNamePaths(const std::string& peer) const;

  const CheckpointDirectory* const names_;
  const bool allow_paths_;
  const std::vector<std::string> unix_sockets_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_CHECKPOINT_PATHS_H_
