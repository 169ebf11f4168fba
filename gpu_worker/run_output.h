// What rank 0 leaves under --out: losses.csv, weights.bin, worker.json.
#ifndef BALLAST_GPU_WORKER_RUN_OUTPUT_H_
#define BALLAST_GPU_WORKER_RUN_OUTPUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gpu_worker/trainer.h"

namespace ballast::worker {

// Creates the directory, and finds out now whether it can be written.
absl::Status PrepareOutput(const std::string& directory);

struct RunFacts {
  std::vector<StepReport> reports;
  uint32_t micro_steps = 0;
  int workers = 0;
  std::string optimizer;
};

// The final bf16 weights of all parameters in order, little-endian, nothing between them.
std::string SerializeWeights(Model& model, const Layout& layout);
std::string Sha256Hex(const std::string& bytes);
std::string LossesCsv(absl::Span<const StepReport> reports);
std::string WorkerJson(const RunFacts& facts, const TrainingJob& job,
                       const std::string& weights_sha256);

// All files appear, whole, or, on an error such as a full disk, none.
absl::Status WriteOutput(const std::string& directory, const RunFacts& facts,
                         const TrainingJob& job, Model& model);

struct OutputFile {
  std::string name;
  std::string contents;
};
// Writes all files beside their places, then renames all.
absl::Status WriteFiles(const std::string& directory, absl::Span<const OutputFile> files);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_RUN_OUTPUT_H_
