#include "server/train/weight_message.h"

#include "cpu_optimizer_service/common/status.h"

namespace ballast::server {

absl::StatusOr<OwnedWeights> ReadWeights(Job& job, Generation generation, uint64_t step,
                                         int chunk) {
  const Chunk& place = job.layout().chunks()[chunk];
  const size_t size_bytes = place.elements * SizeBytes(job.spec().groups[place.group].return_dtype);
  // Not make_shared, which would first set to zero what ReadShard writes.
  OwnedWeights weights = {.memory = std::shared_ptr<std::byte[]>(new std::byte[size_bytes]),
                          .size_bytes = size_bytes};
  BALLAST_RETURN_IF_ERROR(
      job.ReadShard(generation, step, chunk, absl::MakeSpan(weights.memory.get(), size_bytes)));
  return weights;
}

}  // namespace ballast::server
