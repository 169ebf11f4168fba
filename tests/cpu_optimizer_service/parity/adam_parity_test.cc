// Agreement with torch.optim.Adam and AdamW: max|a-b| <= 1e-6 max|b| per tensor after 100 steps, in
// the weights and in the moments, for every option alone and together and for several groups with
// different everything, on every instruction set. bias_correction=false has no peer in torch;
// numpy_adam_test.py covers it.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/adam.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
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
  uint64_t seed = 0;
  int scale_exponent = 0;
  std::map<std::string, std::vector<float>> planes;
};

double ReadDouble(std::istringstream& line) {
  std::string word;
  line >> word;
  return std::stod(word);
}

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
      golden.values.lr = ReadDouble(line);
      golden.values.beta1 = ReadDouble(line);
      golden.values.beta2 = ReadDouble(line);
      golden.values.eps = ReadDouble(line);
      golden.values.weight_decay = ReadDouble(line);
      line >> golden.values.decoupled_weight_decay >> golden.values.amsgrad >>
          golden.values.maximize >> golden.elements >> golden.seed >> golden.scale_exponent;
      EXPECT_TRUE(line) << text;
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

struct State {
  std::vector<float> master, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

State Train(const Golden& golden) {
  const std::vector<float> zeros(static_cast<size_t>(golden.elements));
  State state = {MakeValues(golden, 0, 0), zeros, zeros, zeros};
  float* max_exp_avg_sq = golden.values.amsgrad ? state.max_exp_avg_sq.data() : nullptr;
  for (int step = 1; step <= kSteps; ++step) {
    const std::vector<float> gradient =
        MakeValues(golden, step, golden.scale_exponent + step * 7 % 11 - 5);
    UpdateAdam({.elements = golden.elements,
                .gradient = gradient.data(),
                .gradient_dtype = DType::kFloat32,
                .master = state.master.data(),
                .exp_avg = state.exp_avg.data(),
                .exp_avg_sq = state.exp_avg_sq.data(),
                .max_exp_avg_sq = max_exp_avg_sq,
                .new_master = state.master.data(),
                .new_exp_avg = state.exp_avg.data(),
                .new_exp_avg_sq = state.exp_avg_sq.data(),
                .new_max_exp_avg_sq = max_exp_avg_sq,
                .shard = nullptr,
                .shard_dtype = DType::kFloat32,
                .scalars = MakeAdamScalars(golden.values, step, 1)});
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

class AdamParityTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(SetKernelTargetForTest(GetParam())); }
  void TearDown() override { ASSERT_TRUE(SetKernelTargetForTest("")); }
};

INSTANTIATE_TEST_SUITE_P(Targets, AdamParityTest, testing::ValuesIn(SupportedKernelTargets()),
                         [](const auto& param_info) { return param_info.param; });

TEST_P(AdamParityTest, EveryTensorIsTorchsAfterAHundredSteps) {
  const std::vector<Golden> goldens = ReadGoldens();
  ASSERT_EQ(goldens.size(), 30u) << "in " << kGoldens;
  for (const Golden& golden : goldens) {
    const std::string what = golden.case_name + " " + ToString(golden.values) + " ";
    const State state = Train(golden);
    ExpectClose(state.master, golden.planes.at("master"), what + "master");
    ExpectClose(state.exp_avg, golden.planes.at("exp_avg"), what + "exp_avg");
    ExpectClose(state.exp_avg_sq, golden.planes.at("exp_avg_sq"), what + "exp_avg_sq");
    if (golden.values.amsgrad) {
      ExpectClose(state.max_exp_avg_sq, golden.planes.at("max_exp_avg_sq"),
                  what + "max_exp_avg_sq");
    }
  }
}

// torch computes in fp32 and so rounds the weight in each step, by at most 2^-24 of it.
TEST(PlainAdamW, IsTorchsAfterAHundredSteps) {
  int compared = 0;
  for (const Golden& golden : ReadGoldens()) {
    const HyperParameters& values = golden.values;
    if (values.amsgrad || values.maximize) continue;
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
