// Weights of a chunk as sent.
#ifndef BALLAST_SERVER_TRAIN_WEIGHT_MESSAGE_H_
#define BALLAST_SERVER_TRAIN_WEIGHT_MESSAGE_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/v1/train.pb.h"
#include "cpu_optimizer_service/job/job.h"

namespace ballast::server {

inline v1::WeightHeader MakeWeightHeader(uint64_t step, int chunk, bool provisional = false) {
  v1::WeightHeader header;
  header.set_step(step);
  header.set_chunk(static_cast<uint32_t>(chunk));
  header.set_provisional(provisional);
  return header;
}

// The first message of an answer: the step, and of directions the values that O is made with.
// Returns the errors of Job::ValuesOfDirections.
absl::StatusOr<v1::ReadWeightsResponse> MakeFirstMessage(Job& job, uint64_t step, bool directions);

// A chunk's weights in their own memory.
struct OwnedWeights {
  std::shared_ptr<std::byte[]> memory;
  size_t size_bytes = 0;
  absl::Span<const std::byte> bytes() const { return {memory.get(), size_bytes}; }
};
// Returns the errors of Job::ReadShard. The chunk must exist.
absl::StatusOr<OwnedWeights> ReadWeights(Job& job, Generation generation, uint64_t step, int chunk);
// The same of Job::ReadDirections.
absl::StatusOr<OwnedWeights> ReadDirections(Job& job, uint64_t step, int chunk);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRAIN_WEIGHT_MESSAGE_H_
