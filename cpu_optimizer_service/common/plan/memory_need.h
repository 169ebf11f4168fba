// A job's need of a service's memory. The engine allocates by these functions, and `ballast plan`
// uses them.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PLAN_MEMORY_NEED_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PLAN_MEMORY_NEED_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/plane.h"
#include "cpu_optimizer_service/common/rounding.h"

namespace ballast {

// What the engine allocates for a job, in bytes.
struct MemoryNeed {
  int64_t state_bytes = 0;        // the planes of each group
  int64_t gradient_bytes = 0;     // one contribution of every chunk, in the wire dtype; directions
  int64_t accumulator_bytes = 0;  // fp32 sums, unless max_micro_steps is 1
  int64_t speculation_bytes = 0;  // second versions of all chunks, if the job speculates
  int64_t previous_bytes = 0;     // previous versions of all chunks, if the job keeps them
  int64_t other_bytes = 0;        // shard buffers, block sums, tables
  int64_t total_bytes() const {
    return state_bytes + gradient_bytes + accumulator_bytes + speculation_bytes + previous_bytes +
           other_bytes;
  }
};
MemoryNeed NeedOf(const JobSpec& spec, const Layout& layout);

// The parts of it, in bytes.
inline constexpr int64_t kArenaAlignment = 64;
inline constexpr int64_t AlignUp(int64_t bytes) { return RoundUp(bytes, kArenaAlignment); }
// In a version of a chunk: what is stored of a plane, and all of it.
int64_t StoredPlaneBytes(StateFormat format, Plane stored, int64_t elements);
int64_t SlotBytes(int64_t elements, PlaneList planes, StateFormat format);
std::vector<PlaneList> PlanesByGroup(const JobSpec& spec);
int64_t StateBytes(const Layout& layout, absl::Span<const PlaneList> planes);  // All chunks.
int64_t GradientBytes(const JobSpec& spec, const Layout& layout);
// Of groups with rules of two rounds: their directions and O, and scratch memory for the largest
// matrix.
int64_t DirectionBytes(const JobSpec& spec, const Layout& layout);
int64_t NewtonSchulzBytes(const JobSpec& spec);
int64_t AccumulatorBytes(const JobSpec& spec, const Layout& layout);
int64_t SquareSumBytes(const Layout& layout);
// Buffers for outgoing weights: the size of one, and their number.
int64_t WeightBufferBytes(const JobSpec& spec, const Layout& layout);
int64_t WeightBufferCount(const Layout& layout);
inline constexpr int64_t kBytesOfShard = 96;
int64_t ShardTableBytes(const LayoutSpec& layout);  // 0 without a mesh.
// The maximal size of a layout's other tables. It is known before the layout is made, because a few
// bytes can describe a million chunks. 0 if there would be more than kMaxChunks, which no layout
// has.
int64_t ChunkTableBytes(const LayoutSpec& layout);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PLAN_MEMORY_NEED_H_
