#include "gpu_worker/device/gloo_device_collective.h"

#include <functional>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/device/collective_error.h"

namespace ballast::worker {
namespace {

template <typename T>
absl::Span<T> As(absl::Span<std::byte> bytes) {
  return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
}

class GlooDeviceCollective final : public DeviceCollective {
 public:
  GlooDeviceCollective(Device& device, Collective& host) : device_(device), host_(host) {}
  // The last call's copies are from the staging memory.
  ~GlooDeviceCollective() override {
    if (returned_ != nullptr) (void)returned_->Synchronize();
  }

  int rank() const override { return host_.rank(); }
  int world_size() const override { return host_.world_size(); }

  absl::Status ReduceScatterSum(DeviceStream& stream, const float* input, float* shard,
                                int64_t shard_elements, const Purpose& purpose) override {
    const size_t shard_bytes = shard_elements * sizeof(float);
    return Named("reduce-scatter", purpose, [&]() -> absl::Status {
      BALLAST_RETURN_IF_ERROR(Reserve((world_size() + 1) * shard_bytes));
      // The host's reduce-scatter takes no shard within its input, so the sum has its own place.
      const absl::Span<std::byte> sum = staging_->bytes().subspan(0, shard_bytes);
      const absl::Span<std::byte> all =
          staging_->bytes().subspan(shard_bytes, world_size() * shard_bytes);
      BALLAST_RETURN_IF_ERROR(stream.CopyToHost(all, input));
      // The host's collective reads the bytes at once, so they must be there.
      BALLAST_RETURN_IF_ERROR(stream.Synchronize());
      BALLAST_RETURN_IF_ERROR(host_.ReduceScatterSum(As<float>(all), As<float>(sum)));
      BALLAST_RETURN_IF_ERROR(stream.CopyToDevice(shard, sum));
      return stream.Record(*returned_);
    });
  }

  absl::Status AllGather(DeviceStream& stream, const std::byte* shard, std::byte* all,
                         size_t shard_bytes, const Purpose& purpose) override {
    return Named("all-gather", purpose, [&]() -> absl::Status {
      BALLAST_RETURN_IF_ERROR(Reserve(world_size() * shard_bytes));
      const absl::Span<std::byte> gathered =
          staging_->bytes().subspan(0, world_size() * shard_bytes);
      // The shard is in its place among all, so the host's collective does not copy it.
      const absl::Span<std::byte> mine = gathered.subspan(rank() * shard_bytes, shard_bytes);
      BALLAST_RETURN_IF_ERROR(stream.CopyToHost(mine, shard));
      BALLAST_RETURN_IF_ERROR(stream.Synchronize());
      BALLAST_RETURN_IF_ERROR(host_.AllGather(mine, gathered));
      BALLAST_RETURN_IF_ERROR(stream.CopyToDevice(all, gathered));
      return stream.Record(*returned_);
    });
  }

  absl::Status Finish() override {
    return Named(last_operation_, last_purpose_, [this] {
      return returned_ == nullptr ? absl::OkStatus() : returned_->Synchronize();
    });
  }

 private:
  absl::Status Named(absl::string_view operation, const Purpose& purpose,
                     const std::function<absl::Status()>& work) {
    if (!failed_.ok()) return failed_;
    last_operation_ = operation;
    last_purpose_ = purpose;
    const absl::Status status = work();
    if (!status.ok()) failed_ = CollectiveError(rank(), operation, purpose, status);
    return failed_;
  }

  // The staging memory is free, of at least `size_bytes`.
  absl::Status Reserve(size_t size_bytes) {
    if (returned_ == nullptr) {
      BALLAST_ASSIGN_OR_RETURN(returned_, device_.CreateEvent());
    }
    // The device may still be reading the result of the last call.
    BALLAST_RETURN_IF_ERROR(returned_->Synchronize());
    if (staging_ != nullptr && staging_->bytes().size() >= size_bytes) return absl::OkStatus();
    // Before the new memory is made, so that the host never needs room for both.
    staging_.reset();
    BALLAST_ASSIGN_OR_RETURN(staging_, device_.AllocateHost(size_bytes, "collectives"));
    return absl::OkStatus();
  }

  Device& device_;
  Collective& host_;
  std::unique_ptr<HostMemory> staging_;
  std::unique_ptr<DeviceEvent> returned_;  // What was staged last is on the device.
  absl::string_view last_operation_;       // Names a failure that only Finish sees.
  Purpose last_purpose_;
  absl::Status failed_;
};

}  // namespace

std::unique_ptr<DeviceCollective> MakeGlooDeviceCollective(Device& device, Collective& host) {
  return std::make_unique<GlooDeviceCollective>(device, host);
}

}  // namespace ballast::worker
