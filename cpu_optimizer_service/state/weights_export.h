// The weights of a checkpoint in the form of Hugging Face's libraries: one file, model.safetensors;
// or model-00001-of-00003.safetensors and so on, with the index model.safetensors.index.json. The
// other direction is Checkpoint::OpenWeights.
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
  std::string checkpoint;  // A checkpoint, or a folder: then the newest one.
  std::string directory;   // New, or empty.
  DType dtype = DType::kBFloat16;
  // A file ends before the tensor that would exceed this; a tensor is never divided.
  int64_t most_file_bytes = 5'000'000'000;
};

struct ExportedWeights {
  std::string checkpoint;  // The exported one.
  std::string job;
  uint64_t step = 0;
  int64_t tensors = 0;
  int64_t bytes = 0;  // Of all tensors.
  std::vector<std::string> files;
  // Newer damaged ones, and their damage, one a line.
  std::vector<std::string> passed_over;
};

// Only trainable parameters: checkpoints have no frozen ones. The directory appears whole or not at
// all; a killed process leaves DIRECTORY.partial-RANDOM. FAILED_PRECONDITION: the directory is not
// empty, or a weight overflows the dtype. Other errors as in OpenNewest.
absl::StatusOr<ExportedWeights> ExportWeights(FileSystem& file_system,
                                              const ExportRequest& request);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_WEIGHTS_EXPORT_H_
