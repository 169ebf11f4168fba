#include "gpu_worker/training/scalar_arithmetic.h"

#include <algorithm>
#include <utility>

#include "cpu_optimizer_service/common/adam.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/gradient_norm.h"

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
  const absl::Span<std::byte> weights = weights_(index);
  const DType weights_dtype = dtypes(index).weights;
  for (size_t i = 0; i < values.size(); ++i) {
    StoreElement(weights.data(), weights_dtype, i, values[i]);
  }
  return absl::OkStatus();
}

absl::Status ScalarArithmetic::AddGradient(int index, bool first,
                                           absl::Span<const std::byte> payload,
                                           std::function<void()> released) {
  std::vector<float>& sum = chunks_[index].gradient;
  const DType wire_dtype = dtypes(index).wire;
  for (size_t i = 0; i < sum.size(); ++i) {
    const float gradient = LoadElement(payload.data(), wire_dtype, i);
    sum[i] = first ? gradient : sum[i] + gradient;
  }
  if (released) released();
  return absl::OkStatus();
}

absl::Status ScalarArithmetic::ZeroGradient(int index) {
  std::vector<float>& sum = chunks_[index].gradient;
  std::fill(sum.begin(), sum.end(), 0.0f);
  return absl::OkStatus();
}

absl::Status ScalarArithmetic::BlockSums(int index, int64_t begin, absl::Span<double> sums) {
  const float* block = chunks_[index].gradient.data() + begin;
  for (double& sum : sums) {
    sum = BlockSumOfSquaresReference(block, DType::kFloat32);
    block += kBlockElements;
  }
  return absl::OkStatus();
}

absl::Status ScalarArithmetic::ReadGradient(int index, int64_t begin, absl::Span<float> values) {
  std::copy_n(chunks_[index].gradient.begin() + begin, values.size(), values.begin());
  return absl::OkStatus();
}

absl::Status ScalarArithmetic::Update(int index, int64_t begin, int64_t elements,
                                      const AdamScalars& scalars) {
  ChunkState& state = chunks_[index];
  const DType weights_dtype = dtypes(index).weights;
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
  return absl::OkStatus();
}

absl::Status ScalarArithmetic::TryUpdate(int index, int64_t begin, int64_t elements,
                                         const AdamScalars* scalars, State& tried) {
  const ChunkState& state = chunks_[index];
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
