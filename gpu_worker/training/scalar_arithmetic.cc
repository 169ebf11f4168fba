#include "gpu_worker/training/scalar_arithmetic.h"

#include <algorithm>
#include <utility>

#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/rules/adam.h"

namespace ballast::worker {

ScalarArithmetic::ScalarArithmetic(const std::vector<GroupSpec>& groups, const Layout& layout,
                                   WeightsAt weights)
    : layout_(layout), weights_(std::move(weights)), chunks_(layout.chunks().size()) {
  for (const GroupSpec& group : groups) {
    dtypes_.push_back({.wire = group.wire_dtype, .weights = group.return_dtype});
  }
}

absl::Status ScalarArithmetic::SetFirstWeights(int index, absl::Span<const float> values) {
  ChunkState& state = chunks_[index];
  for (std::vector<float>* plane : {&state.gradient, &state.exp_avg, &state.exp_avg_sq}) {
    plane->assign(values.size(), 0.0f);
  }
  state.master.assign(values.begin(), values.end());
  // The passes compute with the rounded weights, from the first step on.
  const absl::Span<std::byte> weights = weights_(index);
  const DType weights_dtype = dtypes(index).weights;
  for (size_t i = 0; i < values.size(); ++i) {
    StoreElement(weights.data(), weights_dtype, i, values[i]);
  }
  return absl::OkStatus();
}

absl::Status ScalarArithmetic::AddGradients(std::vector<Addition> additions) {
  for (const Addition& addition : additions) {
    std::vector<float>& sum = chunks_[addition.chunk].gradient;
    const DType wire_dtype = dtypes(addition.chunk).wire;
    for (size_t i = 0; i < sum.size(); ++i) {
      const float gradient = LoadElement(addition.payload.data(), wire_dtype, i);
      // The first is assigned: what the step before left is still there.
      sum[i] = addition.first ? gradient : sum[i] + gradient;
    }
    // The payload has been read.
    if (addition.released) addition.released();
  }
  return absl::OkStatus();
}

absl::Status ScalarArithmetic::ZeroGradient(int index) {
  std::vector<float>& sum = chunks_[index].gradient;
  std::fill(sum.begin(), sum.end(), 0.0f);
  return absl::OkStatus();
}

template <typename Visit>
void ScalarArithmetic::VisitRun(int chunk, int64_t begin, int64_t elements, Visit&& visit) const {
  // In the chunk after the first a run begins with the first element.
  for (; elements > 0; ++chunk, begin = 0) {
    const int64_t here = std::min(elements, layout_.chunks()[chunk].elements - begin);
    visit(chunk, begin, here);
    elements -= here;
  }
}

absl::Status ScalarArithmetic::BlockSums(absl::Span<const BlocksInChunks> runs,
                                         absl::Span<double> sums) {
  auto sum = sums.begin();
  std::vector<float> gradient;  // Of a run, which blocks may cross from chunk to chunk.
  for (const BlocksInChunks& run : runs) {
    gradient.clear();
    VisitRun(run.chunk, run.begin, run.elements, [&](int chunk, int64_t begin, int64_t elements) {
      const auto from = chunks_[chunk].gradient.begin() + begin;
      gradient.insert(gradient.end(), from, from + elements);
    });
    // A run begins with a block, so blocks are found by counting from there.
    for (int64_t at = 0; at < run.elements; at += kBlockElements) {
      *sum++ = BlockSumOfSquaresReference(gradient.data() + at, DType::kFloat32,
                                          std::min(kBlockElements, run.elements - at));
    }
  }
  return absl::OkStatus();
}

absl::Status ScalarArithmetic::ReadGradient(int index, int64_t begin, absl::Span<float> values) {
  std::copy_n(chunks_[index].gradient.begin() + begin, values.size(), values.begin());
  return absl::OkStatus();
}

absl::Status ScalarArithmetic::Update(int index, int64_t begin, int64_t elements,
                                      const AdamScalars& scalars) {
  VisitRun(index, begin, elements, [&](int chunk, int64_t from, int64_t here) {
    UpdateInChunk(chunk, from, here, scalars);
  });
  return absl::OkStatus();
}

void ScalarArithmetic::UpdateInChunk(int index, int64_t begin, int64_t elements,
                                     const AdamScalars& scalars) {
  ChunkState& state = chunks_[index];
  const DType weights_dtype = dtypes(index).weights;
  // The update is in place: an element is read before it is written, and no other depends on it.
  UpdateAdamReference({.elements = elements,
                       .gradient = state.gradient.data() + begin,
                       .gradient_dtype = DType::kFloat32,
                       .master = state.master.data() + begin,
                       .exp_avg = state.exp_avg.data() + begin,
                       .exp_avg_sq = state.exp_avg_sq.data() + begin,
                       .max_exp_avg_sq = nullptr,
                       .new_master = state.master.data() + begin,
                       .new_exp_avg = state.exp_avg.data() + begin,
                       .new_exp_avg_sq = state.exp_avg_sq.data() + begin,
                       .new_max_exp_avg_sq = nullptr,
                       .shard = weights_(index).data() + begin * SizeBytes(weights_dtype),
                       .shard_dtype = weights_dtype,
                       .scalars = scalars});
}

absl::Status ScalarArithmetic::TryUpdate(int index, int64_t begin, int64_t elements,
                                         const AdamScalars* scalars, State& tried) {
  const ChunkState& state = chunks_[index];
  // The trial is made in copies, and has no shard: the step may turn out to be a skip, which must
  // leave no trace.
  const auto copy = [&](const std::vector<float>& from, std::vector<float>& to) {
    to.assign(from.begin() + begin, from.begin() + begin + elements);
  };
  copy(state.master, tried.master);
  copy(state.exp_avg, tried.exp_avg);
  copy(state.exp_avg_sq, tried.exp_avg_sq);
  if (scalars == nullptr) return absl::OkStatus();
  UpdateAdamReference({.elements = elements,
                       .gradient = state.gradient.data() + begin,
                       .gradient_dtype = DType::kFloat32,
                       .master = tried.master.data(),
                       .exp_avg = tried.exp_avg.data(),
                       .exp_avg_sq = tried.exp_avg_sq.data(),
                       .max_exp_avg_sq = nullptr,
                       .new_master = tried.master.data(),
                       .new_exp_avg = tried.exp_avg.data(),
                       .new_exp_avg_sq = tried.exp_avg_sq.data(),
                       .new_max_exp_avg_sq = nullptr,
                       .shard = nullptr,
                       .shard_dtype = dtypes(index).weights,
                       .scalars = *scalars});
  return absl::OkStatus();
}

}  // namespace ballast::worker
