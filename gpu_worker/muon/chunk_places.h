// The places of a rank's chunks of matrices in one run of memory, in bf16.
#ifndef BALLAST_GPU_WORKER_MUON_CHUNK_PLACES_H_
#define BALLAST_GPU_WORKER_MUON_CHUNK_PLACES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/rule.h"
#include "gpu_worker/training/training_job.h"

namespace ballast::worker {

class ChunkPlaces {
 public:
  ChunkPlaces(const TrainingJob& job, int rank) : places_(job.layout.chunks().size()) {
    for (const int index : job.layout.chunks_of_rank(rank)) {
      const Chunk& chunk = job.layout.chunks()[index];
      if (!HasTwoRounds(job.spec.groups[chunk.group].hyper_parameters.rule)) continue;
      places_[index] = {size_bytes_, static_cast<size_t>(chunk.elements) * kElementBytes};
      size_bytes_ += places_[index].size_bytes;
    }
  }

  static constexpr size_t kElementBytes = SizeBytes(DType::kBFloat16);
  size_t size_bytes() const { return size_bytes_; }
  absl::Span<std::byte> In(absl::Span<std::byte> memory, int chunk) const {
    return memory.subspan(places_[chunk].begin, places_[chunk].size_bytes);
  }
  // Elements of a chunk from `offset` on.
  absl::Span<std::byte> In(absl::Span<std::byte> memory, int chunk, int64_t offset,
                           int64_t elements) const {
    return In(memory, chunk).subspan(offset * kElementBytes, elements * kElementBytes);
  }

 private:
  struct Place {
    size_t begin = 0;
    size_t size_bytes = 0;
  };
  std::vector<Place> places_;  // By chunk; empty for others.
  size_t size_bytes_ = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_MUON_CHUNK_PLACES_H_
