#include "cpu_optimizer_service/common/rank_memory_layout.h"

#include "cpu_optimizer_service/common/rounding.h"

namespace ballast {
namespace {

// A cache line, so that no two chunks share one.
constexpr int64_t kPlaceAlignment = 64;
constexpr int64_t kPageBytes = 4096;

}  // namespace

RankMemoryLayout::RankMemoryLayout(const Layout& layout, const std::vector<GroupSpec>& groups,
                                   int rank)
    : gradients_(layout.chunks().size()), weights_(layout.chunks().size()) {
  // `end` goes on from the gradients to the weights; both parts are rounded up to whole pages.
  int64_t end = 0;
  const auto place_all = [&](std::vector<Place>& places, auto dtype_of) {
    for (const int chunk : layout.chunks_of_rank(rank)) {
      const Chunk& of = layout.chunks()[chunk];
      places[chunk] = {.offset_bytes = end,
                       .bytes = of.elements * SizeBytes(dtype_of(groups[of.group]))};
      end += RoundUp(places[chunk].bytes, kPlaceAlignment);
    }
    end = RoundUp(end, kPageBytes);
  };
  place_all(gradients_, [](const GroupSpec& group) { return group.wire_dtype; });
  weights_offset_bytes_ = end;
  place_all(weights_, [](const GroupSpec& group) { return group.return_dtype; });
  size_bytes_ = end;
}

}  // namespace ballast
