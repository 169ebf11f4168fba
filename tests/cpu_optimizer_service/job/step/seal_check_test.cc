#include "cpu_optimizer_service/job/step/seal_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// Two ranks, three parameters p0 (1,000 elements), p1 (24), p2 (3,000), in chunks of 512: no
// engine, no memory.
class SealCheckTest : public testing::Test {
 protected:
  explicit SealCheckTest(UnusedPolicy policy = UnusedPolicy::kError) {
    spec_.unused_policy = policy;
    agreement_.SetTerms({.step = 4, .hyper_parameters = {{}}});
    for (int rank = 0; rank < 2; ++rank) EXPECT_TRUE(agreement_.Begin(rank, {}).ok());
  }

  void GiveAll(uint32_t micro_steps, bool final = false) {
    for (size_t chunk = 0; chunk < layout_.chunks().size(); ++chunk) {
      part_.ledger().Advance(static_cast<int64_t>(chunk), micro_steps, final);
    }
  }
  void EndMicroStep(int rank, uint32_t micro_step, const UsedParameters& used = {}) {
    ASSERT_TRUE(part_.EndMicroStep(4, rank, true, micro_step, used).ok());
  }
  // A whole step of one micro-step, but for what the test changes.
  void SealAll() {
    for (int rank = 0; rank < 2; ++rank) {
      if (part_.rank(rank).micro_steps_ended == 0) EndMicroStep(rank, 0);
      agreement_.Seal(rank, 1);
    }
  }
  std::optional<SealRefusal> Rank(int rank, uint32_t micro_steps) {
    return CheckRank(Given(), rank, micro_steps);
  }
  // Chunks in `with_gradient` have one everywhere.
  std::optional<SealRefusal> Step(const std::set<int>& with_gradient = {}) {
    const auto has_gradient = [&](const ChunkPiece& piece) {
      EXPECT_LE(0, piece.chunk_offset);
      EXPECT_LE(piece.chunk_offset + piece.elements, layout_.chunks()[piece.chunk].elements);
      return with_gradient.contains(piece.chunk);
    };
    auto refused = CheckPart(Given(), /*last_rank=*/1, has_gradient);
    return refused.has_value() ? refused : CheckUses(Given(), /*last_rank=*/1, has_gradient);
  }
  StepGiven Given() const { return {spec_, layout_, agreement_, part_, part_.uses()}; }

  JobSpec spec_ = MakeJobSpec({.world_size = 2, .chunk_elements = 512});
  Layout layout_ = Layout::Create(spec_.layout).value();
  StepAgreement agreement_{4, 2, layout_.ranks()};
  StepPart part_{2, 3, static_cast<int64_t>(layout_.chunks().size())};
};

class SealCheckSkipTest : public SealCheckTest {
 protected:
  SealCheckSkipTest() : SealCheckTest(UnusedPolicy::kSkip) {}
};

TEST_F(SealCheckTest, AWholeStepPasses) {
  GiveAll(1);
  SealAll();
  EXPECT_EQ(Rank(0, 1), std::nullopt);
  EXPECT_EQ(Rank(1, 1), std::nullopt);
  EXPECT_EQ(Step(), std::nullopt);
}

TEST_F(SealCheckTest, NamesTheFirstMicroStepAndAllParametersThatAreMissing) {
  GiveAll(2);
  EndMicroStep(1, 0);
  EndMicroStep(1, 1);
  const absl::Span<const int> chunks = layout_.chunks_of_rank(1);
  std::set<std::string> names;
  for (const int chunk : {chunks.front(), chunks.back()}) {
    part_.ledger().Advance(chunk, 1);
    for (const ChunkPiece& piece : layout_.Pieces(chunk)) {
      names.insert(spec_.layout.parameters[piece.parameter].name);
    }
  }
  EXPECT_EQ(Rank(0, 2), std::nullopt) << "the other rank is whole";
  const auto refusal = Rank(1, 2);
  ASSERT_TRUE(refusal.has_value());
  EXPECT_TRUE(
      Refused(refusal->status, absl::StatusCode::kFailedPrecondition, reason::kSendAndSealAgain));
  ASSERT_EQ(refusal->missing.size(), 1u);
  EXPECT_EQ(refusal->missing[0].rank, 1);
  EXPECT_EQ(refusal->missing[0].micro_step, 1u);
  EXPECT_EQ(std::set<std::string>(refusal->missing[0].parameters.begin(),
                                  refusal->missing[0].parameters.end()),
            names);
}

// A refusal is sent, and kept until it is, for as often as a rank seals.
TEST(SealCheck, NamesTheFirstOfManyAndCountsTheOthers) {
  constexpr int kParameters = 100;
  const JobSpec spec = MakeJobSpec({.group_sizes = {std::vector<int64_t>(kParameters, 256)},
                                    .world_size = 1,
                                    .chunk_elements = 256});
  const Layout layout = Layout::Create(spec.layout).value();
  StepAgreement agreement(4, 1, layout.ranks());
  agreement.SetTerms({.step = 4, .hyper_parameters = {{}}});
  StepPart part(1, kParameters, kParameters);
  ASSERT_TRUE(agreement.Begin(0, {}).ok());
  for (int chunk = 0; chunk < 40; ++chunk) part.ledger().Advance(chunk, 1 + chunk);
  const auto refusal = CheckRank({spec, layout, agreement, part, part.uses()}, 0, 90);
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->missing.size(), kMissingEntries);
  EXPECT_EQ(refusal->missing[0].micro_step, 0u);
  EXPECT_EQ(refusal->missing[0].parameters.size(), kMissingNames);
  EXPECT_EQ(refusal->missing[0].more_parameters, 60 - static_cast<int64_t>(kMissingNames));
  EXPECT_EQ(refusal->missing[1].more_parameters, 0);
  EXPECT_TRUE(
      Refused(refusal->status, absl::StatusCode::kFailedPrecondition, reason::kSendAndSealAgain));
}

TEST_F(SealCheckTest, SaysWhenAClosedChunkCanBeSentNoMore) {
  GiveAll(2);
  EndMicroStep(0, 0);
  EndMicroStep(0, 1);
  part_.ledger().Advance(layout_.chunks_of_rank(0).front(), 1, /*final=*/true);
  EXPECT_TRUE(
      Refused(Rank(0, 2)->status, absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));
}

TEST_F(SealCheckTest, RefusesFewerMicroStepsThanHaveCome) {
  GiveAll(2);
  EndMicroStep(0, 0);
  EXPECT_TRUE(Refused(Rank(0, 1)->status, absl::StatusCode::kFailedPrecondition,
                      reason::kSendAndSealAgain));
}

TEST_F(SealCheckTest, RefusesABackwardThatReachedNothing) {
  GiveAll(1);
  EndMicroStep(0, 0, {.all = false});
  const auto refusal = Rank(0, 1);
  ASSERT_TRUE(refusal.has_value());
  EXPECT_TRUE(
      Refused(refusal->status, absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));
  EXPECT_THAT(refusal->missing[0].parameters, ElementsAre("p0", "p1", "p2"));
}

TEST_F(SealCheckSkipTest, TakesABackwardThatReachedNothing) {
  GiveAll(1);
  EndMicroStep(0, 0, {.all = false});
  EXPECT_EQ(Rank(0, 1), std::nullopt);
}

TEST_F(SealCheckTest, RefusesRanksThatSealDifferentNumbers) {
  GiveAll(1);
  EndMicroStep(0, 0);
  EndMicroStep(1, 0);
  EndMicroStep(1, 1);
  agreement_.Seal(0, 1);
  agreement_.Seal(1, 2);
  EXPECT_TRUE(
      Refused(Step()->status, absl::StatusCode::kFailedPrecondition, reason::kSendAndSealAgain));
}

TEST_F(SealCheckTest, RefusesAGradientInThePadding) {
  GiveAll(1);
  SealAll();
  const int last = layout_.ChunkAt(0, layout_.flat_elements(0) - 1);
  ASSERT_EQ(layout_.ParameterAt(0, layout_.flat_elements(0) - 1), -1) << "there is padding";
  EXPECT_TRUE(
      Refused(Step({last})->status, absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));
}

TEST_F(SealCheckTest, RefusesAnEmptyContributionOfAUsedParameter) {
  GiveAll(1);
  part_.RecordEmpty(layout_.chunks_of_rank(0).front(), 0, 1);
  SealAll();
  const auto refusal = Step();
  ASSERT_TRUE(refusal.has_value());
  EXPECT_TRUE(
      Refused(refusal->status, absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));
  EXPECT_EQ(refusal->missing[0].rank, 0);
}

TEST_F(SealCheckTest, RefusesAParameterThatNoRankUsed) {
  GiveAll(1);
  for (int rank = 0; rank < 2; ++rank) EndMicroStep(rank, 0, {.all = false, .parameters = {0, 2}});
  SealAll();
  const auto refusal = Step();
  ASSERT_TRUE(refusal.has_value());
  EXPECT_TRUE(
      Refused(refusal->status, absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));
  EXPECT_THAT(refusal->missing[0].parameters, ElementsAre("p1"));
}

TEST_F(SealCheckSkipTest, TakesAnUnusedParameterUnlessItHasAGradient) {
  GiveAll(1);
  for (int rank = 0; rank < 2; ++rank) EndMicroStep(rank, 0, {.all = false, .parameters = {0, 2}});
  SealAll();
  EXPECT_EQ(Step(), std::nullopt);
  const int chunk = layout_.ChunkAt(0, layout_.place(1).offset);
  EXPECT_TRUE(
      Refused(Step({chunk})->status, absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));
}

TEST_F(SealCheckTest, NamesWhatIsBehindUpToALimit) {
  EXPECT_THAT(NamesBehind(spec_, layout_, part_.ledger(), 0, 0), IsEmpty());
  GiveAll(1);
  EXPECT_THAT(NamesBehind(spec_, layout_, part_.ledger(), 0, 1), IsEmpty());
  part_.ledger().Clear();
  std::set<std::string> names;
  for (const int rank : {0, 1}) {
    for (const std::string& name : NamesBehind(spec_, layout_, part_.ledger(), rank, 1)) {
      names.insert(name);
    }
  }
  EXPECT_EQ(names, (std::set<std::string>{"p0", "p1", "p2"}));
}

TEST(CheckScale, RefusesWhatLeavesNoMultiplier) {
  EXPECT_EQ(CheckScale({}, 2), absl::OkStatus());
  EXPECT_EQ(CheckScale({.loss_scale = 1024, .divisors = {2, 4}}, 2), absl::OkStatus());
  for (const double loss_scale : {0.0, -1.0, std::numeric_limits<double>::infinity(),
                                  std::numeric_limits<double>::quiet_NaN(), 1e39}) {
    EXPECT_EQ(CheckScale({.loss_scale = loss_scale}, 1).code(), absl::StatusCode::kInvalidArgument)
        << loss_scale;
  }
  EXPECT_EQ(CheckScale({.divisors = {1}}, 2).code(), absl::StatusCode::kInvalidArgument);
  for (const double divisor : {0.0, -2.0, 1e39, 1e-39, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(CheckScale({.divisors = {divisor}}, 1).code(), absl::StatusCode::kInvalidArgument)
        << divisor;
  }
}

TEST_F(SealCheckTest, UsedParametersAreTrainableAndReportsAreNotFinite) {
  spec_.layout.parameters[1].trainable = false;
  const Layout layout = Layout::Create(spec_.layout).value();
  const auto check = [&](const UsedParameters& used) {
    return CheckUsed(spec_, layout, 0, used).code();
  };
  EXPECT_EQ(check({.all = false, .parameters = {0, 2}}), absl::StatusCode::kOk);
  for (const int wrong : {-1, 1, 3}) {
    EXPECT_EQ(check({.all = false, .parameters = {wrong}}), absl::StatusCode::kInvalidArgument);
  }
  const float infinity = std::numeric_limits<float>::infinity();
  const auto report = [&](int parameter, int64_t element, float value) {
    return check({.non_finite = UsedParameters::NonFinite{parameter, element, value}});
  };
  EXPECT_EQ(report(0, 999, infinity), absl::StatusCode::kOk);
  EXPECT_EQ(report(0, 1000, infinity), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(report(0, -1, infinity), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(report(1, 0, infinity), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(report(0, 0, 1.0f), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ballast
