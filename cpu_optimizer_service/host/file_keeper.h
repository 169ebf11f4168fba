// Somebody who keeps files beyond this process's death: its parent, a directory, or a test.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_HOST_FILE_KEEPER_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_HOST_FILE_KEEPER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"

namespace ballast {

// A memory file (memfd) of zeros, sealed against growing and shrinking: what other processes may be
// given. RESOURCE_EXHAUSTED.
absl::StatusOr<FileDescriptor> MakeSealedFile(const std::string& name, int64_t bytes);

// Thread-safe. Names have at most kMaxKeptName characters.
inline constexpr size_t kMaxKeptName = 119;

class FileKeeper {
 public:
  virtual ~FileKeeper() = default;
  // A new file of zeros for memory that Keep is then to keep under this name: of `bytes`, or more
  // where its pages are larger. RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<FileDescriptor> MakeFile(const std::string& name, int64_t bytes) {
    return MakeSealedFile(name, bytes);
  }
  // From its return on the keeper has `descriptor`, too, under a name that it has not yet.
  // RESOURCE_EXHAUSTED: it has as many as it takes.
  virtual absl::Status Keep(const std::string& name, int descriptor) = 0;
  // It closes its own. Nothing, if it has none of that name.
  virtual void Drop(const std::string& name) = 0;
  // What an earlier process left, by name. Once.
  virtual std::map<std::string, FileDescriptor> TakeKept() = 0;

  // Whether sealed files are kept as long as those of MakeFile.
  virtual bool keeps_sealed_files() const { return true; }
  // What is left for MakeFile, where that is less than all memory; none: as much as there is.
  struct Room {
    int64_t bytes = 0;
    // Not of what the machine and its control groups have available: a pool of huge pages.
    bool is_apart = false;
    std::string where;  // For people.
  };
  virtual std::optional<Room> room() const { return std::nullopt; }
  // What is kept, or is not there, under a name, for people.
  virtual std::string WhatIs(const std::string& name) const;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_FILE_KEEPER_H_
