#include "gpu_worker/gpt/token_upload.h"

#include <algorithm>

#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/check.h"

namespace ballast::worker {
namespace {

// Arrays begin at multiples of so many elements, as memory of their own would.
constexpr int64_t kAlignElements = 256 / sizeof(int32_t);

int64_t Aligned(int64_t elements) {
  return (elements + kAlignElements - 1) / kAlignElements * kAlignElements;
}

// Inputs, targets, and the three arrays of cuda::TokenRows, which are longest where no token occurs
// twice.
int64_t CapacityElements(int64_t rows) { return 4 * Aligned(rows) + Aligned(rows + 1); }

}  // namespace

absl::StatusOr<std::unique_ptr<TokenUpload>> TokenUpload::Create(Device& device, int64_t rows) {
  const size_t size_bytes = CapacityElements(rows) * sizeof(int32_t);
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMemory> on_device,
                           device.Allocate(size_bytes, "tokens"));
  std::array<Half, 2> halves;
  for (Half& half : halves) {
    BALLAST_ASSIGN_OR_RETURN(half.memory, device.AllocateHost(size_bytes, "tokens"));
    BALLAST_ASSIGN_OR_RETURN(half.copied, device.CreateEvent());
  }
  return std::unique_ptr<TokenUpload>(new TokenUpload(std::move(on_device), std::move(halves)));
}

absl::StatusOr<TokensOnDevice> TokenUpload::Upload(DeviceStream& stream, const Batch& batch) {
  Half& half = halves_[next_];
  next_ = 1 - next_;
  BALLAST_RETURN_IF_ERROR(half.copied->Synchronize());

  const absl::Span<std::byte> bytes = half.memory->bytes();
  auto* const host = reinterpret_cast<int32_t*>(bytes.data());
  auto* const device = on_device_->as<int32_t>();
  int64_t used = 0;
  const auto add = [&](absl::Span<const int32_t> values) -> const int32_t* {
    const int64_t begin = used;
    used += Aligned(static_cast<int64_t>(values.size()));
    Check(used * sizeof(int32_t) <= bytes.size(), "tokens fit the memory made for them");
    std::copy(values.begin(), values.end(), host + begin);
    return device + begin;
  };
  const cuda::TokenRows rows = cuda::GroupByToken(batch.inputs);
  const TokensOnDevice tokens = {.inputs = add(batch.inputs),
                                 .targets = add(batch.targets),
                                 .rows_of_inputs = {
                                     .distinct_tokens = static_cast<int>(rows.tokens.size()),
                                     .tokens = add(rows.tokens),
                                     .begins = add(rows.begins),
                                     .rows = add(rows.rows),
                                 }};
  // The stream still reads the last tokens; work given to it now runs after that.
  BALLAST_RETURN_IF_ERROR(stream.CopyToDevice(device, bytes.subspan(0, used * sizeof(int32_t))));
  BALLAST_RETURN_IF_ERROR(stream.Record(*half.copied));
  return tokens;
}

}  // namespace ballast::worker
