#include "gpu_worker/cuda/nccl_communicator.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {
namespace {

// A call gives its work to the stream within microseconds, and asking the library is a load of one
// word; only what waits for other ranks takes longer, and that is not worth a core.
constexpr std::chrono::microseconds kNoSleep(100);
constexpr std::chrono::microseconds kPollInterval(100);
constexpr absl::Duration kEndTimeout = absl::Seconds(10);

}  // namespace

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Connect(
    const Nccl& nccl, const ncclUniqueId& id, int rank, int world_size, absl::Duration timeout) {
  std::unique_ptr<NcclCommunicator> communicator(new NcclCommunicator(nccl, timeout));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  // Calls return ncclInProgress instead of waiting for other ranks. So the lock is never held for
  // long, and a wait can end by a timeout or an abort.
  config.blocking = 0;
  {
    MutexLock lock(communicator->mutex_);
    const ncclResult_t result =
        nccl.CommInitRankConfig(&communicator->communicator_, world_size, id, rank, &config);
    if (result != ncclSuccess && result != ncclInProgress) return communicator->ToStatus(result);
  }
  BALLAST_RETURN_IF_ERROR(communicator->AwaitProgress());
  return communicator;
}

// Together with the other ranks, so that none loses what it still reads; not for long, since one of
// them may be gone.
NcclCommunicator::~NcclCommunicator() {
  timeout_ = std::min(timeout_, kEndTimeout);
  const absl::Status together =
      Do([](const Nccl& nccl, ncclComm_t communicator) { return nccl.CommFinalize(communicator); });
  if (!together.ok()) {
    Abort();
    return;
  }
  MutexLock lock(mutex_);
  // After CommFinalize this frees what is left on this rank, and does not wait (nccl.h).
  (void)nccl_.CommDestroy(communicator_);
}

absl::Status NcclCommunicator::Do(
    const std::function<ncclResult_t(const Nccl&, ncclComm_t)>& call) {
  {
    MutexLock lock(mutex_);
    if (communicator_ == nullptr) return absl::UnavailableError("NCCL was aborted");
    const ncclResult_t result = call(nccl_, communicator_);
    if (result == ncclSuccess) return absl::OkStatus();
    if (result != ncclInProgress) return ToStatus(result);
  }
  return AwaitProgress();
}

absl::Status NcclCommunicator::AsyncError() {
  MutexLock lock(mutex_);
  if (communicator_ == nullptr) return absl::UnavailableError("NCCL was aborted");
  ncclResult_t state = ncclSuccess;
  if (const ncclResult_t result = nccl_.CommGetAsyncError(communicator_, &state);
      result != ncclSuccess) {
    return ToStatus(result);
  }
  // ncclInProgress is no error: a call of another thread goes on.
  return state == ncclSuccess || state == ncclInProgress ? absl::OkStatus() : ToStatus(state);
}

void NcclCommunicator::Abort() {
  MutexLock lock(mutex_);
  if (communicator_ == nullptr) return;
  (void)nccl_.CommAbort(communicator_);
  communicator_ = nullptr;
}

absl::Status NcclCommunicator::ToStatus(ncclResult_t result) const {
  return absl::UnavailableError(absl::StrCat("NCCL: ", nccl_.GetErrorString(result), " (",
                                             nccl_.GetLastError(communicator_),
                                             "); set NCCL_DEBUG=INFO for more"));
}

absl::Status NcclCommunicator::AwaitProgress() {
  const auto begun = std::chrono::steady_clock::now();
  // The lock is held for each question only, so that Abort comes in between.
  while (true) {
    {
      MutexLock lock(mutex_);
      if (communicator_ == nullptr) return absl::UnavailableError("NCCL was aborted");
      ncclResult_t state = ncclSuccess;
      if (const ncclResult_t result = nccl_.CommGetAsyncError(communicator_, &state);
          result != ncclSuccess) {
        return ToStatus(result);
      }
      if (state == ncclSuccess) return absl::OkStatus();
      if (state != ncclInProgress) return ToStatus(state);
    }
    const auto waited = std::chrono::steady_clock::now() - begun;
    if (waited >= absl::ToChronoNanoseconds(timeout_)) {
      return absl::DeadlineExceededError(
          absl::StrCat("NCCL waited ", absl::FormatDuration(timeout_),
                       " for the other ranks; see which of them is stuck or has ended"));
    }
    if (waited < kNoSleep) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPollInterval);
    }
  }
}

}  // namespace ballast::worker
