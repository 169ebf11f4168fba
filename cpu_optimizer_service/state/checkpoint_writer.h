// Writes a checkpoint (checkpoint.h) whole or not at all into a folder of them
// (checkpoint_folder.h), its files by several threads at once.
//
//   CheckpointWriter writer(file_system, {.folder = "/saved/gpt"}, index);
//   absl::Status status = writer.Begin();
//   ... on any threads, for each part, if it has begun:
//   status = writer.WritePart(part, read);
//   ... then, once:
//   writer.Finish(status)  // The first error of all of them.
//
// Files are written to a directory beside the checkpoint's, VERSION.partial-RANDOM, then the index,
// then the directory gets its name by one plain rename. One that a killed process left is removed
// by the next save there.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_WRITER_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_WRITER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/host/file_system.h"
#include "cpu_optimizer_service/state/checkpoint_index.h"

namespace ballast {

// Fills elements [offset, offset + out.size()) of a plane of parameters[parameter].
using PlaneReader =
    absl::FunctionRef<void(int parameter, Plane plane, int64_t offset, absl::Span<float> out)>;

class CheckpointWriter {
 public:
  struct Target {
    std::string folder;  // Its parent must be there.
    int64_t part_bytes = kPartBytes;
  };

  // Touches nothing yet. The index is without files.
  CheckpointWriter(FileSystem& file_system, Target target, CheckpointIndex index);

  // INVALID_ARGUMENT for a folder that cannot be one. NOT_FOUND: its parent is gone.
  absl::Status Begin();
  int parts() const { return static_cast<int>(parts_.size()); }
  absl::Status WritePart(int part, PlaneReader read);
  // Writes the index and gives the checkpoint its name, or, with an error, removes what there is.
  // Once it is there, no error of cleaning up is one of the save.
  absl::StatusOr<CheckpointFacts> Finish(absl::Status status);

  const std::string& folder() const { return target_.folder; }
  const CheckpointIndex& index() const { return index_; }

  // Of the planes, which Begin and WritePart count in the thread's Progress.
  int64_t size_bytes() const { return size_bytes_; }

 private:
  absl::StatusOr<int64_t> WriteIndex();
  absl::StatusOr<std::string> GiveName();
  void WriteHint(const std::string& directory);

  FileSystem& file_system_;
  const Target target_;
  CheckpointIndex index_;
  std::vector<CheckpointPart> parts_;
  int64_t size_bytes_ = 0;
  std::string partial_;  // Empty: not made.
  std::shared_ptr<const void> lock_;
  std::vector<WrittenFile> files_;  // By part; each written by the thread that has it.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_WRITER_H_
