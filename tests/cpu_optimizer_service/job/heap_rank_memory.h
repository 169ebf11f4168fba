// Memory of this process in the place of memory that is shared with a rank.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_HEAP_RANK_MEMORY_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_HEAP_RANK_MEMORY_H_

#include <algorithm>
#include <cstddef>
#include <memory>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/rank_memory_layout.h"
#include "cpu_optimizer_service/gradients/rank_memory.h"

namespace ballast {

class HeapRankMemory final : public RankMemory {
 public:
  HeapRankMemory(const Layout& layout, const JobSpec& spec, int rank)
      : places_(layout, spec.groups, rank),
        pages_(new Page[places_.size_bytes() / sizeof(Page)]()) {}

  absl::Span<const std::byte> gradient(int chunk) const override {
    return At(places_.gradient(chunk));
  }
  absl::Span<std::byte> weights(int chunk) const override { return At(places_.weights(chunk)); }

  // What the rank's process does.
  void WriteGradient(int chunk, absl::Span<const std::byte> payload) const {
    std::copy(payload.begin(), payload.end(), At(places_.gradient(chunk)).begin());
  }
  // The same against its word, while the service may be reading. The race is meant, so
  // ThreadSanitizer does not get to see it.
  __attribute__((no_sanitize("thread"))) void ScribbleGradient(
      int chunk, absl::Span<const std::byte> payload) const {
    volatile std::byte* to = At(places_.gradient(chunk)).data();
    for (size_t i = 0; i < payload.size(); ++i) to[i] = payload[i];
  }
  // Whoever reads gradients here from now on reads NaN.
  void Poison() const { std::fill(bytes(), bytes() + places_.size_bytes(), std::byte{0xff}); }

 private:
  struct alignas(64) Page {
    std::byte bytes[4096];
  };

  // Of all pages, not of the first one's array alone.
  std::byte* bytes() const { return reinterpret_cast<std::byte*>(pages_.get()); }
  absl::Span<std::byte> At(const RankMemoryLayout::Place& place) const {
    return absl::MakeSpan(bytes() + place.offset_bytes, static_cast<size_t>(place.bytes));
  }

  const RankMemoryLayout places_;
  const std::unique_ptr<Page[]> pages_;
};

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_HEAP_RANK_MEMORY_H_
