#include "cpu_optimizer_service/job/chunk_update.h"

#include <cstddef>
#include <cstring>

#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {
namespace {

const void* Advance(const void* data, DType dtype, int64_t elements) {
  return static_cast<const std::byte*>(data) + elements * SizeBytes(dtype);
}
void* Advance(void* data, DType dtype, int64_t elements) {
  return data == nullptr ? nullptr : static_cast<std::byte*>(data) + elements * SizeBytes(dtype);
}

void UpdateRun(const ChunkUpdate& update, int64_t begin, int64_t elements, int64_t update_count) {
  const auto at = [&](const Slot& slot, Plane plane) -> float* {
    return slot[plane] == nullptr ? nullptr : slot[plane] + begin;
  };
  UpdateAdam({
      .elements = elements,
      .gradient = Advance(update.gradient.data, update.gradient.dtype, begin),
      .gradient_dtype = update.gradient.dtype,
      .master = at(update.from, Plane::kMaster),
      .exp_avg = at(update.from, Plane::kExpAvg),
      .exp_avg_sq = at(update.from, Plane::kExpAvgSq),
      .max_exp_avg_sq = at(update.from, Plane::kMaxExpAvgSq),
      .new_master = at(update.to, Plane::kMaster),
      .new_exp_avg = at(update.to, Plane::kExpAvg),
      .new_exp_avg_sq = at(update.to, Plane::kExpAvgSq),
      .new_max_exp_avg_sq = at(update.to, Plane::kMaxExpAvgSq),
      .shard = Advance(update.shard, update.shard_dtype, begin),
      .shard_dtype = update.shard_dtype,
      .scalars = MakeAdamScalars(*update.hyper_parameters, update_count, update.multiplier),
  });
}

// Elements that this step does not touch: the new version holds what the old one did.
void KeepRun(const ChunkUpdate& update, int64_t begin, int64_t elements) {
  for (size_t plane = 0; plane < update.from.planes.size(); ++plane) {
    const float* from = update.from.planes[plane];
    float* to = update.to.planes[plane];
    if (from != to) std::memcpy(to + begin, from + begin, elements * sizeof(float));
  }
  if (update.shard != nullptr) {
    ConvertFromFloat(update.to[Plane::kMaster] + begin,
                     Advance(update.shard, update.shard_dtype, begin), update.shard_dtype,
                     elements);
  }
}

}  // namespace

void UpdateChunk(const ChunkUpdate& update,
                 absl::FunctionRef<int64_t(int parameter)> update_count_of) {
  int64_t run_begin = 0;
  int64_t run_end = 0;
  int64_t run_count = 0;
  const auto finish_run = [&] {
    if (run_begin == run_end) return;
    if (run_count == 0) {
      KeepRun(update, run_begin, run_end - run_begin);
    } else {
      UpdateRun(update, run_begin, run_end - run_begin, run_count);
    }
    run_begin = run_end;
  };
  const auto keep_padding_until = [&](int64_t offset) {
    if (run_end == offset) return;
    finish_run();
    KeepRun(update, run_end, offset - run_end);
    run_begin = run_end = offset;
  };
  // Adjacent parameters with equal counts merge, so thousands of small ones cost what one large one
  // does.
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

}  // namespace ballast
