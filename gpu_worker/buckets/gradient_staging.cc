#include "gpu_worker/buckets/gradient_staging.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {

GradientStaging::GradientStaging(const Layout& layout, std::vector<DType> wire_dtypes, int rank,
                                 absl::Duration timeout)
    : layout_(layout),
      wire_dtypes_(std::move(wire_dtypes)),
      timeout_(timeout),
      places_(layout, wire_dtypes_, rank) {}

absl::StatusOr<GradientStaging::Payload> GradientStaging::Fill(int chunk, uint32_t micro_step,
                                                               absl::Span<const float> values) {
  absl::StatusOr<absl::Span<std::byte>> place = places_.Await(chunk, timeout_);
  if (!place.ok()) {
    return Annotate(place.status(),
                    absl::StrCat("micro-step ", micro_step, "; see whether the optimizer runs"));
  }
  const DType dtype = wire_dtypes_[layout_.chunks()[chunk].group];
  Check(place->size() == values.size() * SizeBytes(dtype), "a payload fills its slot");
  for (size_t i = 0; i < values.size(); ++i) StoreElement(place->data(), dtype, i, values[i]);
  return Payload{.bytes = *place, .released = places_.Lend(chunk)};
}

}  // namespace ballast::worker
