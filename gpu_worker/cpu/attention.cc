#include "gpu_worker/cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gpu_worker/cpu/exp.h"
#include "gpu_worker/cpu/gemm.h"
#include "gpu_worker/cpu/parallel.h"

namespace ballast::worker::cpu {
namespace {

// Where one head of one sequence lies.
struct Head {
  Head(const AttentionShape& shape, int index)
      : size(shape.width / shape.heads),
        scores(static_cast<int64_t>(index) * shape.context * shape.context) {
    const int sequence = index / shape.heads;
    const int head = index % shape.heads;
    const int64_t row = static_cast<int64_t>(sequence) * shape.context;
    query = row * 3 * shape.width + head * size;
    key = query + shape.width;
    value = key + shape.width;
    out = row * shape.width + head * size;
  }

  int size;
  int64_t scores;  // Offsets of the first element in `probabilities`, `qkv` and `out`.
  int64_t query;
  int64_t key;
  int64_t value;
  int64_t out;
};

// Row t becomes the softmax of its first t + 1 elements; the others become zero.
template <typename T>
void CausalSoftmax(int context, T* scores) {
  for (int t = 0; t < context; ++t) {
    T* row = scores + static_cast<int64_t>(t) * context;
    // The largest score is subtracted, which leaves the quotients as they are: no exponential is
    // above 1 then, and their sum cannot overflow.
    const T largest = *std::max_element(row, row + t + 1);
    for (int i = 0; i <= t; ++i) row[i] = Exp(row[i] - largest);
    // The sum has a loop of its own: its additions keep one order, and the loop with Exp can be
    // vectorised.
    T sum = 0;
    for (int i = 0; i <= t; ++i) sum += row[i];
    const T inverse = 1 / sum;
    for (int i = 0; i <= t; ++i) row[i] *= inverse;
    // The product with the values is over whole rows: zeros here keep later tokens out of it.
    std::fill(row + t + 1, row + context, T{0});
  }
}

// d_score = p * (d_p - sum of d_p * p), in place of d_p.
template <typename T>
void CausalSoftmaxBackward(int context, const T* probabilities, T* gradient) {
  for (int t = 0; t < context; ++t) {
    const T* p = probabilities + static_cast<int64_t>(t) * context;
    T* d = gradient + static_cast<int64_t>(t) * context;
    T dot = 0;
    for (int i = 0; i <= t; ++i) dot += d[i] * p[i];
    for (int i = 0; i <= t; ++i) d[i] = p[i] * (d[i] - dot);
    // d_p has values for later tokens as well, on which no score depends. The products that follow
    // are over whole rows.
    std::fill(d + t + 1, d + context, T{0});
  }
}

template <typename T>
T Scale(const Head& head) {
  return 1 / std::sqrt(static_cast<T>(head.size));
}

}  // namespace

template <typename T>
void AttentionForward(const AttentionShape& shape, const T* qkv, T* probabilities, T* out) {
  const int context = shape.context;
  const int stride = 3 * shape.width;
  // A head of a sequence is one tile. It writes its own columns of its own rows, so tiles never
  // meet.
  ForEachTile(shape.sequences * shape.heads, 1, [&](int index, int) {
    const Head head(shape, index);
    T* scores = probabilities + head.scores;
    // The product has all pairs of tokens, also those that the mask forbids. CausalSoftmax clears
    // these.
    Gemm(Product<T>{.rows = context,
                    .columns = context,
                    .inner = head.size,
                    .alpha = Scale<T>(head),
                    .transpose_b = Transpose::kYes},
         {qkv + head.query, stride}, {qkv + head.key, stride}, {scores, context});
    CausalSoftmax(context, scores);
    Gemm(Product<T>{.rows = context, .columns = head.size, .inner = context}, {scores, context},
         {qkv + head.value, stride}, {out + head.out, shape.width});
  });
}

template <typename T>
void AttentionBackward(const AttentionShape& shape, const T* d_out, const T* qkv,
                       const T* probabilities, T* d_qkv, T* scratch) {
  const int context = shape.context;
  const int stride = 3 * shape.width;
  ForEachTile(shape.sequences * shape.heads, 1, [&](int index, int) {
    // The heads together write each element of d_qkv once, so it needs no zeros before.
    const Head head(shape, index);
    const T* p = probabilities + head.scores;
    T* d_scores = scratch + head.scores;
    const Matrix<const T> gradient{d_out + head.out, shape.width};
    // d_value = p^T d_out
    Gemm(Product<T>{.rows = context,
                    .columns = head.size,
                    .inner = context,
                    .transpose_a = Transpose::kYes},
         {p, context}, gradient, {d_qkv + head.value, stride});
    // d_p = d_out value^T
    Gemm(Product<T>{.rows = context,
                    .columns = context,
                    .inner = head.size,
                    .transpose_b = Transpose::kYes},
         gradient, {qkv + head.value, stride}, {d_scores, context});
    CausalSoftmaxBackward(context, p, d_scores);
    // d_query = scale d_scores key,  d_key = scale d_scores^T query
    Gemm(
        Product<T>{
            .rows = context, .columns = head.size, .inner = context, .alpha = Scale<T>(head)},
        {d_scores, context}, {qkv + head.key, stride}, {d_qkv + head.query, stride});
    Gemm(Product<T>{.rows = context,
                    .columns = head.size,
                    .inner = context,
                    .alpha = Scale<T>(head),
                    .transpose_a = Transpose::kYes},
         {d_scores, context}, {qkv + head.query, stride}, {d_qkv + head.key, stride});
  });
}

template void AttentionForward(const AttentionShape&, const float*, float*, float*);
template void AttentionForward(const AttentionShape&, const double*, double*, double*);
template void AttentionBackward(const AttentionShape&, const float*, const float*, const float*,
                                float*, float*);
template void AttentionBackward(const AttentionShape&, const double*, const double*, const double*,
                                double*, double*);

}  // namespace ballast::worker::cpu
