#include "server/train/weight_message.h"

#include <vector>

#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::server {

namespace {

// Not make_shared, which would first set to zero what is written next.
OwnedWeights Owned(size_t size_bytes) {
  return {.memory = std::shared_ptr<std::byte[]>(new std::byte[size_bytes]),
          .size_bytes = size_bytes};
}

}  // namespace

absl::StatusOr<v1::ReadWeightsResponse> MakeFirstMessage(Job& job, uint64_t step, bool directions) {
  v1::ReadWeightsResponse message;
  message.set_step(step);
  if (!directions) return message;
  BALLAST_ASSIGN_OR_RETURN(const std::vector<HyperParameters> values, job.ValuesOfDirections(step));
  for (const HyperParameters& of_group : values) {
    *message.add_hyper_parameters() = proto::ToProto(of_group);
  }
  return message;
}

absl::StatusOr<OwnedWeights> ReadWeights(Job& job, Generation generation, uint64_t step,
                                         int chunk) {
  const Chunk& place = job.layout().chunks()[chunk];
  OwnedWeights weights =
      Owned(place.elements * SizeBytes(job.spec().groups[place.group].return_dtype));
  BALLAST_RETURN_IF_ERROR(job.ReadShard(generation, step, chunk,
                                        absl::MakeSpan(weights.memory.get(), weights.size_bytes)));
  return weights;
}

absl::StatusOr<OwnedWeights> ReadDirections(Job& job, uint64_t step, int chunk) {
  OwnedWeights directions =
      Owned(job.layout().chunks()[chunk].elements * SizeBytes(DType::kBFloat16));
  BALLAST_RETURN_IF_ERROR(job.ReadDirections(
      step, chunk, absl::MakeSpan(directions.memory.get(), directions.size_bytes)));
  return directions;
}

}  // namespace ballast::server
