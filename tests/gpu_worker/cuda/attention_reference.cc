#include "tests/gpu_worker/cuda/attention_reference.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "cpu_optimizer_service/common/float_format.h"

namespace ballast::worker::cuda {
namespace {

// What one rounding to bf16 changes at most, relative.
constexpr double kRounding = 1.0 / 256;
// What a sum of some hundred products in fp32, or exp, changes at most, relative to the sum of
// magnitudes: a hundred roundings and some truncations of 2^-24.
constexpr double kSum = 1.0 / (1 << 18);

// What is smaller may become zero in fp32: its smallest normal number, 2^-126.
constexpr double kUnderflow = std::numeric_limits<float>::min();

double Dot(const double* a, const double* b, int width) {
  double sum = 0;
  for (int i = 0; i < width; ++i) sum += a[i] * b[i];
  return sum;
}

double DotOfMagnitudes(const double* a, const double* b, int width) {
  double sum = 0;
  for (int i = 0; i < width; ++i) sum += std::fabs(a[i] * b[i]);
  return sum;
}

// One head of one sequence, as rows of doubles.
class Head {
 public:
  Head(const AttentionShape& shape, int sequence, int head)
      : context(shape.context),
        width(shape.width / shape.heads),
        scale(1 / std::sqrt(static_cast<double>(width))),
        statistics((int64_t{sequence} * shape.heads + head) * context),
        total_width_(shape.width),
        first_row_(int64_t{sequence} * context),
        first_column_(head * width) {}

  // Where element `column` of row `row` is in qkv (`part` 0, 1 or 2 of it), and in out.
  int64_t InQkv(int part, int row, int column) const {
    return ((first_row_ + row) * 3 + part) * total_width_ + first_column_ + column;
  }
  int64_t InOut(int row, int column) const {
    return (first_row_ + row) * total_width_ + first_column_ + column;
  }

  using Place = std::function<int64_t(int row, int column)>;
  std::vector<double> Read(const std::vector<BFloat16Bits>& from, const Place& place) const {
    std::vector<double> rows(int64_t{context} * width);
    for (int row = 0; row < context; ++row) {
      for (int i = 0; i < width; ++i) {
        rows[int64_t{row} * width + i] = BFloat16ToFloat(from[place(row, i)]);
      }
    }
    return rows;
  }
  std::vector<double> ReadQkv(const std::vector<BFloat16Bits>& qkv, int part) const {
    return Read(qkv, [&](int row, int column) { return InQkv(part, row, column); });
  }
  std::vector<double> ReadOut(const std::vector<BFloat16Bits>& out) const {
    return Read(out, [&](int row, int column) { return InOut(row, column); });
  }

  const int context;
  const int width;
  const double scale;
  const int64_t statistics;  // Index of row 0 in logsumexp.

 private:
  const int total_width_;
  const int64_t first_row_;
  const int first_column_;
};

template <typename Work>
void ForEachHead(const AttentionShape& shape, const Work& work) {
  for (int sequence = 0; sequence < shape.sequences; ++sequence) {
    for (int head = 0; head < shape.heads; ++head) work(Head(shape, sequence, head));
  }
}

// The scores of one query, and the largest error of one of them.
struct Scores {
  std::vector<double> values;
  double bound = 0;
};
Scores ScoresOf(const Head& head, const double* query, const std::vector<double>& keys, int row) {
  Scores scores;
  for (int j = 0; j <= row; ++j) {
    const double* key = &keys[int64_t{j} * head.width];
    scores.values.push_back(head.scale * Dot(query, key, head.width));
    scores.bound =
        std::max(scores.bound, kSum * head.scale * DotOfMagnitudes(query, key, head.width));
  }
  return scores;
}

double LogSumExp(const std::vector<double>& scores) {
  const double largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (const double score : scores) sum += std::exp(score - largest);
  return largest + std::log(sum);
}

Bounded Zeros(int64_t size) { return {std::vector<double>(size), std::vector<double>(size)}; }

// value += weight * x, bound += |weight_bound * x|.
void Add(double weight, double weight_bound, const double* x, int width, double* values,
         double* bounds) {
  for (int i = 0; i < width; ++i) {
    values[i] += weight * x[i];
    bounds[i] += std::fabs(weight_bound * x[i]);
  }
}

}  // namespace

AttentionForwardReference ReferenceForward(const AttentionShape& shape,
                                           const std::vector<BFloat16Bits>& qkv) {
  AttentionForwardReference reference{Zeros(shape.rows() * shape.width),
                                      Zeros(shape.rows() * shape.heads)};
  ForEachHead(shape, [&](const Head& head) {
    const auto queries = head.ReadQkv(qkv, 0);
    const auto keys = head.ReadQkv(qkv, 1);
    const auto values = head.ReadQkv(qkv, 2);
    for (int row = 0; row < head.context; ++row) {
      const Scores scores = ScoresOf(head, &queries[int64_t{row} * head.width], keys, row);
      const double logsumexp = LogSumExp(scores.values);
      reference.logsumexp.values[head.statistics + row] = logsumexp;
      reference.logsumexp.bounds[head.statistics + row] =
          scores.bound + kSum * (1 + std::fabs(logsumexp));

      // A probability has its score's error, and that of all scores in its divisor.
      const double relative = kRounding + 2 * scores.bound + 2 * kSum;
      std::vector<double> out(head.width), bounds(head.width);
      for (int j = 0; j <= row; ++j) {
        const double p = std::exp(scores.values[j] - logsumexp);
        Add(p, p * relative + kUnderflow, &values[int64_t{j} * head.width], head.width, out.data(),
            bounds.data());
      }
      for (int i = 0; i < head.width; ++i) {
        reference.out.values[head.InOut(row, i)] = out[i];
        reference.out.bounds[head.InOut(row, i)] =
            bounds[i] + kRounding * std::fabs(out[i]) + kUnderflow;
      }
    }
  });
  return reference;
}

Bounded ReferenceBackward(const AttentionShape& shape, const std::vector<BFloat16Bits>& qkv,
                          const std::vector<BFloat16Bits>& out, const std::vector<float>& logsumexp,
                          const std::vector<BFloat16Bits>& d_out) {
  Bounded d_qkv = Zeros(shape.rows() * 3 * shape.width);
  ForEachHead(shape, [&](const Head& head) {
    const int width = head.width;
    const std::vector<double> qkv_rows[3] = {head.ReadQkv(qkv, 0), head.ReadQkv(qkv, 1),
                                             head.ReadQkv(qkv, 2)};
    const auto out_rows = head.ReadOut(out);
    const auto d_out_rows = head.ReadOut(d_out);
    Bounded gradients[3];
    for (Bounded& gradient : gradients) gradient = Zeros(int64_t{head.context} * width);
    const auto add = [&](int part, int row, double weight, double bound, const double* x) {
      Add(weight, bound, x, width, &gradients[part].values[int64_t{row} * width],
          &gradients[part].bounds[int64_t{row} * width]);
    };

    for (int row = 0; row < head.context; ++row) {
      const double* query = &qkv_rows[0][int64_t{row} * width];
      const double* d_row = &d_out_rows[int64_t{row} * width];
      const double* out_row = &out_rows[int64_t{row} * width];
      const Scores scores = ScoresOf(head, query, qkv_rows[1], row);
      const double row_logsumexp = logsumexp[head.statistics + row];
      const double p_relative = scores.bound + kSum * (1 + std::fabs(row_logsumexp));
      const double delta = Dot(d_row, out_row, width);
      const double delta_bound = kSum * DotOfMagnitudes(d_row, out_row, width);
      for (int j = 0; j <= row; ++j) {
        const double* key = &qkv_rows[1][int64_t{j} * width];
        const double* value = &qkv_rows[2][int64_t{j} * width];
        const double p = std::exp(scores.values[j] - row_logsumexp);
        add(2, j, p, p * (kRounding + p_relative + kSum) + kUnderflow, d_row);

        const double d_p = Dot(d_row, value, width);
        const double d_p_bound = kSum * DotOfMagnitudes(d_row, value, width);
        const double d_score = p * (d_p - delta);
        const double d_score_bound = (kRounding + p_relative + kSum) * std::fabs(d_score) +
                                     p * (d_p_bound + delta_bound) +
                                     kUnderflow * (1 + std::fabs(d_p - delta));
        add(0, row, head.scale * d_score, head.scale * d_score_bound, key);
        add(1, j, head.scale * d_score, head.scale * d_score_bound, query);
      }
    }
    for (int part = 0; part < 3; ++part) {
      for (int row = 0; row < head.context; ++row) {
        for (int i = 0; i < width; ++i) {
          const double value = gradients[part].values[int64_t{row} * width + i];
          const int64_t place = head.InQkv(part, row, i);
          d_qkv.values[place] = value;
          d_qkv.bounds[place] = gradients[part].bounds[int64_t{row} * width + i] +
                                kRounding * std::fabs(value) + kUnderflow;
        }
      }
    }
  });
  return d_qkv;
}

}  // namespace ballast::worker::cuda
