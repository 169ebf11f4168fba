#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "gpu_worker/cuda/kernels/attention.h"
#include "tests/gpu_worker/cuda/attention_reference.h"
#include "tests/gpu_worker/cuda/kernel_test.h"
#include "tests/support/messages.h"

namespace ballast::worker::cuda {
namespace {

AttentionShape Shape(int sequences, int context, int heads, int head_width) {
  return {.sequences = sequences, .context = context, .width = heads * head_width, .heads = heads};
}

class AttentionKernels : public KernelTest {
 protected:
  struct Forward {
    std::vector<BFloat16Bits> out;
    std::vector<float> logsumexp;
  };
  Forward RunForward(const AttentionShape& shape, const std::vector<BFloat16Bits>& qkv) {
    const auto inputs = Upload(qkv);
    const auto out = Poisoned<BFloat16Bits>(shape.rows() * shape.width + kGuard);
    const auto logsumexp = Poisoned<float>(shape.rows() * shape.heads + kGuard);
    Run(AttentionForward(stream(), shape, inputs.data(), out.data(), logsumexp.data()));
    return {WithoutGuard(Download(out)), WithoutGuard(Download(logsumexp))};
  }

  std::vector<BFloat16Bits> RunBackward(const AttentionShape& shape,
                                        const std::vector<BFloat16Bits>& qkv,
                                        const Forward& forward,
                                        const std::vector<BFloat16Bits>& d_out) {
    const auto inputs = Upload(qkv);
    const auto out = Upload(forward.out);
    const auto logsumexp = Upload(forward.logsumexp);
    const auto d_outputs = Upload(d_out);
    const auto scratch = Poisoned<float>(AttentionScratchBytes(shape) / sizeof(float) + kGuard);
    const auto d_qkv = Poisoned<BFloat16Bits>(qkv.size() + kGuard);
    Run(AttentionBackward(stream(), shape, inputs.data(), out.data(), logsumexp.data(),
                          d_outputs.data(), d_qkv.data(), scratch.data()));
    WithoutGuard(Download(scratch));
    return WithoutGuard(Download(d_qkv));
  }

  // What the reference gives to backward.
  static Forward Rounded(const AttentionForwardReference& reference) {
    Forward forward;
    for (const double x : reference.out.values) {
      forward.out.push_back(FloatToBFloat16(static_cast<float>(x)));
    }
    for (const double x : reference.logsumexp.values) {
      forward.logsumexp.push_back(static_cast<float>(x));
    }
    return forward;
  }

 private:
  // Elements after a result that must stay as they are.
  static constexpr size_t kGuard = 4096;

  template <typename T>
  static std::vector<T> WithoutGuard(std::vector<T> values) {
    const std::vector<T> guard(values.end() - kGuard, values.end());
    std::vector<T> poison(kGuard);
    std::memset(poison.data(), 0xff, kGuard * sizeof(T));
    EXPECT_EQ(std::memcmp(guard.data(), poison.data(), kGuard * sizeof(T)), 0)
        << "something was stored beyond the end";
    values.resize(values.size() - kGuard);
    return values;
  }
};

void ExpectWithin(const std::string& what, const std::vector<double>& actual,
                  const Bounded& expected) {
  ASSERT_EQ(actual.size(), expected.values.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_TRUE(std::fabs(actual[i] - expected.values[i]) <= expected.bounds[i])
        << what << " " << i << " of " << actual.size() << ": " << actual[i] << ", expected "
        << expected.values[i] << " within " << expected.bounds[i];
  }
}

std::vector<double> Widened(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

class AttentionKernelsOfShape : public AttentionKernels,
                                public testing::WithParamInterface<AttentionShape> {};

TEST_P(AttentionKernelsOfShape, ForwardIsWithinItsRoundingErrors) {
  const AttentionShape shape = GetParam();
  const auto qkv = RandomBFloat16(shape.rows() * 3 * shape.width, 1, 1.5f);
  const AttentionForwardReference expected = ReferenceForward(shape, qkv);
  const Forward actual = RunForward(shape, qkv);
  ExpectWithin("out", Widen<double>(actual.out), expected.out);
  ExpectWithin("logsumexp", Widened(actual.logsumexp), expected.logsumexp);
}

TEST_P(AttentionKernelsOfShape, BackwardIsWithinItsRoundingErrors) {
  const AttentionShape shape = GetParam();
  const auto qkv = RandomBFloat16(shape.rows() * 3 * shape.width, 2, 1.5f);
  const auto d_out = RandomBFloat16(shape.rows() * shape.width, 3);
  const Forward forward = Rounded(ReferenceForward(shape, qkv));
  ExpectWithin("d_qkv", Widen<double>(RunBackward(shape, qkv, forward, d_out)),
               ReferenceBackward(shape, qkv, forward.out, forward.logsumexp, d_out));
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttentionKernelsOfShape,
                         testing::Values(Shape(2, 1, 3, 64), Shape(3, 7, 2, 64),
                                         Shape(2, 64, 1, 64), Shape(1, 100, 3, 64),
                                         Shape(1, 128, 2, 64), Shape(2, 193, 1, 64),
                                         Shape(1, 300, 1, 64), Shape(2, 1, 3, 128),
                                         Shape(2, 7, 2, 128), Shape(2, 64, 1, 128),
                                         Shape(1, 100, 3, 128), Shape(1, 128, 2, 128),
                                         Shape(2, 193, 1, 128)),
                         [](const testing::TestParamInfo<AttentionShape>& info) {
                           const AttentionShape& shape = info.param;
                           return std::to_string(shape.sequences) + "SequencesOf" +
                                  std::to_string(shape.context) + "With" +
                                  std::to_string(shape.heads) + "HeadsOfWidth" +
                                  std::to_string(shape.width / shape.heads);
                         });

// Scores of about +-1000, of which exp is infinite or zero in fp32; most rows are almost one-hot.
TEST_F(AttentionKernels, StayAccurateWithLargeScores) {
  for (const int head_width : {64, 128}) {
    const AttentionShape shape = Shape(1, 130, 1, head_width);
    const auto qkv = RandomBFloat16(shape.rows() * 3 * shape.width, 4, 16);
    const auto d_out = RandomBFloat16(shape.rows() * shape.width, 5);
    const AttentionForwardReference expected = ReferenceForward(shape, qkv);
    EXPECT_GT(*std::max_element(expected.logsumexp.values.begin(), expected.logsumexp.values.end()),
              500);
    const Forward actual = RunForward(shape, qkv);
    ExpectWithin("out", Widen<double>(actual.out), expected.out);
    ExpectWithin("logsumexp", Widened(actual.logsumexp), expected.logsumexp);

    const Forward forward = Rounded(expected);
    ExpectWithin("d_qkv", Widen<double>(RunBackward(shape, qkv, forward, d_out)),
                 ReferenceBackward(shape, qkv, forward.out, forward.logsumexp, d_out));
  }
}

// Every score of a row is very negative: exp of it is zero in fp32, but their softmax is not.
TEST_F(AttentionKernels, StayAccurateWhereAllScoresAreVeryNegative) {
  const AttentionShape shape = Shape(1, 70, 1, 64);
  auto qkv = RandomBFloat16(shape.rows() * 3 * shape.width, 6);
  for (int64_t row = 0; row < shape.rows(); ++row) {
    BFloat16Bits* q = &qkv[row * 3 * shape.width];
    q[0] = FloatToBFloat16(40);
    q[shape.width] = FloatToBFloat16(-40);
  }
  const AttentionForwardReference expected = ReferenceForward(shape, qkv);
  EXPECT_LT(*std::max_element(expected.logsumexp.values.begin(), expected.logsumexp.values.end()),
            -150);
  const Forward actual = RunForward(shape, qkv);
  ExpectWithin("out", Widen<double>(actual.out), expected.out);
  ExpectWithin("logsumexp", Widened(actual.logsumexp), expected.logsumexp);
  const auto d_out = RandomBFloat16(shape.rows() * shape.width, 7);
  const Forward forward = Rounded(expected);
  ExpectWithin("d_qkv", Widen<double>(RunBackward(shape, qkv, forward, d_out)),
               ReferenceBackward(shape, qkv, forward.out, forward.logsumexp, d_out));
}

TEST_F(AttentionKernels, GiveTheSameBitsAgain) {
  const AttentionShape shape = Shape(2, 150, 2, 64);
  const auto qkv = RandomBFloat16(shape.rows() * 3 * shape.width, 8);
  const auto d_out = RandomBFloat16(shape.rows() * shape.width, 9);
  const Forward first = RunForward(shape, qkv);
  const auto first_gradient = RunBackward(shape, qkv, first, d_out);
  const Forward second = RunForward(shape, qkv);
  EXPECT_EQ(second.out, first.out);
  EXPECT_EQ(second.logsumexp, first.logsumexp);
  EXPECT_EQ(RunBackward(shape, qkv, first, d_out), first_gradient);
}

// The bits of a sequence do not depend on which others are in the batch.
TEST_F(AttentionKernels, GiveASequenceTheSameBitsInAnyBatch) {
  const AttentionShape batch = Shape(3, 65, 1, 64);
  const AttentionShape alone = Shape(1, 65, 1, 64);
  const auto qkv = RandomBFloat16(batch.rows() * 3 * batch.width, 10);
  const Forward all = RunForward(batch, qkv);
  const int64_t elements = alone.rows() * alone.width;
  const Forward last =
      RunForward(alone, std::vector<BFloat16Bits>(qkv.begin() + 2 * 3 * elements, qkv.end()));
  EXPECT_EQ(std::vector<BFloat16Bits>(all.out.begin() + 2 * elements, all.out.end()), last.out);
}

TEST_F(AttentionKernels, OfNoSequencesDoNothing) {
  const AttentionShape shape = Shape(0, 64, 2, 64);
  EXPECT_EQ(AttentionScratchBytes(shape), 0u);
  const Forward forward = RunForward(shape, {});
  EXPECT_TRUE(RunBackward(shape, {}, forward, {}).empty());
}

TEST(AttentionShape, OfWhichThereAreKernelsIsValid) {
  EXPECT_TRUE(ValidateAttention(Shape(1, 1, 1, 64)).ok());
  EXPECT_TRUE(ValidateAttention(Shape(8, 1024, 25, 64)).ok());
  EXPECT_TRUE(ValidateAttention(Shape(8, 1000, 3, 128)).ok());
}

TEST(AttentionShape, OfWhichThereIsNoKernelIsRefusedSayingWhatToChange) {
  const absl::Status status = ValidateAttention(Shape(1, 8, 4, 32));
  EXPECT_TRUE(Refused(status, absl::StatusCode::kInvalidArgument));
  const AttentionShape ragged = {.sequences = 1, .context = 8, .width = 130, .heads = 2};
  EXPECT_EQ(ValidateAttention(ragged).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ValidateAttention(Shape(1, 0, 1, 64)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ValidateAttention(Shape(1, 8, 0, 64)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ValidateAttention(Shape(-1, 8, 1, 64)).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(AttentionKernels, RefuseAShapeThatIsNotValid) {
  const AttentionShape shape = Shape(1, 8, 4, 32);
  EXPECT_EQ(AttentionForward(stream(), shape, nullptr, nullptr, nullptr).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(AttentionBackward(stream(), shape, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr)
                .code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ballast::worker::cuda
