#include "gpu_worker/pipeline/device_spaces.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/device/matmul.h"

namespace ballast::worker {
namespace {

constexpr int64_t kWeightBytes = sizeof(BFloat16Bits);
constexpr int64_t kGradientBytes = sizeof(float);

absl::StatusOr<DeviceSpaces> Allocate(Device& device, const TrainingJob& job) {
  // Allocate returns zeros, and no pass writes the padding after the last parameter. So it is zeros
  // that ranks reduce and push from there.
  DeviceSpaces spaces;
  for (const int64_t elements : job.group_elements) {
    BALLAST_ASSIGN_OR_RETURN(spaces.weights.emplace_back(),
                             device.Allocate(elements * kWeightBytes, "weights"));
    BALLAST_ASSIGN_OR_RETURN(spaces.gradients.emplace_back(),
                             device.Allocate(elements * kGradientBytes, "gradients"));
  }
  return spaces;
}

std::string Gib(int64_t bytes) {
  return absl::StrCat(static_cast<double>(bytes >> 20) / 1024, " GiB");
}

}  // namespace

std::vector<absl::Span<std::byte>> DeviceSpaces::WeightBytes() const {
  std::vector<absl::Span<std::byte>> bytes;
  for (const auto& space : weights) bytes.push_back({space->data(), space->size_bytes()});
  return bytes;
}

absl::StatusOr<DeviceSpaces> AllocateSpaces(Device& device, const TrainingJob& job,
                                            const DeviceNeeds& needs) {
  absl::StatusOr<DeviceSpaces> spaces = Allocate(device, job);
  if (!spaces.ok()) return ExplainMemory(spaces.status(), job, needs);
  return spaces;
}

absl::Status ExplainMemory(const absl::Status& status, const TrainingJob& job,
                           const DeviceNeeds& needs) {
  // The host's memory may be too small with the same code.
  if (ReasonOf(status) != reason::kDeviceMemoryFull) return status;
  int64_t elements = 0;
  for (const int64_t of_group : job.group_elements) elements += of_group;
  std::string sizes = absl::StrCat(Gib(elements * kWeightBytes), " for weights, ",
                                   Gib(elements * kGradientBytes), " for gradients");
  // WeightsReturn allocates a buffer for the shards of this rank.
  if (needs.provisional_weights) {
    absl::StrAppend(&sizes, ", ", Gib(elements * kWeightBytes / needs.world_size),
                    " for provisional weights (none with --update=wait)");
  }
  if (job.spec.newton_schulz == Orthogonalizer::kWorkers) {
    absl::StrAppend(&sizes,
                    ", and the largest matrix of each rank (none with --newton-schulz=service)");
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(status.message(), "; besides the activations the model needs ", sizes,
                   "; give micro-steps fewer sequences, or choose a smaller model or another GPU"));
}

}  // namespace ballast::worker
