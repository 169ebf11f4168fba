// Where callers may have the service write and read checkpoints: by name, under its
// --checkpoint-dir; by path only who could do so without the service.
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
  // `names` may be null: then there are no names. `allow_paths`: from every caller. `unix_sockets`: the
  // files of those that are listened on.
  CheckpointPaths(const CheckpointDirectory* names, bool allow_paths,
                  std::vector<std::string> unix_sockets)
      : names_(names), allow_paths_(allow_paths), unix_sockets_(std::move(unix_sockets)) {}

  // The directory that a request of `peer` (gRPC's name of it) means: a name, "gpt"; one of what is
  // saved there, "gpt/step-1000.2"; or an absolute path. INVALID_ARGUMENT: none of these.
  // FAILED_PRECONDITION: a name, without a --checkpoint-dir. PERMISSION_DENIED: a path, from a peer
  // that is not on a unix socket that only this process's user can connect to.
  absl::StatusOr<std::string> Resolve(const std::string& directory, const std::string& peer) const;
  // Of a request of this caller. PERMISSION_DENIED also: a name that is not of a job of its own.
  absl::StatusOr<std::string> Resolve(const std::string& directory, const Caller& caller) const;

 private:
  bool MayNamePaths(const std::string& peer) const;

  const CheckpointDirectory* const names_;
  const bool allow_paths_;
  const std::vector<std::string> unix_sockets_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_CHECKPOINT_PATHS_H_
