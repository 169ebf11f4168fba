#include "cpu_optimizer_service/job/step/chunk_update.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

#include "cpu_optimizer_service/common/packed/packed_state.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/rules/muon.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {
namespace {

const void* Advance(const void* data, DType dtype, int64_t elements) {
  return static_cast<const std::byte*>(data) + elements * SizeBytes(dtype);
}
void* Advance(void* data, DType dtype, int64_t elements) {
  return data == nullptr ? nullptr : static_cast<std::byte*>(data) + elements * SizeBytes(dtype);
}

bool HasRounds(const ChunkUpdate& update) { return HasTwoRounds(update.hyper_parameters->rule); }

// Elements of a chunk with equal update counts.
struct Elements {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t update_count = 0;  // 0: they stay as they are.
  int parameter = -1;        // One of theirs; in the second round theirs.
};

RuleRun RuleRunOf(const ChunkUpdate& update, const Elements& of) {
  return {.elements = of.count,
          .gradient = Advance(update.gradient.data, update.gradient.dtype, of.begin),
          .gradient_dtype = update.gradient.dtype,
          .shard = Advance(update.shard, update.shard_dtype, of.begin),
          .shard_dtype = update.shard_dtype,
          .values = update.hyper_parameters,
          .update_count = of.update_count,
          .multiplier = update.multiplier,
          .round = update.round};
}

// The new state from element `to_begin` of `update.to` on.
void UpdateRun(const ChunkUpdate& update, const Elements& of, int64_t to_begin) {
  const auto [begin, elements, update_count, parameter] = of;
  std::optional<RedoWriter> redo;
  if (update.redo != nullptr) {
    redo.emplace(*update.redo, static_cast<uint32_t>(update.chunk), begin);
  }
  RedoWriter* const record = redo.has_value() ? &*redo : nullptr;
  RuleRun run = RuleRunOf(update, of);
  if (update.from.format != StateFormat::kFloat32) {
    return UpdatePacked({.rule = run,
                         .from = update.from,
                         .to = update.to,
                         .from_begin = begin,
                         .to_begin = to_begin},
                        record);
  }
  if (update.round == Round::kSecond) {
    const std::vector<int64_t>& shape = update.layout->spec().parameters[parameter].shape;
    run.multiplier = static_cast<float>(AdjustmentOf(*run.values, shape[0], shape[1]));
  } else if (HasRounds(update) && update.from[Plane::kMaster] != update.to[Plane::kMaster]) {
    std::memcpy(update.to[Plane::kMaster] + to_begin, update.from[Plane::kMaster] + begin,
                elements * sizeof(float));
  }
  size_t place = 0;
  for (const Plane plane : PlanesOf(*update.hyper_parameters)) {
    run.from[place] = update.from[plane] + begin;
    run.to[place++] = update.to[plane] + to_begin;
  }
  UpdateByRule(run, record);
}

// Elements that this step does not touch: the new version holds what the old one did.
void KeepRun(const ChunkUpdate& update, int64_t begin, int64_t elements) {
  // In place nothing is copied, and so there is nothing to record in a redo lane either.
  CopyStored(update.from, update.to, begin, elements);
  // The rank gets the chunk's weights whole, with those that stay as they were.
  if (update.shard != nullptr) {
    ReadWeights(update.to, begin, elements, update.shard_dtype,
                Advance(update.shard, update.shard_dtype, begin));
  }
}

// Calls visit(elements) for runs that tile the chunk. Adjacent parameters with equal counts merge, so
// thousands of small ones cost what one large one does; in the second round they do not.
template <typename Visit>
void VisitRuns(const ChunkUpdate& update, absl::FunctionRef<int64_t(int)> update_count_of,
               const Visit& visit) {
  int64_t run_begin = 0;
  int64_t run_end = 0;
  int64_t run_count = 0;
  int run_parameter = -1;
  const auto finish_run = [&] {
    if (run_begin < run_end) {
      visit(Elements{run_begin, run_end - run_begin, run_count, run_parameter});
    }
    run_begin = run_end;
  };
  const auto keep_padding_until = [&](int64_t offset) {
    if (run_end == offset) return;
    finish_run();
    visit(Elements{run_end, offset - run_end});
    run_begin = run_end = offset;
  };
  update.layout->VisitParts(update.chunk, [&](const ChunkPart& part) {
    keep_padding_until(part.chunk_offset);
    const int64_t count = update_count_of(part.parameter);
    if (count != run_count || update.round == Round::kSecond) finish_run();
    run_count = count;
    run_parameter = part.parameter;
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

// The planes from cause to effect: the moments before the weight, which is not finite wherever one
// of them is not. So `look` takes places 1, 2, ... and then 0.
size_t PlaceInOrder(size_t number, size_t planes) { return (number + 1) % planes; }

}  // namespace

void UpdateChunk(const ChunkUpdate& update,
                 absl::FunctionRef<int64_t(int parameter)> update_count_of) {
  VisitRuns(update, update_count_of, [&](Elements run) {
    // What an earlier process has finished of this run. The rest has the same bits, since each
    // element's update depends on nothing of other elements.
    const int64_t done = std::clamp<int64_t>(update.done - run.begin, 0, run.count);
    if (done == run.count) return;
    run.begin += done;
    run.count -= done;
    if (run.update_count == 0) return KeepRun(update, run.begin, run.count);
    UpdateRun(update, run, run.begin);
  });
}

void MakeDirections(const ChunkUpdate& update,
                    absl::FunctionRef<int64_t(int parameter)> update_count_of,
                    absl::Span<uint16_t> directions) {
  VisitRuns(update, update_count_of, [&](const Elements& run) {
    uint16_t* const out = directions.data() + run.begin;
    if (run.update_count == 0) return void(std::fill_n(out, run.count, uint16_t{0}));
    RuleRun rule_run = {.elements = run.count,
                        .gradient = Advance(update.gradient.data, update.gradient.dtype, run.begin),
                        .gradient_dtype = update.gradient.dtype,
                        .shard = out,
                        .shard_dtype = DType::kBFloat16,
                        .values = update.hyper_parameters,
                        .update_count = run.update_count,
                        .multiplier = update.multiplier};
    rule_run.from[1] = update.from[Plane::kMomentumBuffer] + run.begin;
    UpdateByRule(rule_run);
  });
}

std::vector<Plane> PlanesWritten(const HyperParameters& values, Round round) {
  const PlaneList planes = PlanesOf(values);
  if (!HasTwoRounds(values.rule)) return {planes.begin(), planes.end()};
  return {round == Round::kFirst ? Plane::kMomentumBuffer : Plane::kMaster};
}

TrialUpdate TryUpdateChunk(const ChunkUpdate& update,
                           absl::FunctionRef<int64_t(int parameter)> update_count_of) {
  const PlaneList planes = PlanesOf(*update.hyper_parameters);
  const StateFormat format = update.from.format;
  std::array<uint32_t, kMaxPlanes> largest = {};
  TrialUpdate trial;
  // The planes of elements [begin, begin + elements), of which `slot` has the first at `offset`.
  const auto look = [&](const Slot& slot, int64_t offset, int64_t begin, int64_t elements) {
    for (size_t number = 0; number < planes.size(); ++number) {
      const size_t place = PlaceInOrder(number, planes.size());
      const Plane plane = planes[place];
      const float* const values = slot[plane] + offset;
      largest[place] = std::max(largest[place], LargestBits(values, elements));
      if (Holds(format, plane, std::bit_cast<float>(largest[place]))) continue;
      const float* const found = std::find_if(values, values + elements,
                                              [&](float x) { return !Holds(format, plane, x); });
      const int64_t element = begin + (found - values);
      // The first element, so that the reason does not depend on how a parameter is cut.
      if (trial.non_finite.has_value() && trial.non_finite->element <= element) continue;
      trial.non_finite = {.plane = planes[place], .element = element, .value = *found};
    }
  };
  std::array<std::array<float, kTrialElements>, kMaxPlanes> scratch;
  ChunkUpdate piece = update;
  piece.shard = nullptr;
  piece.to = {};
  for (size_t place = 0; place < planes.size(); ++place) {
    piece.to.planes[static_cast<size_t>(planes[place])] = scratch[place].data();
  }
  VisitRuns(update, update_count_of, [&](const Elements& run) {
    int64_t begin = run.begin;
    const int64_t end = begin + run.count;
    for (; begin < end && !trial.non_finite.has_value(); begin += kTrialElements) {
      const int64_t count = std::min(kTrialElements, end - begin);
      const Elements elements = {begin, count, run.update_count, run.parameter};
      if (format != StateFormat::kFloat32) {
        // As the packed kernel computes them, before they are packed.
        RuleRun values = RuleRunOf(piece, elements);
        for (size_t place = 0; place < planes.size(); ++place) {
          values.from[place] = values.to[place] = scratch[place].data();
          ReadPlane(update.from, planes[place], begin, absl::MakeSpan(scratch[place]).first(count));
        }
        if (run.update_count != 0) UpdateByRule(values);
        look(piece.to, 0, begin, count);
      } else if (run.update_count == 0) {
        // What stays as it is counts as well: the bounds are of all of the group's state.
        look(update.from, begin, begin, count);
      } else {
        // The kernel that the real update runs, so that its values are those that would be stored.
        UpdateRun(piece, elements, /*to_begin=*/0);
        look(piece.to, 0, begin, count);
      }
    }
  });
  if (trial.non_finite.has_value()) return trial;
  std::ranges::transform(largest, trial.largest.planes.begin(),
                         [](uint32_t bits) -> double { return std::bit_cast<float>(bits); });
  trial.largest = BoundsStored(trial.largest, format);
  return trial;
}

}  // namespace ballast
