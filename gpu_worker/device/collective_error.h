// The form of a DeviceCollective's errors.
#ifndef BALLAST_GPU_WORKER_DEVICE_COLLECTIVE_ERROR_H_
#define BALLAST_GPU_WORKER_DEVICE_COLLECTIVE_ERROR_H_

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "gpu_worker/device/device_collective.h"

namespace ballast::worker {

// "rank 1: reduce-scatter of bucket 3, step 7: <the error>". An error of the host's Collective
// already begins with the rank and the operation; they are not repeated.
inline absl::Status CollectiveError(int rank, absl::string_view operation, const Purpose& purpose,
                                    const absl::Status& error) {
  absl::string_view reason = error.message();
  absl::ConsumePrefix(&reason, absl::StrCat("rank ", rank, ": ", operation, ": "));
  absl::Status named(error.code(), absl::StrCat("rank ", rank, ": ", operation, " of ",
                                                purpose.ToString(), ": ", reason));
  error.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { named.SetPayload(url, payload); });
  return named;
}

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_DEVICE_COLLECTIVE_ERROR_H_
