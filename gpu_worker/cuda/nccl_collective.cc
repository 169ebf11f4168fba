#include "gpu_worker/cuda/nccl_collective.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/collective/share.h"
#include "gpu_worker/cuda/gpu_stream.h"
#include "gpu_worker/cuda/libraries.h"
#include "gpu_worker/cuda/nccl_communicator.h"
#include "gpu_worker/device/watchdog.h"

namespace ballast::worker {
namespace {

class NcclCollective final : public DeviceCollective {
 public:
  NcclCollective(CudaDevice& device, int rank, int world_size,
                 std::unique_ptr<NcclCommunicator> communicator, absl::Duration timeout)
      : device_(device),
        rank_(rank),
        world_size_(world_size),
        communicator_(std::move(communicator)),
        watchdog_({.rank = rank,
                   .timeout = timeout,
                   .library_error = [this] { return communicator_->AsyncError(); },
                   .abort = [this] { communicator_->Abort(); }}) {}

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }

  absl::Status ReduceScatterSum(DeviceStream& stream, const float* input, float* shard,
                                int64_t shard_elements, const Purpose& purpose) override {
    return Do("reduce-scatter", purpose, stream,
              [=](const Nccl& nccl, ncclComm_t communicator, cudaStream_t native) {
                return nccl.ReduceScatter(input, shard, static_cast<size_t>(shard_elements),
                                          ncclFloat32, ncclSum, communicator, native);
              });
  }

  absl::Status AllGather(DeviceStream& stream, const std::byte* shard, std::byte* all,
                         size_t shard_bytes, const Purpose& purpose) override {
    return Do("all-gather", purpose, stream,
              [=](const Nccl& nccl, ncclComm_t communicator, cudaStream_t native) {
                // As bytes: a gather computes nothing, so the format is of no account.
                return nccl.AllGather(shard, all, shard_bytes, ncclUint8, communicator, native);
              });
  }

  absl::Status Finish() override { return watchdog_.Wait(); }

 private:
  absl::Status Do(absl::string_view operation, const Purpose& purpose, DeviceStream& stream,
                  const std::function<ncclResult_t(const Nccl&, ncclComm_t, cudaStream_t)>& call) {
    // An error of an earlier call is returned before more work is given. This also makes events of
    // finished calls free for TakeEvent.
    BALLAST_RETURN_IF_ERROR(watchdog_.Look());
    auto& gpu = static_cast<GpuStream&>(stream);
    BALLAST_ASSIGN_OR_RETURN(const cudaStream_t native, gpu.Enter());
    std::unique_ptr<DeviceEvent> done = watchdog_.TakeEvent();
    if (done == nullptr) {
      BALLAST_ASSIGN_OR_RETURN(done, device_.CreateEvent());
    }
    const absl::Status given = communicator_->Do([&](const Nccl& nccl, ncclComm_t communicator) {
      return call(nccl, communicator, native);
    });
    if (!given.ok()) {
      // If the GPU is lost, NCCL says only that its call failed; the GPU's own error says more.
      const absl::Status lost = gpu.CheckGpu(operation);
      return watchdog_.Fail(operation, purpose, lost.ok() ? given : lost);
    }
    if (absl::Status recorded = stream.Record(*done); !recorded.ok()) {
      // NCCL has the work, whose end nobody would notice.
      return watchdog_.Fail(operation, purpose, recorded);
    }
    return watchdog_.Watch(operation, purpose, std::move(done));
  }

  CudaDevice& device_;
  const int rank_;
  const int world_size_;
  const std::unique_ptr<NcclCommunicator> communicator_;
  Watchdog watchdog_;  // Last: its thread uses the communicator.
};

// Rank 0's, on every rank; its error too.
absl::StatusOr<ncclUniqueId> ShareUniqueId(const Nccl& nccl, Collective& host) {
  struct Offer {
    uint64_t made = 0;
    ncclUniqueId id = {};
  };
  Offer offer;
  if (host.rank() == 0) offer.made = nccl.GetUniqueId(&offer.id) == ncclSuccess;
  BALLAST_RETURN_IF_ERROR(host.Broadcast({reinterpret_cast<std::byte*>(&offer), sizeof(offer)}));
  // The offer is the same on all ranks, so all return here or none.
  if (offer.made == 0) {
    return absl::UnavailableError(absl::StrCat(
        "NCCL on rank 0 offers no address (", host.rank() == 0 ? nccl.GetLastError(nullptr) : "",
        "); set NCCL_SOCKET_IFNAME there, or use --collective=gloo"));
  }
  return offer.id;
}

}  // namespace

absl::StatusOr<bool> ShareGpus(const CudaDevice& device, Collective& host) {
  BALLAST_ASSIGN_OR_RETURN(auto uuids, Share(device.uuid(), host));
  std::sort(uuids.begin(), uuids.end());
  return std::adjacent_find(uuids.begin(), uuids.end()) != uuids.end();
}

absl::StatusOr<std::unique_ptr<DeviceCollective>> ConnectNccl(CudaDevice& device, Collective& host,
                                                              absl::Duration timeout) {
  BALLAST_ASSIGN_OR_RETURN(const bool shared, ShareGpus(device, host));
  if (shared) {
    return absl::FailedPreconditionError(
        "two ranks use one GPU, which NCCL refuses; start fewer, or use --collective=gloo");
  }
  const absl::StatusOr<const Nccl*> nccl = LoadNccl();
  // A rank without NCCL tells the others before it returns: else they would wait for it in the next
  // broadcast, until the timeout.
  BALLAST_ASSIGN_OR_RETURN(const std::vector<uint64_t> loaded, Share(uint64_t{nccl.ok()}, host));
  BALLAST_RETURN_IF_ERROR(nccl.status());
  for (size_t rank = 0; rank < loaded.size(); ++rank) {
    if (loaded[rank] == 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", rank, " has no NCCL; install it there, or use --collective=gloo"));
    }
  }
  BALLAST_ASSIGN_OR_RETURN(const ncclUniqueId id, ShareUniqueId(**nccl, host));
  // NCCL uses the GPU that is current in the calling thread.
  BALLAST_RETURN_IF_ERROR(device.MakeCurrent());
  absl::StatusOr<std::unique_ptr<NcclCommunicator>> communicator =
      NcclCommunicator::Connect(**nccl, id, host.rank(), host.world_size(), timeout);
  if (!communicator.ok()) {
    return Annotate(communicator.status(), absl::StrCat("rank ", host.rank(), ": connecting"));
  }
  return std::make_unique<NcclCollective>(device, host.rank(), host.world_size(),
                                          *std::move(communicator), timeout);
}

}  // namespace ballast::worker
