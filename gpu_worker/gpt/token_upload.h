// The tokens of a batch on their way to the device, through two halves of pinned memory in turn.
#ifndef BALLAST_GPU_WORKER_GPT_TOKEN_UPLOAD_H_
#define BALLAST_GPU_WORKER_GPT_TOKEN_UPLOAD_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gpu_worker/base/data.h"
#include "gpu_worker/cuda/kernels/embedding.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker {

// Until the next upload in the same stream.
struct TokensOnDevice {
  const int32_t* inputs = nullptr;
  const int32_t* targets = nullptr;
  cuda::TokenRowsOnDevice rows_of_inputs;
};

// Threads: one caller at a time. Destroyed once its copies are done.
class TokenUpload {
 public:
  // For batches of up to `rows` tokens. Errors: those of Device::Allocate and AllocateHost.
  static absl::StatusOr<std::unique_ptr<TokenUpload>> Create(Device& device, int64_t rows);

  // `batch` may go when the call returns. Waits, if it must, for the copies of the call before the
  // last. Every call is given the same stream.
  absl::StatusOr<TokensOnDevice> Upload(DeviceStream& stream, const Batch& batch);

  int64_t device_bytes() const { return static_cast<int64_t>(on_device_->size_bytes()); }

 private:
  struct Half {
    std::unique_ptr<HostMemory> memory;
    std::unique_ptr<DeviceEvent> copied;
  };
  TokenUpload(std::unique_ptr<DeviceMemory> on_device, std::array<Half, 2> halves)
      : on_device_(std::move(on_device)), halves_(std::move(halves)) {}

  const std::unique_ptr<DeviceMemory> on_device_;
  std::array<Half, 2> halves_;
  size_t next_ = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_GPT_TOKEN_UPLOAD_H_
