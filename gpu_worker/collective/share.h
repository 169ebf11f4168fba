// All-gathers a small value or text of each rank.
#ifndef BALLAST_GPU_WORKER_COLLECTIVE_SHARE_H_
#define BALLAST_GPU_WORKER_COLLECTIVE_SHARE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
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

// The same for texts of any length.
inline absl::StatusOr<std::vector<std::string>> ShareText(const std::string& mine,
                                                          Collective& collective) {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<uint64_t> sizes,
                           Share(uint64_t{mine.size()}, collective));
  const size_t longest = *std::max_element(sizes.begin(), sizes.end());
  if (longest == 0) return std::vector<std::string>(sizes.size());
  std::string padded = mine;
  padded.resize(longest);
  std::string all(longest * sizes.size(), '\0');
  BALLAST_RETURN_IF_ERROR(
      collective.AllGather({reinterpret_cast<const std::byte*>(padded.data()), padded.size()},
                           {reinterpret_cast<std::byte*>(all.data()), all.size()}));
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    texts.push_back(all.substr(rank * longest, sizes[rank]));
  }
  return texts;
}

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_COLLECTIVE_SHARE_H_
