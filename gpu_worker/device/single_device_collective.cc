#include "gpu_worker/device/single_device_collective.h"

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/device/collective_error.h"

namespace ballast::worker {
namespace {

class SingleDeviceCollective final : public DeviceCollective {
 public:
  explicit SingleDeviceCollective(Device& device) : device_(device) {}

  int rank() const override { return 0; }
  int world_size() const override { return 1; }

  absl::Status ReduceScatterSum(DeviceStream& stream, const float* input, float* shard,
                                int64_t shard_elements, const Purpose& purpose) override {
    return Copy(stream, "reduce-scatter", shard, input, shard_elements * sizeof(float), purpose);
  }
  absl::Status AllGather(DeviceStream& stream, const std::byte* shard, std::byte* all,
                         size_t shard_bytes, const Purpose& purpose) override {
    return Copy(stream, "all-gather", all, shard, shard_bytes, purpose);
  }
  absl::Status Finish() override {
    for (auto& [stream, last] : last_) {
      if (!failed_.ok()) break;
      const absl::Status status = last.done->Synchronize();
      if (!status.ok()) failed_ = CollectiveError(0, last.operation, last.purpose, status);
    }
    return failed_;
  }

 private:
  // The last call that a stream was given.
  struct Last {
    std::unique_ptr<DeviceEvent> done;
    absl::string_view operation;
    Purpose purpose;
  };

  absl::Status Copy(DeviceStream& stream, absl::string_view operation, void* to, const void* from,
                    size_t size_bytes, const Purpose& purpose) {
    if (!failed_.ok()) return failed_;
    const absl::Status status = Give(stream, operation, to, from, size_bytes, purpose);
    if (!status.ok()) failed_ = CollectiveError(0, operation, purpose, status);
    return failed_;
  }

  absl::Status Give(DeviceStream& stream, absl::string_view operation, void* to, const void* from,
                    size_t size_bytes, const Purpose& purpose) {
    if (to != from) BALLAST_RETURN_IF_ERROR(stream.CopyOnDevice(to, from, size_bytes));
    // One event for each stream, because Finish waits for all of them. It is recorded also if
    // nothing was copied: the call is done only when the stream has come so far.
    Last& last = last_[&stream];
    if (last.done == nullptr) {
      BALLAST_ASSIGN_OR_RETURN(last.done, device_.CreateEvent());
    }
    last.operation = operation;
    last.purpose = purpose;
    return stream.Record(*last.done);
  }

  Device& device_;
  absl::flat_hash_map<const DeviceStream*, Last> last_;
  absl::Status failed_;
};

}  // namespace

std::unique_ptr<DeviceCollective> MakeSingleDeviceCollective(Device& device) {
  return std::make_unique<SingleDeviceCollective>(device);
}

}  // namespace ballast::worker
