#include "cpu_optimizer_service/common/plan/memory_need.h"

#include <algorithm>

#include "cpu_optimizer_service/common/norm/exact_sum.h"
#include "cpu_optimizer_service/common/norm/norm_blocks.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/rules/newton_schulz.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/common/step_settings.h"

namespace ballast {
namespace {

// Planes of large chunks lie a little further apart than their size, a power of two as a rule: an
// update walks through all of them at once, and at the same place of each they would meet in the
// same sets of the caches and the same banks of memory. 1.36 in place of 1.29 Gparam/s on one
// thread.
constexpr int64_t kPlaneGapBytes = 17 * kArenaAlignment;
constexpr int64_t kLargePlaneBytes = int64_t{1} << 18;
// Updated weights on their way out: enough to keep a connection busy while the update goes on.
constexpr int64_t kWeightBuffers = 32;
// Of a layout with a mesh: spaces, what lies in them, and padding.
constexpr int64_t kBytesOfSpace = 64;
constexpr int64_t kTableBytesOfChunk = 384;

// Descriptions, tables and records, by what they grow with; generous, since small beside the rest.
int64_t TableBytes(const JobSpec& spec, const Layout& layout) {
  int64_t bytes =
      kTableBytesOfChunk * static_cast<int64_t>(layout.chunks().size()) + 512 * layout.world_size();
  bytes += static_cast<int64_t>(kRecentSteps * sizeof(HyperParameters) * spec.groups.size());
  bytes += ShardTableBytes(spec.layout);
  for (const ParameterSpec& parameter : spec.layout.parameters) {
    // A step keeps up to kMaxUsedSets sets of used parameters, each with a bit for every parameter.
    bytes += 512 + static_cast<int64_t>(kMaxUsedSets / 8) +
             3 * static_cast<int64_t>(parameter.name.size() + 8 * parameter.shape.size());
  }
  return bytes;
}

}  // namespace

int64_t StoredPlaneBytes(StateFormat format, Plane stored, int64_t elements) {
  const int64_t bytes = AlignUp(StoredBytes(format, stored, elements));
  return bytes + (bytes >= kLargePlaneBytes ? kPlaneGapBytes : 0);
}

int64_t SlotBytes(int64_t elements, PlaneList planes, StateFormat format) {
  int64_t bytes = 0;
  for (const Plane stored : StoredPlanesOf(planes, format)) {
    bytes += StoredPlaneBytes(format, stored, elements);
  }
  return bytes;
}

std::vector<PlaneList> PlanesByGroup(const JobSpec& spec) {
  std::vector<PlaneList> planes;
  for (const GroupSpec& group : spec.groups) planes.push_back(PlanesOf(group.hyper_parameters));
  return planes;
}

int64_t StateBytes(const Layout& layout, absl::Span<const PlaneList> planes) {
  int64_t bytes = 0;
  for (const Chunk& chunk : layout.chunks()) {
    bytes += SlotBytes(chunk.elements, planes[chunk.group], chunk.format);
  }
  return bytes;
}

int64_t GradientBytes(const JobSpec& spec, const Layout& layout) {
  int64_t bytes = 0;
  for (const Chunk& chunk : layout.chunks()) {
    bytes += AlignUp(chunk.elements * SizeBytes(spec.groups[chunk.group].wire_dtype));
  }
  return bytes;
}

int64_t DirectionBytes(const JobSpec& spec, const Layout& layout) {
  int64_t bytes = 0;
  for (const Chunk& chunk : layout.chunks()) {
    if (!HasTwoRounds(spec.groups[chunk.group].hyper_parameters.rule)) continue;
    bytes += 2 * AlignUp(chunk.elements * SizeBytes(DType::kBFloat16));
  }
  return bytes;
}

int64_t NewtonSchulzBytes(const JobSpec& spec) {
  int64_t elements = 0;
  for (const ParameterSpec& parameter : spec.layout.parameters) {
    if (!parameter.trainable || parameter.shape.size() != 2) continue;
    if (!HasTwoRounds(spec.groups[parameter.group].hyper_parameters.rule)) continue;
    elements = std::max(elements, NewtonSchulzScratch(parameter.shape[0], parameter.shape[1]));
  }
  return elements * static_cast<int64_t>(sizeof(float));
}

int64_t AccumulatorBytes(const JobSpec& spec, const Layout& layout) {
  // Where a step has only one micro-step, its gradient stays in the format in which it came.
  if (spec.max_micro_steps == 1) return 0;
  return layout.total_elements() * static_cast<int64_t>(sizeof(float));
}

int64_t SquareSumBytes(const Layout& layout) {
  return NormBlocks::Bytes(layout) + NormBlocks::CountOf(layout) * int64_t{sizeof(double)} +
         static_cast<int64_t>(layout.chunks().size() * sizeof(ExactSum));
}

int64_t WeightBufferBytes(const JobSpec& spec, const Layout& layout) {
  // A buffer takes the weights of any chunk, so each is as large as the largest needs.
  int64_t bytes = 0;
  for (const Chunk& chunk : layout.chunks()) {
    bytes = std::max(bytes, chunk.elements * SizeBytes(spec.groups[chunk.group].return_dtype));
  }
  return bytes;
}

int64_t WeightBufferCount(const Layout& layout) {
  return std::min<int64_t>(kWeightBuffers, static_cast<int64_t>(layout.chunks().size()));
}

int64_t ShardTableBytes(const LayoutSpec& layout) {
  if (layout.mesh.empty()) return 0;
  return layout.world_size * (kBytesOfSpace * layout.group_count +
                              kBytesOfShard * static_cast<int64_t>(layout.parameters.size()));
}

int64_t ChunkTableBytes(const LayoutSpec& layout) {
  double full = 0;  // Chunks. Sizes are any numbers yet, also such as give no number here.
  for (const ParameterSpec& parameter : layout.parameters) {
    double elements = parameter.trainable ? 1 : 0;
    for (const int64_t size : parameter.shape) elements *= static_cast<double>(size);
    full += elements / static_cast<double>(layout.chunk_elements);
  }
  if (!(full >= 0 && full <= kMaxChunks)) return 0;
  // Each range, or each rank's part of a group, ends with a chunk that may be smaller. So does one where
  // the format of the state changes.
  int64_t ends = layout.mesh.empty() ? static_cast<int64_t>(layout.partitions.size())
                                     : int64_t{layout.world_size} * layout.group_count;
  for (const ParameterSpec& parameter : layout.parameters) {
    if (layout.is_packed(parameter.group)) ends += layout.mesh.empty() ? 1 : layout.world_size;
  }
  return kTableBytesOfChunk * std::min<int64_t>(static_cast<int64_t>(full) + ends, kMaxChunks);
}

MemoryNeed NeedOf(const JobSpec& spec, const Layout& layout) {
  MemoryNeed need;
  need.state_bytes = StateBytes(layout, PlanesByGroup(spec));
  need.gradient_bytes = GradientBytes(spec, layout) + DirectionBytes(spec, layout);
  need.accumulator_bytes = AccumulatorBytes(spec, layout);
  if (spec.update_mode == UpdateMode::kSpeculate) {
    // The provisional update, its task, its second version.
    need.speculation_bytes =
        need.state_bytes + kTableBytesOfChunk * static_cast<int64_t>(layout.chunks().size());
  }
  if (spec.keep_previous) {
    constexpr int64_t kPreviousBytesOfChunk = 128;  // The version, and its words.
    need.previous_bytes =
        need.state_bytes + kPreviousBytesOfChunk * static_cast<int64_t>(layout.chunks().size());
  }
  need.other_bytes = WeightBufferBytes(spec, layout) * WeightBufferCount(layout) +
                     SquareSumBytes(layout) + NewtonSchulzBytes(spec) + TableBytes(spec, layout);
  return need;
}

}  // namespace ballast
