// Writes a checkpoint (checkpoint.h) whole or not at all, its planes by several threads at once.
//
//   CheckpointWriter writer(file_system, {.directory = "/saved/gpt"}, index);
//   absl::Status status = writer.Begin();
//   ... on any threads, for each plane, if it has begun:
//   status = writer.WritePlane(plane, read);
//   ... then, once:
//   writer.Finish(status)  // The first error of all of them.
//
// Files are written to a directory beside the checkpoint's, DIRECTORY.partial-RANDOM, which is
// moved into its place. One that a killed process left is removed by the next save there.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_WRITER_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_WRITER_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

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

// DIRECTORY.partial-RANDOM: a checkpoint that is being written, or was left by a killed process.
inline constexpr char kPartialSuffix[] = ".partial-";

// What a save may put itself in the place of.
enum class Replace : uint8_t {
  kOlder,  // A checkpoint of this job, or of the one that it goes on from, of no later step.
  kAny,    // Any checkpoint.
};

class CheckpointWriter {
 public:
  struct Target {
    std::string directory;
    Replace replace = Replace::kOlder;
    std::string resumed_uid;       // Of the job whose checkpoint was loaded last; empty: none.
    int64_t most_index_bytes = 0;  // MostIndexBytes: a larger index there is another job's.
  };

  // Touches nothing yet. The index is without files.
  CheckpointWriter(FileSystem& file_system, Target target, CheckpointIndex index);

  // FAILED_PRECONDITION if something is there that may not be replaced; INVALID_ARGUMENT for a
  // directory that no checkpoint can have.
  absl::Status Begin();
  absl::Status WritePlane(Plane plane, PlaneReader read);
  // Writes the index and moves the checkpoint into place, or, with an error, removes what there is.
  // Returns the bytes written.
  absl::StatusOr<int64_t> Finish(absl::Status status);

  const std::string& directory() const { return target_.directory; }
  const CheckpointIndex& index() const { return index_; }

  // How far it is; from any thread.
  int64_t size_bytes() const { return size_bytes_; }  // Of the planes.
  int64_t written_bytes() const { return written_bytes_.load(); }
  double SecondsSinceProgress() const;

 private:
  using Clock = std::chrono::steady_clock;

  absl::Status CheckReplaceable() const;
  void RemoveLeftovers();
  absl::Status MakePartial();
  absl::StatusOr<int64_t> WriteIndex();
  void Progress(int64_t bytes);

  FileSystem& file_system_;
  const Target target_;
  CheckpointIndex index_;
  int64_t size_bytes_ = 0;
  std::string partial_;  // Empty: not made.
  std::shared_ptr<const void> lock_;
  std::array<WrittenFile, kMaxPlanes> files_;  // Each written by the thread that has the plane.
  std::atomic<int64_t> written_bytes_ = 0;
  std::atomic<Clock::time_point> progress_ = Clock::now();
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_WRITER_H_
