// An NCCL communicator that blocks its callers no longer than a timeout. One thread can abort it
// while another is in a call.
#ifndef BALLAST_GPU_WORKER_CUDA_NCCL_COMMUNICATOR_H_
#define BALLAST_GPU_WORKER_CUDA_NCCL_COMMUNICATOR_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "gpu_worker/cuda/libraries.h"

namespace ballast::worker {

// Thread-safe. Errors are UNAVAILABLE or DEADLINE_EXCEEDED, with NCCL's message.
class NcclCommunicator {
 public:
  // All ranks call it; the current GPU is this rank's.
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Connect(const Nccl& nccl,
                                                                   const ncclUniqueId& id, int rank,
                                                                   int world_size,
                                                                   absl::Duration timeout);
  ~NcclCommunicator();

  // Makes a call of the library, and waits until it has given its work to the stream.
  absl::Status Do(const std::function<ncclResult_t(const Nccl&, ncclComm_t)>& call);
  // An error that the library detected by itself, for example a lost rank; else OK.
  absl::Status AsyncError();
  // Makes the GPU drop all work, and every later call fail. A second call does nothing.
  void Abort();

 private:
  NcclCommunicator(const Nccl& nccl, absl::Duration timeout) : nccl_(nccl), timeout_(timeout) {}
  absl::Status ToStatus(ncclResult_t result) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AwaitProgress();

  const Nccl& nccl_;
  absl::Duration timeout_;
  // Held during the library's calls, which do not block. An abort frees memory that another
  // thread's call would use.
  Mutex mutex_;
  ncclComm_t communicator_ ABSL_GUARDED_BY(mutex_) = nullptr;  // Null: aborted.
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_CUDA_NCCL_COMMUNICATOR_H_
