// Agreement with torch.optim: max|a-b| <= 1e-6 max|b| per tensor after 100 steps, in every plane, for
// every rule and option alone and together and for several groups with different everything, on
// every instruction set. bias_correction=false has no peer in torch; numpy_adam_test.py covers it.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/rules/muon.h"
#include "cpu_optimizer_service/common/rules/newton_schulz.h"
#include "cpu_optimizer_service/kernels/kernels.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/plain_adamw.h"

namespace ballast {
namespace {

constexpr char kGoldens[] = "tests/cpu_optimizer_service/parity/torch_goldens.txt";
constexpr int kSteps = 100;

// One param group of one case: its settings, its inputs, and what torch made of them.
struct Golden {
  std::string case_name;
  HyperParameters values;
  int64_t elements = 0;
  int64_t rows = 0;  // Of a matrix.
  uint64_t seed = 0;
  int scale_exponent = 0;
  std::map<std::string, std::vector<float>> planes;
};

std::vector<Golden> ReadGoldens() {
  std::vector<Golden> goldens;
  std::ifstream file(kGoldens);
  std::string case_name;
  std::string text;
  while (std::getline(file, text)) {
    std::istringstream line(text);
    std::string word;
    line >> word;
    if (word.empty() || word == "#") continue;
    if (word == "case") {
      line >> case_name;
    } else if (word == "group") {
      Golden golden = {.case_name = case_name};
      std::string rule;
      line >> rule >> golden.elements >> golden.seed >> golden.scale_exponent;
      EXPECT_TRUE(line) << text;
      golden.values = DefaultsOf(FindRule(rule).value());
      std::map<std::string, double> given;
      while (line >> word) {
        const size_t equals = word.find('=');
        given[word.substr(0, equals)] = std::stod(word.substr(equals + 1));
      }
      ForEachOf(
          golden.values.rule,
          [&]<typename T>(const char* name, T& value) {
            const auto found = given.find(name);
            if (found != given.end()) value = static_cast<T>(found->second);
          },
          golden.values);
      golden.rows = static_cast<int64_t>(given["rows"]);
      goldens.push_back(golden);
    } else {
      std::vector<float>& plane = goldens.back().planes[word];
      for (uint32_t bits; line >> std::hex >> bits;) plane.push_back(std::bit_cast<float>(bits));
    }
  }
  return goldens;
}

// The inputs, as make_torch_goldens.py makes them.

uint64_t Hashed(uint64_t seed, uint64_t step, uint64_t element) {
  uint64_t x = element + (seed << 40) + (step << 20) + 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

std::vector<float> MakeValues(const Golden& golden, int step, int exponent) {
  std::vector<float> values(static_cast<size_t>(golden.elements));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint64_t bits = Hashed(golden.seed, static_cast<uint64_t>(step), i);
    const auto mantissa = static_cast<int64_t>(bits >> 40) - (int64_t{1} << 23);
    values[i] = bits % 16 == 0 ? 0.0f : std::ldexp(static_cast<float>(mantissa), exponent - 23);
  }
  return values;
}

void UpdateMatrix(const Golden& golden, RuleRun run) {
  const int64_t columns = golden.elements / golden.rows;
  std::vector<uint16_t> direction(golden.elements);
  run.shard = direction.data();
  run.shard_dtype = DType::kBFloat16;
  UpdateByRule(run);
  OrthogonalizeReference(absl::MakeSpan(direction), golden.rows, columns, golden.values);
  run.round = Round::kSecond;
  run.gradient = direction.data();
  run.gradient_dtype = DType::kBFloat16;
  run.multiplier = static_cast<float>(AdjustmentOf(golden.values, golden.rows, columns));
  run.shard = nullptr;
  UpdateByRule(run);
}

// By plane.
std::map<std::string, std::vector<float>> Train(const Golden& golden) {
  std::map<std::string, std::vector<float>> state;
  RuleRun run = {.elements = golden.elements, .values = &golden.values};
  size_t place = 0;
  for (const Plane plane : PlanesOf(golden.values)) {
    std::vector<float>& values = state[std::string(Name(plane))];
    values.assign(static_cast<size_t>(golden.elements), InitialValue(golden.values, plane));
    if (plane == Plane::kMaster) values = MakeValues(golden, 0, 0);
    run.from[place] = run.to[place] = values.data();
    ++place;
  }
  for (int step = 1; step <= kSteps; ++step) {
    const std::vector<float> gradient =
        MakeValues(golden, step, golden.scale_exponent + step * 7 % 11 - 5);
    run.gradient = gradient.data();
    run.update_count = step;
    if (RowOf(golden.values.rule).rounds == 1) {
      UpdateByRule(run);
    } else {
      UpdateMatrix(golden, run);
    }
  }
  return state;
}

void ExpectClose(const std::vector<float>& actual, const std::vector<float>& expected,
                 const std::string& what, double tolerance = 1e-6) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  double greatest = 0;
  double difference = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(std::isfinite(actual[i]) && std::isfinite(expected[i])) << what << " " << i;
    greatest = std::max(greatest, std::fabs(double{expected[i]}));
    difference = std::max(difference, std::fabs(double{actual[i]} - double{expected[i]}));
  }
  EXPECT_GT(greatest, 0) << what;
  EXPECT_LE(difference, tolerance * greatest) << what;
}

class TorchParityTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(SetKernelTargetForTest(GetParam())); }
  void TearDown() override { ASSERT_TRUE(SetKernelTargetForTest("")); }
};

INSTANTIATE_TEST_SUITE_P(Targets, TorchParityTest, testing::ValuesIn(SupportedKernelTargets()),
                         [](const auto& param_info) { return param_info.param; });

TEST_P(TorchParityTest, EveryTensorIsTorchsAfterAHundredSteps) {
  const std::vector<Golden> goldens = ReadGoldens();
  ASSERT_EQ(goldens.size(), 61u) << "in " << kGoldens;
  std::set<Rule> rules;
  for (const Golden& golden : goldens) {
    rules.insert(golden.values.rule);
    const auto state = Train(golden);
    ASSERT_EQ(state.size(), golden.planes.size()) << golden.case_name;
    for (const auto& [plane, values] : state) {
      ExpectClose(values, golden.planes.at(plane),
                  golden.case_name + " " + ToString(golden.values) + " " + plane);
    }
  }
  EXPECT_EQ(rules.size(), Rules().size());
}

// torch computes in fp32 and so rounds the weight in each step, by at most 2^-24 of it.
TEST(PlainAdamW, IsTorchsAfterAHundredSteps) {
  int compared = 0;
  for (const Golden& golden : ReadGoldens()) {
    const HyperParameters& values = golden.values;
    if (values.rule != Rule::kAdam || values.amsgrad || values.maximize) continue;
    if (!values.decoupled_weight_decay && values.weight_decay > 0) continue;
    std::vector<PlainAdamW> elements;
    for (const float weight : MakeValues(golden, 0, 0)) elements.push_back({weight, values});
    for (int step = 1; step <= kSteps; ++step) {
      const std::vector<float> gradient =
          MakeValues(golden, step, golden.scale_exponent + step * 7 % 11 - 5);
      for (size_t i = 0; i < elements.size(); ++i) elements[i].Update(gradient[i]);
    }
    std::vector<float> weights;
    for (const PlainAdamW& element : elements) {
      weights.push_back(static_cast<float>(element.weight));
    }
    ExpectClose(weights, golden.planes.at("master"), golden.case_name + " " + ToString(values),
                kSteps * 0x1p-24);
    ++compared;
  }
  EXPECT_GE(compared, 5);
}

}  // namespace
}  // namespace ballast
