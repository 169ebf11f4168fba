// A batch's tokens on their way to the device, through two alternating halves of pinned memory.
#ifndef BALLAST_GPU_WORKER_GPT_TOKEN_UPLOAD_H_
#define BALLAST_GPU_WORKER_GPT_TOKEN_UPLOAD_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gpu_worker/base/data.h"
#include "gpu_worker/cuda/kernels/embedding.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker {

// Valid until the next upload in the same stream.
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

  // The host's part of the next Upload, if that is of the same batch; for when the device is busy.
  // `batch` may end when the call returns. If necessary, waits for the copies of the Upload before
  // the last.
  absl::Status Prepare(const Batch& batch);
  bool IsPrepared(const Batch& batch) const;
  // Prepares the batch if needed. Every call gets the same stream.
  absl::StatusOr<TokensOnDevice> Upload(DeviceStream& stream, const Batch& batch);

  int64_t device_bytes() const { return static_cast<int64_t>(on_device_->size_bytes()); }

 private:
  struct Half {
    std::unique_ptr<HostMemory> memory;
    std::unique_ptr<DeviceEvent> copied;
  };
  // In the next half of the host's memory.
  struct Prepared {
    TokensOnDevice tokens;
    absl::Span<const int32_t> inputs;
    absl::Span<const int32_t> targets;
    int64_t used_elements = 0;
  };
  TokenUpload(std::unique_ptr<DeviceMemory> on_device, std::array<Half, 2> halves)
      : on_device_(std::move(on_device)), halves_(std::move(halves)) {}

  const std::unique_ptr<DeviceMemory> on_device_;
  std::array<Half, 2> halves_;
  size_t next_ = 0;
  std::optional<Prepared> prepared_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_GPT_TOKEN_UPLOAD_H_
