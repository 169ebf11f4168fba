// Keeps files beyond this process's end: its parent, a directory, or a test.
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

// A memory file (memfd) of zeros, sealed against resizing, which may be given to other processes.
// RESOURCE_EXHAUSTED.
absl::StatusOr<FileDescriptor> MakeSealedFile(const std::string& name, int64_t bytes);

// Thread-safe. Names have at most kMaxKeptName characters.
inline constexpr size_t kMaxKeptName = 119;

class FileKeeper {
 public:
  virtual ~FileKeeper() = default;
  // A new file of zeros, for memory that Keep will keep under this name: `bytes` long, or more if
  // its pages are larger. RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<FileDescriptor> MakeFile(const std::string& name, int64_t bytes) {
    return MakeSealedFile(name, bytes);
  }
  // When it returns, the keeper has `descriptor`, too, under a new name. RESOURCE_EXHAUSTED: the
  // keeper is full.
  virtual absl::Status Keep(const std::string& name, int descriptor) = 0;
  // The keeper closes its descriptor; no effect if the name is unknown.
  virtual void Drop(const std::string& name) = 0;
  // What an earlier process left, by name. Only once.
  virtual std::map<std::string, FileDescriptor> TakeKept() = 0;

  // Whether sealed files are kept as long as MakeFile's.
  virtual bool keeps_sealed_files() const { return true; }
  // The room for MakeFile, if less than all memory; empty: no further limit.
  struct Room {
    int64_t bytes = 0;
    // Separate from the available memory of the machine and its control groups: a pool of huge
    // pages.
    bool is_apart = false;
    std::string where;  // For people.
  };
  virtual std::optional<Room> room() const { return std::nullopt; }
  // Describes what is kept, or missing, under a name, for people.
  virtual std::string WhatIs(const std::string& name) const;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_FILE_KEEPER_H_
