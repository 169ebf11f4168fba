#include "gpu_worker/pipeline/pinned_spans.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>

#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {
namespace {

uintptr_t PageOf(const std::byte* byte) { return reinterpret_cast<uintptr_t>(byte) / kPageBytes; }

// Joins what shares a page or touches, and so everything where the memory is one mapping.
std::vector<absl::Span<std::byte>> JoinSpans(std::vector<absl::Span<std::byte>> spans) {
  std::sort(spans.begin(), spans.end(), [](const auto& a, const auto& b) {
    // `<` has no defined result for pointers into different memory; std::less has.
    return std::less<const std::byte*>()(a.data(), b.data());
  });
  std::vector<absl::Span<std::byte>> joined;
  for (const absl::Span<std::byte> span : spans) {
    if (span.empty()) continue;
    if (!joined.empty()) {
      absl::Span<std::byte>& last = joined.back();
      if (PageOf(span.data()) <= PageOf(last.data() + last.size())) {
        // A gap between the two lies within one page, which is pinned whole anyway.
        last = {last.data(), static_cast<size_t>(span.data() + span.size() - last.data())};
        continue;
      }
    }
    joined.push_back(span);
  }
  return joined;
}

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<HostMemory>>> PinSpans(
    Device& device, std::vector<absl::Span<std::byte>> spans, absl::string_view what) {
  std::vector<std::unique_ptr<HostMemory>> pins;
  for (const absl::Span<std::byte> span : JoinSpans(std::move(spans))) {
    BALLAST_ASSIGN_OR_RETURN(pins.emplace_back(), device.PinHost(span, what));
  }
  return pins;
}

}  // namespace ballast::worker
