#include <algorithm>

#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/cuda/kernels/embedding.h"
#include "gpu_worker/cuda/numeric.cuh"

namespace ballast::worker::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kTokenThreads = 64;
constexpr int kRowsAhead = 8;

template <int kCount>
__device__ __forceinline__ void Add(const Floats<kCount>& added, Floats<kCount>& sum) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum.x[i] += added.x[i];
}

template <int kCount>
__global__ void __launch_bounds__(kThreads)
    ForwardKernel(EmbeddingShape shape, const int32_t* __restrict__ tokens,
                  const BFloat16Bits* __restrict__ token_weights,
                  const BFloat16Bits* __restrict__ position_weights,
                  BFloat16Bits* __restrict__ out) {
  const int packs = shape.width / kCount;
  const int64_t index = ThreadOfGrid();
  if (index >= shape.rows() * packs) return;
  const int64_t row = index / packs;
  const int64_t column = index % packs * kCount;
  auto sum = LoadBFloat16<kCount>(token_weights + static_cast<int64_t>(tokens[row]) * shape.width +
                                  column);
  const auto position =
      LoadBFloat16<kCount>(position_weights + row % shape.context * shape.width + column);
  Add(position, sum);
  StoreBFloat16<kCount>(out + row * shape.width + column, sum);
}

// A block has one token and some columns, a thread kCount of them. A token that the batch has often
// is the longest chain of additions, so loads are issued before them.
template <int kCount>
__global__ void __launch_bounds__(kTokenThreads)
    TokenGradientKernel(int width, TokenRowsOnDevice token_rows,
                        const BFloat16Bits* __restrict__ d_out,
                        float* __restrict__ token_gradient) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kTokenThreads + threadIdx.x) * kCount;
  if (column >= width) return;
  const int index = static_cast<int>(blockIdx.x);
  const int begin = token_rows.begins[index];
  const int end = token_rows.begins[index + 1];
  Floats<kCount> sum = {};
  for (int at = begin; at < end; at += kRowsAhead) {
    Floats<kCount> ahead[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      if (at + i < end) {
        const int64_t row = token_rows.rows[at + i];
        ahead[i] = LoadBFloat16<kCount>(d_out + row * width + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      if (at + i < end) Add(ahead[i], sum);
    }
  }
  float* to = token_gradient + static_cast<int64_t>(token_rows.tokens[index]) * width + column;
  auto total = LoadFloats<kCount>(to);
  Add(sum, total);
  StoreFloats<kCount>(to, total);
}

template <int kCount>
__global__ void __launch_bounds__(kThreads)
    PositionGradientKernel(EmbeddingShape shape, const BFloat16Bits* __restrict__ d_out,
                           float* __restrict__ position_gradient, bool add) {
  const int64_t elements = static_cast<int64_t>(shape.context) * shape.width;
  const int64_t at = ThreadOfGrid() * kCount;
  if (at >= elements) return;
  Floats<kCount> sum = {};
#pragma unroll 4
  for (int sequence = 0; sequence < shape.sequences; ++sequence) {
    Add(LoadBFloat16<kCount>(d_out + sequence * elements + at), sum);
  }
  if (add) {
    auto total = LoadFloats<kCount>(position_gradient + at);
    Add(sum, total);
    sum = total;
  }
  StoreFloats<kCount>(position_gradient + at, sum);
}

template <int kCount>
absl::Status Backward(DeviceStream& stream, const EmbeddingShape& shape,
                      const TokenRowsOnDevice& token_rows, const BFloat16Bits* d_out,
                      float* token_gradient, float* position_gradient, bool add_positions) {
  const unsigned block_columns = kTokenThreads * kCount;
  const Grid tokens = {.blocks = dim3(static_cast<unsigned>(token_rows.distinct_tokens),
                                      (shape.width + block_columns - 1) / block_columns),
                       .threads = kTokenThreads};
  BALLAST_RETURN_IF_ERROR(Launch(stream, "token gradient", tokens, &TokenGradientKernel<kCount>,
                                 shape.width, token_rows, d_out, token_gradient));
  const int64_t packs = static_cast<int64_t>(shape.context) * shape.width / kCount;
  return Launch(stream, "position gradient", GridFor(packs, kThreads),
                &PositionGradientKernel<kCount>, shape, d_out, position_gradient, add_positions);
}

}  // namespace

absl::Status EmbeddingForward(DeviceStream& stream, const EmbeddingShape& shape,
                              const int32_t* tokens, const BFloat16Bits* token_weights,
                              const BFloat16Bits* position_weights, BFloat16Bits* out) {
  const bool packs = shape.width % 8 == 0 && HoldsPacks(token_weights, 8, 2) &&
                     HoldsPacks(position_weights, 8, 2) && HoldsPacks(out, 8, 2);
  return Launch(stream, "embedding",
                GridFor(shape.rows() * (shape.width / (packs ? 8 : 1)), kThreads),
                packs ? &ForwardKernel<8> : &ForwardKernel<1>, shape, tokens, token_weights,
                position_weights, out);
}

absl::Status EmbeddingBackward(DeviceStream& stream, const EmbeddingShape& shape,
                               const TokenRowsOnDevice& token_rows, const BFloat16Bits* d_out,
                               float* token_gradient, float* position_gradient,
                               bool add_positions) {
  const bool packs = shape.width % 4 == 0 && HoldsPacks(d_out, 4, 2) &&
                     HoldsPacks(token_gradient, 4, 4) && HoldsPacks(position_gradient, 4, 4);
  const auto backward = packs ? &Backward<4> : &Backward<1>;
  return backward(stream, shape, token_rows, d_out, token_gradient, position_gradient,
                  add_positions);
}

TokenRows GroupByToken(absl::Span<const int32_t> tokens) {
  TokenRows result;
  result.rows.resize(tokens.size());
  const int32_t most = tokens.empty() ? -1 : *std::max_element(tokens.begin(), tokens.end());
  std::vector<int32_t> places(most + 1, 0);  // By token: how many rows; then where the next goes.
  for (const int32_t token : tokens) ++places[token];
  int32_t begin = 0;
  for (int32_t token = 0; token <= most; ++token) {
    const int32_t count = places[token];
    if (count == 0) continue;
    result.tokens.push_back(token);
    result.begins.push_back(begin);
    places[token] = begin;
    begin += count;
  }
  result.begins.push_back(begin);
  for (size_t row = 0; row < tokens.size(); ++row) {
    result.rows[places[tokens[row]]++] = static_cast<int32_t>(row);
  }
  return result;
}

}  // namespace ballast::worker::cuda
