// The weights of a checkpoint in the form in which Hugging Face's libraries store a model: one file,
// model.safetensors, or model-00001-of-00003.safetensors and so on with the index
// model.safetensors.index.json. The other direction is Checkpoint::OpenWeights.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_WEIGHTS_EXPORT_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_WEIGHTS_EXPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/host/file_system.h"

namespace ballast {

struct ExportRequest {
  std::string checkpoint;  // A checkpoint, or a folder of them, of which the newest is taken.
  std::string directory;   // New, or empty.
  DType dtype = DType::kBFloat16;
  // A file ends before the tensor with which it would have more; one tensor is never divided.
  int64_t most_file_bytes = 5'000'000'000;
};

struct ExportedWeights {
  std::string checkpoint;  // Which it was.
  std::string job;
  uint64_t step = 0;
  int64_t tensors = 0;
  int64_t bytes = 0;  // Of all tensors.
  std::vector<std::string> files;
  // Newer checkpoints that are damaged, and how: a line each.
  std::vector<std::string> passed_over;
};

// Trainable parameters alone: of frozen ones a checkpoint has nothing. The directory appears whole
// or not at all; a process that is killed leaves DIRECTORY.partial-RANDOM. FAILED_PRECONDITION:
// there is something in it, or a weight is beyond what the dtype has. Else as OpenNewest.
absl::StatusOr<ExportedWeights> ExportWeights(FileSystem& file_system,
                                              const ExportRequest& request);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_WEIGHTS_EXPORT_H_
