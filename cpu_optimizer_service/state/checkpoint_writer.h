// Writes a complete checkpoint (checkpoint.h), or nothing, into a folder (checkpoint_folder.h).
// Several threads write its files.
//
//   CheckpointWriter writer(file_system, {.folder = "/saved/gpt"}, index);
//   absl::Status status = writer.Begin();
//   ... on any threads, for each part, if it has begun:
//   status = writer.WritePart(part, read);
//   ... then, once:
//   writer.Finish(status)  // The first error of all of them.
//
// Files are written to a directory beside the checkpoint's, VERSION.partial-RANDOM. Then come the
// index, and one plain rename to the final name. The next save removes a killed process's
// directory.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_WRITER_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_WRITER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/host/file_system.h"
#include "cpu_optimizer_service/state/checkpoint_index.h"

namespace ballast {

// Fills what is stored of a plane of parameters[parameter], from its number `first` on: an element's, or
// of scales that of a group of elements.
using StoredReader =
    absl::FunctionRef<void(int parameter, Plane stored, int64_t first, absl::Span<std::byte> out)>;

class CheckpointWriter {
 public:
  struct Target {
    std::string folder;  // Its parent must exist.
    int64_t part_bytes = kPartBytes;
    // More could not be read (MostIndexBytes).
    int64_t most_index_bytes = std::numeric_limits<int64_t>::max();
    // With several members, what this one writes. They have equal indices.
    std::optional<CheckpointShare> share = std::nullopt;
  };

  // Touches no file yet. The index is without files.
  CheckpointWriter(FileSystem& file_system, Target target, CheckpointIndex index);

  // INVALID_ARGUMENT for an invalid folder. NOT_FOUND: its parent is gone.
  absl::Status Begin();
  // In place of Begin: the folder's directory of this name is one that the job's lead has begun.
  // Whoever writes to it does not finish. FAILED_PRECONDITION: it is not there.
  absl::Status Join(const std::string& partial);
  std::string partial() const;  // The name of that directory.
  int parts() const { return static_cast<int>(parts_.size()); }
  absl::Status WritePart(int part, StoredReader read);
  // All of this writer's, once they are written.
  std::vector<CheckpointIndex::File> Files() const;
  // Of another member, before Finish.
  void Add(std::vector<CheckpointIndex::File> files);
  // Writes the index and renames the checkpoint; after an error, removes all its files. Once the
  // checkpoint exists, errors of cleaning up do not fail the save.
  absl::StatusOr<CheckpointFacts> Finish(absl::Status status);

  const std::string& folder() const { return target_.folder; }
  const CheckpointShare& share() const { return *target_.share; }
  const CheckpointIndex& index() const { return index_; }

  // The planes' size; Begin and WritePart count it in the thread's Progress.
  int64_t size_bytes() const { return size_bytes_; }

 private:
  bool IsCut(int parameter) const;
  absl::StatusOr<int64_t> WriteIndex();
  // Of several members: whether each element is there once, and each file as its writer says.
  absl::Status CheckWritten() const;
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
  std::vector<CheckpointIndex::File> others_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_WRITER_H_
