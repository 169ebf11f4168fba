// The places of a rank's gradients and weights in the memory that its process shares with a service
// on the same host. Both ends compute them from the job's description, so messages have no offsets.
//
//   | gradient of chunk c0 | of c1 | ... |pad to a page| weights of c0 | of c1 | ... |pad to a page|
//
// In the order of the rank's chunks: gradients in their group's wire dtype, weights in its return
// dtype, each aligned to 64 bytes.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RANK_MEMORY_LAYOUT_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RANK_MEMORY_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"

namespace ballast {

class RankMemoryLayout {
 public:
  struct Place {
    int64_t offset_bytes = -1;  // -1: another rank's chunk.
    int64_t bytes = 0;
  };

  RankMemoryLayout(const Layout& layout, const std::vector<GroupSpec>& groups, int rank);

  const Place& gradient(int chunk) const { return gradients_[chunk]; }
  const Place& weights(int chunk) const { return weights_[chunk]; }
  int64_t weights_offset_bytes() const { return weights_offset_bytes_; }  // Where they begin.
  int64_t size_bytes() const { return size_bytes_; }                      // Whole pages of 4096.

 private:
  std::vector<Place> gradients_;  // By chunk of the job.
  std::vector<Place> weights_;
  int64_t weights_offset_bytes_ = 0;
  int64_t size_bytes_ = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RANK_MEMORY_LAYOUT_H_
