#include "cpu_optimizer_service/common/hyper_parameters.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/rule.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using testing::HasSubstr;

TEST(HyperParameters, AreValidByDefaultAndAtTheirBounds) {
  EXPECT_TRUE(Validate(HyperParameters()).ok());
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
                                       .momentum = 0.5,
                                       .dampening = 0.6,
                                       .nesterov = true,
                                       .lr_decay = 0.7,
                                       .ns_steps = 2,
                                       .ns_a = 0.8,
                                       .ns_b = 0.9,
                                       .ns_c = 1.1,
                                       .match_rms_adamw = true,
                                       .maximize = true};
  EXPECT_EQ(Apply(base, all), (HyperParameters{.lr = 1,
                                               .beta1 = 0.1,
                                               .beta2 = 0.2,
                                               .eps = 0.3,
                                               .weight_decay = 0.4,
                                               .decoupled_weight_decay = false,
                                               .bias_correction = false,
                                               .amsgrad = true,
                                               .momentum = 0.5,
                                               .dampening = 0.6,
                                               .nesterov = true,
                                               .lr_decay = 0.7,
                                               .ns_steps = 2,
                                               .ns_a = 0.8,
                                               .ns_b = 0.9,
                                               .ns_c = 1.1,
                                               .match_rms_adamw = true,
                                               .maximize = true}));
}

TEST(HyperParameters, AreWrittenWithTheFewestDigitsThatReadBackTheSame) {
  EXPECT_EQ(ToString(HyperParameters()),
            "adam lr=0.001 beta1=0.9 beta2=0.999 eps=1e-08 weight_decay=0.01 "
            "decoupled_weight_decay=true bias_correction=true amsgrad=false maximize=false");
  EXPECT_THAT(ToString(HyperParameters{.lr = 1.0 / 3, .maximize = true}),
              testing::AllOf(HasSubstr("lr=0.3333333333333333 "), HasSubstr("maximize=true")));
  EXPECT_EQ(ToString(DefaultsOf(Rule::kSignSgd)), "signsgd lr=0.001 weight_decay=0 maximize=false");
  EXPECT_THAT(ToString(DefaultsOf(Rule::kMuon)), HasSubstr(" ns_steps=5 ns_a=3.4445 ns_b=-4.775 "));
}

TEST(Rule, EachHasARowWithNamesOfFields) {
  std::set<std::string> fields;
  HyperParameters values;
  ForEachHyperParameter([&](const char* name, auto&) { fields.insert(name); }, values);
  std::set<std::string> used;
  for (size_t i = 0; i < Rules().size(); ++i) {
    const RuleRow& row = Rules()[i];
    EXPECT_EQ(row.defaults.rule, static_cast<Rule>(i));
    EXPECT_EQ(FindRule(row.name), static_cast<Rule>(i));
    EXPECT_TRUE(Validate(row.defaults).ok()) << row.name;
    for (const absl::string_view name : row.hyper_parameters) used.emplace(name);
    const PlaneList planes = PlanesOf(row.defaults);
    EXPECT_EQ(planes[0], Plane::kMaster) << row.name;
    EXPECT_TRUE(std::ranges::is_sorted(planes)) << row.name;
  }
  EXPECT_EQ(used, fields);
  EXPECT_EQ(FindRule("muown"), std::nullopt);
}

TEST(Rule, RefusesByNameWhatTorchRefuses) {
  const auto with = [](Rule rule, auto change) {
    HyperParameters values = DefaultsOf(rule);
    change(values);
    return Validate(values);
  };
  const auto refused = [&](Rule rule, auto change) {
    EXPECT_TRUE(Refused(with(rule, change), absl::StatusCode::kInvalidArgument));
  };
  using Values = HyperParameters;
  for (const RuleRow& row : Rules()) {
    refused(row.defaults.rule, [](Values& v) { v.lr = -1; });
    refused(row.defaults.rule, [](Values& v) { v.weight_decay = NAN; });
  }
  refused(Rule::kSgd, [](Values& v) { v.momentum = -0.1; });
  refused(Rule::kSgd, [](Values& v) { v.dampening = INFINITY; });
  refused(Rule::kSgd, [](Values& v) { v.nesterov = true; });
  refused(Rule::kSgd, [](Values& v) { v.momentum = 0.9, v.nesterov = true, v.dampening = 0.1; });
  refused(Rule::kLion, [](Values& v) { v.beta2 = 1; });
  refused(Rule::kAdagrad, [](Values& v) { v.eps = -1; });
  refused(Rule::kMuon, [](Values& v) { v.momentum = -0.1; });
  refused(Rule::kMuon, [](Values& v) { v.ns_steps = 100; });
  refused(Rule::kMuon, [](Values& v) { v.ns_steps = -1; });
  refused(Rule::kMuon, [](Values& v) { v.ns_b = -INFINITY; });
  refused(Rule::kAdagrad, [](Values& v) { v.lr_decay = -1; });
  refused(Rule::kAdagrad, [](Values& v) { v.initial_accumulator_value = -1; });
  // What a rule does not have is not looked at.
  EXPECT_TRUE(with(Rule::kSignSgd, [](Values& v) { v.beta1 = 7; }).ok());
}

TEST(Rule, RefusesChangesThatItDoesNotHaveOrThatChangeItsPlanes) {
  const auto refused = [](const HyperParameters& values, const HyperParameterOverrides& changes) {
    return Refused(ValidateChanges(values, changes), absl::StatusCode::kInvalidArgument);
  };
  HyperParameters sgd = DefaultsOf(Rule::kSgd);
  EXPECT_TRUE(refused(sgd, {.beta1 = 0.5}));
  EXPECT_TRUE(refused(sgd, {.momentum = 0.5}));
  EXPECT_TRUE(refused({}, {.momentum = 0.5}));
  EXPECT_TRUE(refused({}, {.lr = -1}));
  sgd.momentum = 0.9;
  EXPECT_TRUE(refused(sgd, {.momentum = 0}));
  EXPECT_TRUE(ValidateChanges(sgd, {.lr = 1, .momentum = 0.5, .nesterov = true}).ok());
  EXPECT_EQ(PlanesOf(sgd).size(), 2u);
  EXPECT_EQ(PlanesOf(DefaultsOf(Rule::kSgd)).size(), 1u);
}

TEST(Rule, SaysWhyStateOfOneDoesNotFitAnother) {
  HyperParameters sgd = DefaultsOf(Rule::kSgd);
  HyperParameters heavy = sgd;
  heavy.momentum = 0.9;
  EXPECT_EQ(DifferenceOfPlanes("group w", sgd, sgd), "");
  EXPECT_TRUE(Says(DifferenceOfPlanes("group w", sgd, DefaultsOf(Rule::kLion))));
  EXPECT_TRUE(Says(DifferenceOfPlanes("group w", sgd, heavy)));
}

}  // namespace
}  // namespace ballast
