#include "gpu_worker/gpt/token_upload.h"

#include <algorithm>
#include <utility>

#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {
namespace {

// Arrays begin at multiples of so many elements, as memory of their own would.
constexpr int64_t kAlignElements = 256 / sizeof(int32_t);

int64_t Aligned(int64_t elements) { return RoundUp(elements, kAlignElements); }

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

bool TokenUpload::IsPrepared(const Batch& batch) const {
  return prepared_.has_value() && prepared_->inputs == absl::MakeConstSpan(batch.inputs) &&
         prepared_->targets == absl::MakeConstSpan(batch.targets);
}

absl::Status TokenUpload::Prepare(const Batch& batch) {
  if (IsPrepared(batch)) return absl::OkStatus();
  // This comes before the memory is written: after an error nothing may pass for prepared that is
  // half there.
  prepared_.reset();
  Half& half = halves_[next_];
  // The device may still copy out of this half, of the upload before the last.
  BALLAST_RETURN_IF_ERROR(half.copied->Synchronize());

  const absl::Span<std::byte> bytes = half.memory->bytes();
  auto* const host = reinterpret_cast<int32_t*>(bytes.data());
  auto* const device = on_device_->as<int32_t>();
  int64_t used = 0;
  // An array has the same offset in the half and on the device, so one copy brings all of them.
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
  // The spans are of the copy in this half, not of `batch`, which may be gone when IsPrepared
  // compares another with it.
  prepared_ = Prepared{.tokens = tokens,
                       .inputs = {host, batch.inputs.size()},
                       .targets = {host + (tokens.targets - device), batch.targets.size()},
                       .used_elements = used};
  return absl::OkStatus();
}

absl::StatusOr<TokensOnDevice> TokenUpload::Upload(DeviceStream& stream, const Batch& batch) {
  BALLAST_RETURN_IF_ERROR(Prepare(batch));
  const Prepared prepared = *std::exchange(prepared_, std::nullopt);
  Half& half = halves_[next_];
  // The other half may be filled at once, while this one is copied.
  next_ = 1 - next_;
  // The stream still reads the last tokens; work given to it now runs after that.
  BALLAST_RETURN_IF_ERROR(stream.CopyToDevice(
      on_device_->data(),
      half.memory->bytes().subspan(0, prepared.used_elements * sizeof(int32_t))));
  BALLAST_RETURN_IF_ERROR(stream.Record(*half.copied));
  return prepared.tokens;
}

}  // namespace ballast::worker
