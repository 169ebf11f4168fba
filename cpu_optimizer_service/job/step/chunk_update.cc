#include "cpu_optimizer_service/job/step/chunk_update.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {
namespace {

const void* Advance(const void* data, DType dtype, int64_t elements) {
  return static_cast<const std::byte*>(data) + elements * SizeBytes(dtype);
}
void* Advance(void* data, DType dtype, int64_t elements) {
  return data == nullptr ? nullptr : static_cast<std::byte*>(data) + elements * SizeBytes(dtype);
}

// Elements [begin, begin + elements), the new state from element `to_begin` of `update.to` on.
void UpdateRun(const ChunkUpdate& update, int64_t begin, int64_t elements, int64_t update_count,
               int64_t to_begin) {
  RuleRun run = {.elements = elements,
                 .gradient = Advance(update.gradient.data, update.gradient.dtype, begin),
                 .gradient_dtype = update.gradient.dtype,
                 .shard = Advance(update.shard, update.shard_dtype, begin),
                 .shard_dtype = update.shard_dtype,
                 .values = update.hyper_parameters,
                 .update_count = update_count,
                 .multiplier = update.multiplier};
  size_t place = 0;
  for (const Plane plane : PlanesOf(*update.hyper_parameters)) {
    run.from[place] = update.from[plane] + begin;
    run.to[place++] = update.to[plane] + to_begin;
  }
  if (update.redo == nullptr) return UpdateByRule(run);
  RedoWriter redo(*update.redo, static_cast<uint32_t>(update.chunk), begin);
  UpdateByRule(run, &redo);
}

// Elements that this step does not touch: the new version holds what the old one did.
void KeepRun(const ChunkUpdate& update, int64_t begin, int64_t elements) {
  // In place nothing is copied, and so there is nothing to record in a redo lane either.
  for (const Plane plane : PlanesOf(*update.hyper_parameters)) {
    const float* from = update.from[plane];
    float* to = update.to[plane];
    if (from != to) std::memcpy(to + begin, from + begin, elements * sizeof(float));
  }
  // The rank gets the chunk's weights whole, with those that stay as they were.
  if (update.shard != nullptr) {
    ConvertFromFloat(update.to[Plane::kMaster] + begin,
                     Advance(update.shard, update.shard_dtype, begin), update.shard_dtype,
                     elements);
  }
}

// Calls visit(begin, elements, update_count) for runs of elements that tile the chunk; the count is
// 0 for elements that are left as they are. Adjacent parameters with equal counts merge, so
// thousands of small ones cost what one large one does.
template <typename Visit>
void VisitRuns(const ChunkUpdate& update, absl::FunctionRef<int64_t(int)> update_count_of,
               const Visit& visit) {
  int64_t run_begin = 0;
  int64_t run_end = 0;
  int64_t run_count = 0;
  const auto finish_run = [&] {
    if (run_begin < run_end) visit(run_begin, run_end - run_begin, run_count);
    run_begin = run_end;
  };
  const auto keep_padding_until = [&](int64_t offset) {
    if (run_end == offset) return;
    finish_run();
    visit(run_end, offset - run_end, int64_t{0});
    run_begin = run_end = offset;
  };
  update.layout->VisitParts(update.chunk, [&](const ChunkPart& part) {
    keep_padding_until(part.chunk_offset);
    const int64_t count = update_count_of(part.parameter);
    if (count != run_count) finish_run();
    run_count = count;
    run_end = part.chunk_offset + part.elements;
    return true;
  });
  keep_padding_until(update.layout->chunks()[update.chunk].elements);
  finish_run();
}

// Four planes of so many elements are 32 KiB.
constexpr int64_t kTrialElements = 2048;  // Their new state stays in the cache.

// The largest magnitude as an integer, in whose order NaN and infinity come last.
uint32_t LargestBits(const float* values, int64_t elements) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < elements; ++i) {
    largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
  }
  return largest;
}

constexpr uint32_t kInfinityBits = 0x7f800000;
// The planes from cause to effect: the moments before the weight, which is not finite wherever one
// of them is not. So `look` takes places 1, 2, ... and then 0.
size_t PlaceInOrder(size_t number, size_t planes) { return (number + 1) % planes; }

}  // namespace

void UpdateChunk(const ChunkUpdate& update,
                 absl::FunctionRef<int64_t(int parameter)> update_count_of) {
  VisitRuns(update, update_count_of, [&](int64_t begin, int64_t elements, int64_t update_count) {
    // What an earlier process has finished of this run. The rest has the same bits, since each
    // element's update depends on nothing of other elements.
    const int64_t done = std::clamp<int64_t>(update.done - begin, 0, elements);
    if (done == elements) return;
    if (update_count == 0) return KeepRun(update, begin + done, elements - done);
    UpdateRun(update, begin + done, elements - done, update_count, begin + done);
  });
}

TrialUpdate TryUpdateChunk(const ChunkUpdate& update,
                           absl::FunctionRef<int64_t(int parameter)> update_count_of) {
  const PlaneList planes = PlanesOf(*update.hyper_parameters);
  std::array<uint32_t, kMaxPlanes> largest = {};
  TrialUpdate trial;
  // The planes of elements [begin, begin + elements), of which `slot` has the first at `offset`.
  const auto look = [&](const Slot& slot, int64_t offset, int64_t begin, int64_t elements) {
    for (size_t number = 0; number < planes.size(); ++number) {
      const size_t place = PlaceInOrder(number, planes.size());
      const float* const values = slot[planes[place]] + offset;
      largest[place] = std::max(largest[place], LargestBits(values, elements));
      if (largest[place] < kInfinityBits) continue;
      const float* const found =
          std::find_if(values, values + elements, [](float x) { return !std::isfinite(x); });
      const int64_t element = begin + (found - values);
      // The first element, so that the reason does not depend on how a parameter is cut.
      if (trial.non_finite.has_value() && trial.non_finite->element <= element) continue;
      trial.non_finite = {.plane = planes[place], .element = element, .value = *found};
    }
  };
  std::array<std::array<float, kTrialElements>, kMaxPlanes> scratch;
  ChunkUpdate piece = update;
  piece.shard = nullptr;
  VisitRuns(update, update_count_of, [&](int64_t begin, int64_t elements, int64_t update_count) {
    const int64_t end = begin + elements;
    for (; begin < end && !trial.non_finite.has_value(); begin += kTrialElements) {
      const int64_t count = std::min(kTrialElements, end - begin);
      if (update_count == 0) {
        // What stays as it is counts as well: the bounds are of all of the group's state.
        look(update.from, begin, begin, count);
        continue;
      }
      for (size_t place = 0; place < planes.size(); ++place) {
        piece.to.planes[static_cast<size_t>(planes[place])] = scratch[place].data();
      }
      // The kernel that the real update runs, so that its values are those that would be stored.
      UpdateRun(piece, begin, count, update_count, /*to_begin=*/0);
      look(piece.to, 0, begin, count);
    }
  });
  if (trial.non_finite.has_value()) return trial;
  std::ranges::transform(largest, trial.largest.planes.begin(),
                         [](uint32_t bits) -> double { return std::bit_cast<float>(bits); });
  return trial;
}

}  // namespace ballast
