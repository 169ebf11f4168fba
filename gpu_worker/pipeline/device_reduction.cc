#include "gpu_worker/pipeline/device_reduction.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/cuda/kernels/gradient.h"

namespace ballast::worker {

absl::StatusOr<std::unique_ptr<DeviceReduction>> DeviceReduction::Create(
    const Parts& parts, std::vector<float*> gradients, bool check) {
  std::unique_ptr<DeviceReduction> self(new DeviceReduction(parts, std::move(gradients)));
  if (!check) return self;
  // Positions count the elements of all parameters, so that one number has the order of (parameter,
  // element).
  uint64_t before = 0;
  for (size_t p = 0; p < parts.job.layout.spec().parameters.size(); ++p) {
    self->elements_before_.push_back(before);
    before += parts.job.layout.place(p).elements;
  }
  BALLAST_ASSIGN_OR_RETURN(self->first_,
                           parts.device.Allocate(sizeof(uint64_t), "the search for infinities"));
  BALLAST_ASSIGN_OR_RETURN(self->host_,
                           parts.device.AllocateHost(sizeof(Found), "the search for infinities"));
  BALLAST_ASSIGN_OR_RETURN(self->searched_, parts.device.CreateEvent());
  // `none` does not change: each search begins with a copy of it.
  new (self->host_->bytes().data()) Found{.none = cuda::kNoneNonFinite};
  return self;
}

absl::StatusOr<const float*> DeviceReduction::Reduce(int index, uint64_t step) {
  const Bucket& bucket = parts_.job.buckets[index];
  float* space = gradients_[bucket.group];
  // Before the reduction: a sum over ranks does not show which rank has the element.
  if (first_ != nullptr) BALLAST_RETURN_IF_ERROR(FindNonFinite(index, space));
  float* input = space + bucket.begin;
  float* shard = input + parts_.collective.rank() * bucket.shard_elements;
  BALLAST_RETURN_IF_ERROR(parts_.collective.ReduceScatterSum(
      parts_.communicate, input, shard, bucket.shard_elements, {.step = step, .bucket = index}));
  return shard;
}

absl::Status DeviceReduction::Round(int bucket, int64_t elements, const float* from,
                                    std::byte* to) {
  return cuda::RoundGradient(parts_.communicate, elements, from, group(bucket).wire_dtype, to);
}

std::optional<NonFinite> DeviceReduction::TakeNonFinite() {
  return std::exchange(non_finite_, std::nullopt);
}

// Waits for the search, because the reduction writes over what was found: the passes go on
// meanwhile, and it is done only where it is asked for.
absl::Status DeviceReduction::FindNonFinite(int index, const float* space) {
  DeviceStream& stream = parts_.communicate;
  const Bucket& bucket = parts_.job.buckets[index];
  Found& found = *reinterpret_cast<Found*>(host_->bytes().data());
  uint64_t* first = first_->as<uint64_t>();
  const auto bytes_of = [](auto& value) {
    return absl::Span<std::byte>(reinterpret_cast<std::byte*>(&value), sizeof(value));
  };
  BALLAST_RETURN_IF_ERROR(stream.CopyToDevice(first, bytes_of(found.none)));
  for (const int p : parts_.order.parameters_of_bucket[index]) {
    const ParameterPlace& place = parts_.job.layout.place(p);
    const int64_t begin = std::max(place.offset, bucket.begin);
    const int64_t end = std::min(place.offset + place.elements, bucket.end);
    BALLAST_RETURN_IF_ERROR(
        cuda::FindNonFinite(stream, end - begin, space + begin, group(index).wire_dtype,
                            elements_before_[p] + (begin - place.offset), first));
  }
  BALLAST_RETURN_IF_ERROR(stream.CopyToHost(bytes_of(found.position), first));
  BALLAST_RETURN_IF_ERROR(stream.Record(*searched_));
  BALLAST_RETURN_IF_ERROR(searched_->Synchronize());
  if (found.position == cuda::kNoneNonFinite) return absl::OkStatus();

  // The last parameter that begins at or before the position. A parameter of no elements begins
  // where the next one does, and is passed over.
  const auto after =
      std::upper_bound(elements_before_.begin(), elements_before_.end(), found.position);
  const int parameter = static_cast<int>(after - elements_before_.begin()) - 1;
  const int64_t element = static_cast<int64_t>(found.position - elements_before_[parameter]);
  if (!ComesFirst(parameter, element, non_finite_)) return absl::OkStatus();
  // The search finds positions only; the value is still in its place, because the reduction has not
  // been given.
  BALLAST_RETURN_IF_ERROR(stream.CopyToHost(
      bytes_of(found.value), space + parts_.job.layout.place(parameter).offset + element));
  BALLAST_RETURN_IF_ERROR(stream.Record(*searched_));
  BALLAST_RETURN_IF_ERROR(searched_->Synchronize());
  non_finite_ = {.parameter = parameter,
                 .element = element,
                 .value = Rounded(found.value, group(index).wire_dtype)};
  return absl::OkStatus();
}

}  // namespace ballast::worker
