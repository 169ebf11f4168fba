#include "cpu_optimizer_service/common/hyper_parameters.h"

#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using testing::HasSubstr;

TEST(HyperParameters, AreValidByDefaultAndAtTheirBounds) {
  EXPECT_TRUE(Validate({}).ok());
  EXPECT_TRUE(Validate({.lr = 0, .beta1 = 0, .beta2 = 0, .eps = 0, .weight_decay = 0}).ok());
  EXPECT_TRUE(Validate({.beta1 = 0.99999999, .beta2 = 0.99999999}).ok());
  EXPECT_TRUE(Validate({.lr = 3e38, .weight_decay = 0, .bias_correction = false}).ok());
  EXPECT_TRUE(Validate({.lr = 1e20, .weight_decay = 1e20, .decoupled_weight_decay = false}).ok());
}

TEST(HyperParameters, AreRefusedByNameWithTheValueThatCame) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  std::vector<HyperParameters> refused;
  for (const double bad : {-0.5, -kInfinity, kInfinity, kNan}) {
    refused.insert(
        refused.end(),
        {{.lr = bad}, {.beta1 = bad}, {.beta2 = bad}, {.eps = bad}, {.weight_decay = bad}});
  }
  // Finite, but not in fp32.
  refused.insert(refused.end(), {{.lr = 1e39},
                                 {.eps = 1e308},
                                 {.weight_decay = 1e308},
                                 {.lr = 1e20, .weight_decay = 1e20},
                                 {.lr = 1e38, .weight_decay = 0},
                                 {.beta1 = 1},
                                 {.beta2 = 1},
                                 {.lr = -1, .eps = -1}});  // The first is named.
  for (const HyperParameters& values : refused) {
    EXPECT_TRUE(Refused(Validate(values), absl::StatusCode::kInvalidArgument));
  }
}

TEST(HyperParameterOverrides, ChangeWhatTheyNameAndNothingElse) {
  const HyperParameters base = {.lr = 0.5, .amsgrad = true};
  EXPECT_EQ(Apply(base, {}), base);
  EXPECT_EQ(Apply(base, {.lr = 0.25}), (HyperParameters{.lr = 0.25, .amsgrad = true}));
  const HyperParameterOverrides all = {.lr = 1,
                                       .beta1 = 0.1,
                                       .beta2 = 0.2,
                                       .eps = 0.3,
                                       .weight_decay = 0.4,
                                       .decoupled_weight_decay = false,
                                       .bias_correction = false,
                                       .maximize = true};
  EXPECT_EQ(Apply(base, all), (HyperParameters{.lr = 1,
                                               .beta1 = 0.1,
                                               .beta2 = 0.2,
                                               .eps = 0.3,
                                               .weight_decay = 0.4,
                                               .decoupled_weight_decay = false,
                                               .bias_correction = false,
                                               .amsgrad = true,
                                               .maximize = true}));
}

TEST(HyperParameters, AreWrittenWithTheFewestDigitsThatReadBackTheSame) {
  EXPECT_EQ(ToString({}),
            "lr=0.001 betas=(0.9, 0.999) eps=1e-08 weight_decay=0.01 decoupled_weight_decay=true "
            "bias_correction=true amsgrad=false maximize=false");
  EXPECT_THAT(ToString({.lr = 1.0 / 3, .maximize = true}),
              testing::AllOf(HasSubstr("lr=0.3333333333333333 "), HasSubstr("maximize=true")));
}

}  // namespace
}  // namespace ballast
