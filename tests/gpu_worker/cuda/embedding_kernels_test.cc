#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gpu_worker/cuda/kernels/embedding.h"
#include "tests/gpu_worker/cuda/kernel_test.h"

namespace ballast::worker::cuda {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::vector<int32_t> RandomTokens(int64_t count, int vocabulary, uint64_t seed) {
  std::vector<int32_t> tokens(count);
  for (int64_t i = 0; i < count; ++i) {
    tokens[i] = static_cast<int32_t>(RandomBits(seed, 1, i) % vocabulary);
  }
  return tokens;
}

struct Case {
  EmbeddingShape shape;
  int vocabulary;
  size_t offset = 0;  // The parameters', in elements: 1 prevents loads of packs.
};

const Case kCases[] = {
    {{.sequences = 3, .context = 17, .width = 8}, 11},
    {{.sequences = 2, .context = 19, .width = 296}, 300},
    {{.sequences = 2, .context = 9, .width = 37}, 5},
    {{.sequences = 1, .context = 1, .width = 1}, 1},
    {{.sequences = 2, .context = 5, .width = 64}, 7, 1},
    // No rows: the gradients of positions are zeros.
    {{.sequences = 0, .context = 17, .width = 8}, 11},
    // Almost every row has the same token, and more of them than are loaded ahead.
    {{.sequences = 4, .context = 75, .width = 16}, 2},
};

class EmbeddingKernels : public KernelTest {
 protected:
  TokenRowsOnDevice OnDevice(const TokenRows& rows) {
    tokens_.push_back(Upload(rows.tokens));
    tokens_.push_back(Upload(rows.begins));
    tokens_.push_back(Upload(rows.rows));
    const size_t first = tokens_.size() - 3;
    return {.distinct_tokens = static_cast<int>(rows.tokens.size()),
            .tokens = tokens_[first].data(),
            .begins = tokens_[first + 1].data(),
            .rows = tokens_[first + 2].data()};
  }

 private:
  std::vector<DeviceArray<int32_t>> tokens_;
};

TEST_F(EmbeddingKernels, ForwardAddsTokenAndPositionAndRoundsOnce) {
  for (const auto& [shape, vocabulary, offset] : kCases) {
    const auto tokens = RandomTokens(shape.rows(), vocabulary, 1);
    const auto token_weights = RandomBFloat16(vocabulary * shape.width, 2);
    const auto position_weights = RandomBFloat16(shape.context * shape.width, 3);
    const auto d_tokens = Upload(tokens);
    const auto d_token_weights = Upload(token_weights, offset);
    const auto d_position_weights = Upload(position_weights, offset);
    const auto out = Poisoned<BFloat16Bits>(shape.rows() * shape.width);
    Run(EmbeddingForward(stream(), shape, d_tokens.data(), d_token_weights.data(),
                         d_position_weights.data(), out.data()));

    std::vector<BFloat16Bits> expected;
    for (int64_t row = 0; row < shape.rows(); ++row) {
      for (int i = 0; i < shape.width; ++i) {
        const float sum = BFloat16ToFloat(token_weights[tokens[row] * shape.width + i]) +
                          BFloat16ToFloat(position_weights[row % shape.context * shape.width + i]);
        expected.push_back(FloatToBFloat16(sum));
      }
    }
    EXPECT_EQ(Download(out), expected);
  }
}

TEST_F(EmbeddingKernels, BackwardAddsRowsOfATokenInOrder) {
  for (const auto& [shape, vocabulary, offset] : kCases) {
    const auto tokens = RandomTokens(shape.rows(), vocabulary, 4);
    const auto d_out = RandomBFloat16(shape.rows() * shape.width, 5);
    const auto before = RandomFloats(vocabulary * shape.width, 6);
    const auto on_device = Upload(d_out);
    const auto token_gradient = Upload(before, offset);
    const auto position_gradient = Poisoned<float>(shape.context * shape.width, offset);
    Run(EmbeddingBackward(stream(), shape, OnDevice(GroupByToken(tokens)), on_device.data(),
                          token_gradient.data(), position_gradient.data(),
                          /*add_positions=*/false));

    std::vector<float> token_sums(before.size()), position_sums(position_gradient.size());
    std::vector<bool> has_rows(vocabulary);
    for (int64_t row = 0; row < shape.rows(); ++row) {
      has_rows[tokens[row]] = true;
      for (int i = 0; i < shape.width; ++i) {
        const float x = BFloat16ToFloat(d_out[row * shape.width + i]);
        token_sums[tokens[row] * shape.width + i] += x;
        position_sums[row % shape.context * shape.width + i] += x;
      }
    }
    std::vector<float> expected = before;
    for (size_t i = 0; i < expected.size(); ++i) {
      if (has_rows[i / shape.width]) expected[i] += token_sums[i];
    }
    EXPECT_EQ(Download(token_gradient), expected);
    EXPECT_EQ(Download(position_gradient), position_sums);

    Run(EmbeddingBackward(stream(), shape, OnDevice(GroupByToken(tokens)), on_device.data(),
                          token_gradient.data(), position_gradient.data(),
                          /*add_positions=*/true));
    for (float& sum : position_sums) sum += sum;
    EXPECT_EQ(Download(position_gradient), position_sums);
  }
}

TEST(TokenRows, NamesTheRowsOfEachTokenInOrder) {
  const TokenRows rows = GroupByToken({7, 2, 7, 9, 2, 7});
  EXPECT_THAT(rows.tokens, ElementsAre(2, 7, 9));
  EXPECT_THAT(rows.begins, ElementsAre(0, 2, 5, 6));
  EXPECT_THAT(rows.rows, ElementsAre(1, 4, 0, 2, 5, 3));
}

TEST(TokenRows, OfNothingAreNone) {
  const TokenRows rows = GroupByToken({});
  EXPECT_THAT(rows.tokens, IsEmpty());
  EXPECT_THAT(rows.begins, ElementsAre(0));
  EXPECT_THAT(rows.rows, IsEmpty());
}

}  // namespace
}  // namespace ballast::worker::cuda
