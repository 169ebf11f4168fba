// All-gathers a small value of each rank.
#ifndef BALLAST_GPU_WORKER_COLLECTIVE_SHARE_H_
#define BALLAST_GPU_WORKER_COLLECTIVE_SHARE_H_

#include <cstddef>
#include <type_traits>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/collective/collective.h"

namespace ballast::worker {

// By rank. An all-gather.
template <typename T>
absl::StatusOr<std::vector<T>> Share(const T& mine, Collective& collective) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all(collective.world_size());
  BALLAST_RETURN_IF_ERROR(
      collective.AllGather({reinterpret_cast<const std::byte*>(&mine), sizeof(T)},
                           {reinterpret_cast<std::byte*>(all.data()), all.size() * sizeof(T)}));
  return all;
}

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_COLLECTIVE_SHARE_H_
