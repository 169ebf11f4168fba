#include "cpu_optimizer_service/kernels/kernels.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/floating_point_mode.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/rules/adam.h"
#include "cpu_optimizer_service/common/rules/newton_schulz.h"
#include "cpu_optimizer_service/kernels/newton_schulz.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cpu_optimizer_service/kernels/guarded_array.h"

namespace ballast {
namespace {

constexpr std::array kDTypes = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

class KernelTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(SetKernelTargetForTest(GetParam())); }
  void TearDown() override { ASSERT_TRUE(SetKernelTargetForTest("")); }
};

INSTANTIATE_TEST_SUITE_P(Targets, KernelTest, testing::ValuesIn(SupportedKernelTargets()),
                         [](const auto& param_info) { return param_info.param; });

// Around the ends of vectors, of turns of the loop and of blocks.
std::vector<int64_t> Sizes() {
  std::vector<int64_t> sizes;
  for (int64_t size = 0; size <= 33; ++size) sizes.push_back(size);
  for (const int64_t size : {47, 63, 64, 65, 95, 129, 255, 256, 257}) sizes.push_back(size);
  return sizes;
}

// Ordinary values of many magnitudes, among them what is special to fp32 or to the update.
class Values {
 public:
  // One in `special_every` is special.
  explicit Values(uint32_t seed, uint32_t special_every = 4)
      : random_(seed), special_every_(special_every) {}

  float Next() {
    if (random_() % special_every_ == 0) {
      const float special = kSpecial[random_() % kSpecial.size()];
      return random_() % 2 == 0 ? special : -special;
    }
    const float mantissa = static_cast<float>(static_cast<int32_t>(random_())) * 0x1p-31f;
    return std::ldexp(mantissa, static_cast<int>(random_() % 40) - 30);
  }

  void Fill(GuardedArray& array, bool not_negative = false) {
    for (int64_t i = 0; i < array.elements(); ++i) {
      const float value = Next();
      array.Set(i, not_negative ? std::fabs(value) : value);
    }
  }

 private:
  static constexpr std::array kSpecial = {0.0f,
                                          1.0f,
                                          0x1p-149f,
                                          0x1.fffffcp-127f,
                                          0x1p-126f,
                                          0x1.000002p-126f,
                                          0x1.8p-126f,
                                          0x1p-125f,
                                          0x1p-124f,
                                          0x1.fffffep-64f,
                                          0x1p-63f,
                                          0x1.000002p-63f,
                                          0x1p-24f,
                                          0x1p-25f,
                                          65504.0f,
                                          65520.0f,
                                          3.3895314e38f,
                                          3.4028235e38f,
                                          std::numeric_limits<float>::infinity(),
                                          std::numeric_limits<float>::quiet_NaN()};

  std::mt19937 random_;
  const uint32_t special_every_;
};

// Bit for bit, but for the payload of a NaN.
testing::AssertionResult Same(const GuardedArray& actual, const GuardedArray& expected) {
  if (!actual.GuardsAreWhole()) return testing::AssertionFailure() << "wrote beyond its array";
  for (int64_t i = 0; i < expected.elements(); ++i) {
    const float a = actual.Get(i);
    const float e = expected.Get(i);
    if (std::isnan(a) && std::isnan(e)) continue;
    if (std::bit_cast<uint32_t>(a) != std::bit_cast<uint32_t>(e)) {
      return testing::AssertionFailure() << "element " << i << ": " << a << ", not " << e;
    }
  }
  return testing::AssertionSuccess();
}

// --- Updates ---

struct UpdateCase {
  HyperParameters values;
  DType gradient_dtype;
  std::optional<DType> shard_dtype;
  int64_t elements;
  int64_t shift;  // Of every array, in elements, from an aligned address.
  bool in_place;
  Round round = Round::kFirst;
  bool is_again = false;  // Of two rounds, the first one's direction again.
};

std::string Describe(const UpdateCase& c) {
  return absl::StrCat(ToString(c.values), " gradient ", int{static_cast<uint8_t>(c.gradient_dtype)},
                      " shard ", c.shard_dtype ? int{static_cast<uint8_t>(*c.shard_dtype)} : -1,
                      " elements ", c.elements, " shift ", c.shift, " in place ", c.in_place,
                      " second round ", c.round == Round::kSecond, " again ", c.is_again);
}

// Sources and destinations of one update, for the reference and the kernel alike.
struct Planes {
  Planes(const UpdateCase& c, uint32_t seed, uint32_t special_every = 4)
      : gradient(c.gradient_dtype, c.elements, c.shift),
        old_state(MakeState(c)),
        new_state(MakeState(c)),
        shard(c.shard_dtype.value_or(DType::kFloat32), c.elements, c.shift) {
    Values values(seed, special_every);
    values.Fill(gradient);
    const PlaneList planes = PlanesOf(c.values);
    for (size_t place = 0; place < planes.size(); ++place) {
      values.Fill(old_state[place], /*not_negative=*/IsOfSquares(planes[place]));
    }
  }

  RuleRun Run(const UpdateCase& c, int64_t update_count = 3) {
    std::vector<GuardedArray>& to = c.in_place ? old_state : new_state;
    RuleRun run = {.elements = c.elements,
                   .gradient = gradient.data(),
                   .gradient_dtype = c.gradient_dtype,
                   .shard = c.shard_dtype ? shard.data() : nullptr,
                   .shard_dtype = c.shard_dtype.value_or(DType::kFloat32),
                   .values = &c.values,
                   .update_count = update_count,
                   .multiplier = 0.75f,
                   .round = c.round};
    for (size_t place = 0; place < PlanesOf(c.values).size(); ++place) {
      run.from[place] = old_state[place].floats();
      run.to[place] = to[place].floats();
    }
    if (c.is_again) run.to[1] = nullptr;
    return run;
  }
  AdamRun Run(const UpdateCase& c, const AdamScalars& scalars) {
    AdamRun run = AdamRunOf(Run(c));
    run.scalars = scalars;
    return run;
  }

  static std::vector<GuardedArray> MakeState(const UpdateCase& c) {
    std::vector<GuardedArray> planes;
    // Different shifts, so that no two planes are aligned alike.
    for (int64_t plane = 0; plane < 4; ++plane) {
      planes.emplace_back(DType::kFloat32, c.elements, c.shift == 0 ? 0 : c.shift + plane);
    }
    return planes;
  }

  GuardedArray gradient;
  std::vector<GuardedArray> old_state;
  std::vector<GuardedArray> new_state;
  GuardedArray shard;
};

void ExpectSame(const UpdateCase& c, const Planes& actual, const Planes& expected) {
  for (size_t plane = 0; plane < kMaxPlanes; ++plane) {
    ASSERT_TRUE(Same(actual.old_state[plane], expected.old_state[plane])) << plane << Describe(c);
    ASSERT_TRUE(Same(actual.new_state[plane], expected.new_state[plane])) << plane << Describe(c);
  }
  ASSERT_TRUE(Same(actual.gradient, expected.gradient)) << Describe(c);
  ASSERT_TRUE(Same(actual.shard, expected.shard)) << Describe(c);
}

void ExpectKernelEqualsReference(const UpdateCase& c, uint32_t seed, uint32_t special_every = 4) {
  std::vector<UpdateCase> rounds = {c};
  if (RowOf(c.values.rule).rounds > 1) {
    rounds.push_back(c);
    rounds.back().round = Round::kSecond;
    if (c.shard_dtype.has_value()) {
      rounds.push_back(c);
      rounds.back().is_again = true;
    }
  }
  for (const UpdateCase& each : rounds) {
    Planes expected(each, seed, special_every);
    Planes actual(each, seed, special_every);
    UpdateReference(expected.Run(each, 1 + seed % 50));
    UpdateByRule(actual.Run(each, 1 + seed % 50));
    ExpectSame(each, actual, expected);
  }
}

void ExpectKernelEqualsReference(const UpdateCase& c, const AdamScalars& scalars, uint32_t seed,
                                 uint32_t special_every) {
  Planes expected(c, seed, special_every);
  Planes actual(c, seed, special_every);
  UpdateAdamReference(expected.Run(c, scalars));
  UpdateAdam(actual.Run(c), scalars);
  ExpectSame(c, actual, expected);
}

std::vector<HyperParameters> EveryOption() {
  std::vector<HyperParameters> all;
  for (const double weight_decay : {0.0, 0.1}) {
    for (const int flags : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}) {
      const bool decoupled = (flags & 1) != 0;
      if (weight_decay == 0 && decoupled) continue;
      all.push_back({.lr = 0.01,
                     .beta1 = 0.9,
                     .beta2 = 0.95,
                     .eps = (flags & 6) == 6 ? 0.0 : 1e-8,
                     .weight_decay = weight_decay,
                     .decoupled_weight_decay = decoupled,
                     .bias_correction = (flags & 2) != 0,
                     .amsgrad = (flags & 4) != 0,
                     .maximize = (flags & 8) != 0});
    }
  }
  for (const RuleRow& row : Rules().subspan(1)) {
    for (const int flags : {0, 1, 2, 3, 4, 5}) {
      // The others have fewer options.
      if (row.defaults.rule != Rule::kSgd && flags % 2 == 0) continue;
      HyperParameters values = row.defaults;
      values.lr = flags == 5 ? 3 : 0.01;  // Above 1 no product may be left out.
      values.weight_decay = flags % 2 == 0 ? 0 : 0.1;
      values.momentum = flags < 2 ? 0 : 0.9;
      values.dampening = flags == 2 ? 0.25 : 0;
      values.nesterov = flags > 3;
      values.lr_decay = flags == 3 ? 0.1 : 0;
      values.maximize = flags >= 4;
      all.push_back(values);
    }
  }
  return all;
}

TEST_P(KernelTest, UpdateEqualsTheReferenceForEveryOptionFormatAndSize) {
  uint32_t seed = 0;
  for (const HyperParameters& values : EveryOption()) {
    for (const DType gradient_dtype : kDTypes) {
      for (const std::optional<DType> shard_dtype :
           {std::optional<DType>(), std::optional(DType::kBFloat16), std::optional(DType::kFloat16),
            std::optional(DType::kFloat32)}) {
        for (const int64_t elements : Sizes()) {
          ++seed;
          const UpdateCase c = {.values = values,
                                .gradient_dtype = gradient_dtype,
                                .shard_dtype = shard_dtype,
                                .elements = elements,
                                .shift = seed % 2 == 0 ? 0 : seed % 37,
                                .in_place = seed % 4 < 2};
          ExpectKernelEqualsReference(c, seed);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(KernelTest, UpdateEqualsTheReferenceAtEveryAlignment) {
  for (int64_t shift = 0; shift < 64; ++shift) {
    for (const DType shard_dtype : kDTypes) {
      for (const bool in_place : {false, true}) {
        const UpdateCase c = {.values = {.amsgrad = true},
                              .gradient_dtype = DType::kBFloat16,
                              .shard_dtype = shard_dtype,
                              .elements = 150,
                              .shift = shift,
                              .in_place = in_place};
        ExpectKernelEqualsReference(c, static_cast<uint32_t>(shift));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(KernelTest, UpdateMayLeaveTheShardWhereTheGradientWas) {
  uint32_t seed = 0;
  for (const DType dtype : kDTypes) {
    for (const int64_t elements : Sizes()) {
      for (const bool amsgrad : {false, true}) {
        ++seed;
        const UpdateCase c = {.values = {.amsgrad = amsgrad},
                              .gradient_dtype = dtype,
                              .shard_dtype = dtype,
                              .elements = elements,
                              .shift = seed % 3 == 0 ? seed % 37 : 0,
                              .in_place = true};
        Planes expected(c, seed);
        Planes actual(c, seed);
        UpdateReference(expected.Run(c));
        RuleRun run = actual.Run(c);
        run.shard = actual.gradient.data();
        UpdateByRule(run);
        ASSERT_TRUE(Same(actual.gradient, expected.shard)) << Describe(c);
        ASSERT_TRUE(Same(actual.old_state[0], expected.old_state[0])) << Describe(c);
      }
    }
  }
}

// --- Newton-Schulz ---

std::vector<uint16_t> AnyMatrix(int64_t elements, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint16_t> matrix(elements);
  for (uint16_t& value : matrix) {
    value = FloatToBFloat16(static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f);
  }
  return matrix;
}

std::vector<uint16_t> Orthogonalized(std::vector<uint16_t> matrix, int64_t rows, int64_t columns,
                                     const HyperParameters& values) {
  std::vector<float> memory(NewtonSchulzScratch(rows, columns) + 16,
                            std::numeric_limits<float>::quiet_NaN());
  float* const aligned =
      reinterpret_cast<float*>(RoundUp(reinterpret_cast<uintptr_t>(memory.data()), uintptr_t{64}));
  NewtonSchulz newton_schulz(rows, columns, values,
                             absl::MakeSpan(aligned, NewtonSchulzScratch(rows, columns)));
  std::ranges::copy(matrix, newton_schulz.direction().begin());
  for (const Loop& loop : newton_schulz.loops()) {
    // In another order than threads would take.
    for (int64_t i = loop.count; i-- > 0;) loop.body(i);
  }
  const absl::Span<const uint16_t> result = newton_schulz.orthogonal();
  return {result.begin(), result.end()};
}

TEST_P(KernelTest, NewtonSchulzEqualsTheReference) {
  uint32_t seed = 0;
  const std::pair<int64_t, int64_t> shapes[] = {{1, 1},    {1, 70},  {70, 1},   {5, 5},
                                                {16, 64},  {64, 16}, {67, 129}, {65, 64},
                                                {33, 300}, {270, 40}};
  for (const auto& [rows, columns] : shapes) {
    for (const int32_t steps : {0, 1, 5}) {
      HyperParameters values = DefaultsOf(Rule::kMuon);
      values.ns_steps = steps;
      std::vector<uint16_t> expected = AnyMatrix(rows * columns, ++seed);
      // Some rows whose products are denormal, which are kept, whatever mode the caller is in.
      for (int64_t i = 0; i < rows * columns && seed % 2 == 0; ++i) {
        const int exponent = -60 * static_cast<int>(i / columns % 3);
        const float value = LoadElement(expected.data(), DType::kBFloat16, i);
        expected[i] = FloatToBFloat16(std::ldexp(value, exponent));
      }
      const ScopedFloatingPointMode mode(Denormals::kFlush);
      const std::vector<uint16_t> actual = Orthogonalized(expected, rows, columns, values);
      OrthogonalizeReference(absl::MakeSpan(expected), rows, columns, values);
      ASSERT_EQ(actual, expected) << rows << " x " << columns << " steps " << steps;
    }
  }
}

TEST_P(KernelTest, NewtonSchulzMakesNearlyOrthogonalRows) {
  constexpr int64_t kRows = 24;
  constexpr int64_t kColumns = 100;
  const std::vector<uint16_t> o =
      Orthogonalized(AnyMatrix(kRows * kColumns, 3), kRows, kColumns, DefaultsOf(Rule::kMuon));
  const auto at = [&](int64_t i, int64_t j) {
    return double{LoadElement(o.data(), DType::kBFloat16, i * kColumns + j)};
  };
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t other = 0; other < kRows; ++other) {
      double product = 0;
      for (int64_t j = 0; j < kColumns; ++j) product += at(i, j) * at(other, j);
      // Its singular values are 0.7 to 1.2: the coefficients give speed, not an exact 1.
      EXPECT_NEAR(product, i == other ? 1 : 0, 0.5) << i << " " << other;
    }
  }
}

TEST_P(KernelTest, NewtonSchulzOfZerosIsZeroAndOfWhatIsNotFiniteNotFinite) {
  const HyperParameters values = DefaultsOf(Rule::kMuon);
  std::vector<uint16_t> matrix(12 * 20);
  EXPECT_EQ(Orthogonalized(matrix, 12, 20, values), matrix);
  for (const uint16_t bits : {uint16_t{0x7f80}, uint16_t{0x7fc0}}) {
    matrix[77] = bits;
    const std::vector<uint16_t> o = Orthogonalized(matrix, 12, 20, values);
    EXPECT_TRUE(std::ranges::any_of(o, [](uint16_t x) { return (x & 0x7f80) == 0x7f80; }));
  }
}

// --- What an update leaves behind for a process that finishes it ---

// The planes of a chunk in pages of their own, of which a store may be made to fail; behind them the
// gradient, whose place the new weights may take.
class PagedPlanes {
 public:
  static constexpr int64_t kElements = 2048;
  static constexpr int64_t kPageElements = 1024;

  explicit PagedPlanes(const HyperParameters& values_of_rule, bool has_shard = false)
      : values_(values_of_rule),
        planes_(static_cast<int>(PlanesOf(values_).size())),
        has_shard_(has_shard) {
    void* const memory = mmap(nullptr, (planes_ + 1) * kElements * sizeof(float),
                              PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) abort();
    memory_ = static_cast<float*>(memory);
    Values values(5);
    for (int64_t i = 0; i < planes_ * kElements; ++i) {
      const float value = values.Next();
      memory_[i] = IsOfSquares(PlanesOf(values_)[i / kElements]) ? std::fabs(value) : value;
    }
    for (int64_t i = 0; i < kElements; ++i) gradient()[i] = values.Next();
  }
  ~PagedPlanes() { munmap(memory_, (planes_ + 1) * kElements * sizeof(float)); }

  int planes() const { return planes_; }
  float* plane(int plane) { return memory_ + plane * kElements; }
  float* gradient() { return memory_ + planes_ * kElements; }
  // Of the planes, or of the gradient behind them.
  void Protect(int which, int protection) {
    mprotect(memory_ + which * kElements + kPageElements, kPageElements * sizeof(float),
             protection);
  }
  void Update(int64_t begin, int64_t end, RedoWriter* redo) {
    RuleRun run = {.elements = end - begin,
                   .gradient = gradient() + begin,
                   .gradient_dtype = DType::kFloat32,
                   .shard = has_shard_ ? gradient() + begin : nullptr,
                   .shard_dtype = DType::kFloat32,
                   .values = &values_,
                   .update_count = 3,
                   .multiplier = 0.5f};
    for (int place = 0; place < planes_; ++place) {
      run.from[place] = run.to[place] = plane(place) + begin;
    }
    UpdateByRule(run, redo);
  }
  // As a process does that takes over.
  void Finish(RedoLane& lane) {
    const RedoWord word = RedoWord::Unpack(lane.word);
    for (int which = 0; which < planes_; ++which) {
      std::copy_n(lane.turns[word.turn].plane(which), word.count,
                  plane(which) + word.done - word.count);
    }
    RedoWriter redo(lane, word.chunk, word.done);
    Update(word.done, kElements, &redo);
  }
  testing::AssertionResult Equals(PagedPlanes& other) {
    for (int64_t i = 0; i < planes_ * kElements; ++i) {
      if (std::isnan(memory_[i]) && std::isnan(other.memory_[i])) continue;
      if (std::bit_cast<uint32_t>(memory_[i]) == std::bit_cast<uint32_t>(other.memory_[i]))
        continue;
      return testing::AssertionFailure()
             << "plane " << i / kElements << " differs at element " << i % kElements;
    }
    return testing::AssertionSuccess();
  }

 private:
  const HyperParameters values_;
  const int planes_;
  const bool has_shard_;
  float* memory_ = nullptr;
};

// Of one plane to four.
const HyperParameters kOne = DefaultsOf(Rule::kSignSgd);
const HyperParameters kTwo = DefaultsOf(Rule::kAdagrad);
const HyperParameters kThree = {};
const HyperParameters kFour = {.amsgrad = true};

TEST_P(KernelTest, AnUpdateThatIsCutOffBehindAnyTurnIsFinishedFromItsRecord) {
  for (const HyperParameters& values : {kOne, kTwo, kThree, kFour}) {
    PagedPlanes whole(values);
    whole.Update(0, PagedPlanes::kElements, nullptr);
    for (const int64_t done : {1, 5, 31, 32, 33, 64, 100, 1000, 2047, 2048}) {
      PagedPlanes cut(values);
      RedoLane lane;
      RedoWriter redo(lane, 7, 0);
      cut.Update(0, done, &redo);
      const RedoWord word = RedoWord::Unpack(lane.word);
      ASSERT_EQ(word.chunk, 7u);
      ASSERT_EQ(word.done, done);
      // Its last turn's values may not have come to the planes.
      for (int which = 0; which < cut.planes(); ++which) {
        std::fill_n(cut.plane(which) + done - word.count, word.count, -1.0f);
      }
      cut.Finish(lane);
      EXPECT_TRUE(cut.Equals(whole)) << done << " done, " << ToString(values);
    }
  }
}

sigjmp_buf store_failed;

// The order of stores: at the first store of a turn to any plane, or to the gradient's place, its
// record is whole. The page whose stores fail begins with a turn, or in the middle of one.
TEST_P(KernelTest, AnUpdateThatEndsAtAStoreToAnyPlaneIsFinishedFromItsRecord) {
  struct sigaction fails = {};
  fails.sa_handler = [](int) { siglongjmp(store_failed, 1); };
  struct sigaction before = {};
  std::fenv_t mode;
  ASSERT_EQ(std::fegetenv(&mode), 0);
  for (const auto& [values, has_shard, begin] :
       std::vector<std::tuple<HyperParameters, bool, int64_t>>{{kThree, false, 0},
                                                               {kFour, false, 0},
                                                               {kThree, true, 0},
                                                               {kFour, true, 0},
                                                               {kThree, false, 16},
                                                               {kThree, true, 16},
                                                               {kFour, true, 16},
                                                               {kFour, true, 7},
                                                               {kOne, true, 7},
                                                               {kTwo, true, 16}}) {
    PagedPlanes whole(values, has_shard);
    whole.Update(begin, PagedPlanes::kElements, nullptr);
    for (int which = 0; which < whole.planes() + (has_shard ? 1 : 0); ++which) {
      SCOPED_TRACE(absl::StrCat("plane ", which, ", ", ToString(values), ", shard ", has_shard,
                                ", from ", begin));
      PagedPlanes cut(values, has_shard);
      RedoLane lane;
      cut.Protect(which, PROT_READ);
      sigaction(SIGSEGV, &fails, &before);
      if (sigsetjmp(store_failed, 1) == 0) {
        RedoWriter redo(lane, 7, begin);
        cut.Update(begin, PagedPlanes::kElements, &redo);
        sigaction(SIGSEGV, &before, nullptr);
        FAIL() << "the store did not fail";
      }
      sigaction(SIGSEGV, &before, nullptr);
      std::fesetenv(&mode);
      cut.Protect(which, PROT_READ | PROT_WRITE);
      const int64_t done = RedoWord::Unpack(lane.word).done;
      cut.Finish(lane);
      EXPECT_TRUE(cut.Equals(whole));
      // Those before are read from the master weights again.
      if (has_shard) {
        EXPECT_EQ(std::memcmp(cut.gradient() + done, cut.plane(0) + done,
                              (PagedPlanes::kElements - done) * sizeof(float)),
                  0);
      }
    }
  }
}

TEST_P(KernelTest, UpdateEqualsTheReferenceAroundTheEndOfAChunk) {
  for (const int64_t elements : {kMaxChunkElements - 1, kMaxChunkElements, kMaxChunkElements + 1}) {
    for (const int64_t shift : {0, 5}) {
      const UpdateCase c = {.values = {},
                            .gradient_dtype = DType::kBFloat16,
                            .shard_dtype = DType::kBFloat16,
                            .elements = elements,
                            .shift = shift,
                            .in_place = shift == 0};
      ExpectKernelEqualsReference(c, static_cast<uint32_t>(shift));
    }
  }
}

// Factors that carry products and quotients exactly onto 2^-126, just past it, and back.
TEST_P(KernelTest, UpdateEqualsTheReferenceAtTheFlushingBoundary) {
  std::mt19937 random(3);
  const auto pick = [&random](std::initializer_list<float> values) {
    return std::data(values)[random() % values.size()];
  };
  const auto at_most_one = [&] { return pick({0.0f, 0x1p-53f, 0x1p-10f, 0.5f, 0.9f, 1.0f}); };
  for (uint32_t seed = 0; seed < 600; ++seed) {
    const AdamScalars scalars = {
        .weight_decay_kind = static_cast<WeightDecay>(seed % 3),
        .multiplier = pick({1.0f, -1.0f, 0.5f, 2.0f, 0x1p-63f, 0x1p20f, -3.0f}),
        .weight_decay = pick({0.5f, 1.0f, 2.0f, 0.1f}),
        .decay = pick({0.5f, 1.0f, 0x1.fffffep-1f, -2.0f}),
        .beta1 = at_most_one(),
        .one_minus_beta1 = at_most_one(),
        .beta2 = at_most_one(),
        .one_minus_beta2 = at_most_one(),
        .inverse_sqrt_bias_correction2 = pick({1.0f, 2.0f, 31.6f}),
        .eps = pick({0.0f, 1e-8f, 0.5f, 1.0f, 4.0f}),
        .step_size = pick({0.0f, 0.5f, 1.0f, 0x1.000002p0f, 2.0f, 8.0f})};
    const UpdateCase c = {.values = {.amsgrad = seed % 2 == 0},
                          .gradient_dtype = seed % 4 < 2 ? DType::kFloat32 : DType::kBFloat16,
                          .shard_dtype = DType::kBFloat16,
                          .elements = 500,
                          .shift = 0,
                          .in_place = true};
    ExpectKernelEqualsReference(c, scalars, seed, /*special_every=*/1);
    if (HasFatalFailure()) return;
  }
}

// Operands of 2^-126 and about it, beside operands so large that they cannot show, and sums that
// nearly cancel, each as small as the kernel's quick way takes; and one element that it must not
// take.
class NearlyTiny {
 public:
  explicit NearlyTiny(uint32_t seed) : random_(seed), must_not_at_(300 + seed * 37) {}

  // The scalars are made for it: products of 2^-126 exactly, and with `large_steps` such quotients
  // too, that the step size makes large.
  static AdamScalars Scalars(WeightDecay decay, bool large_steps) {
    return {.weight_decay_kind = decay,
            .multiplier = 1,
            .weight_decay = 0.5f,
            .decay = 0.5f,
            .beta1 = 0.5f,
            .one_minus_beta1 = 0.5f,
            .beta2 = 0.75f,
            .one_minus_beta2 = 0.25f,
            .inverse_sqrt_bias_correction2 = 1,
            .eps = large_steps ? 0x1p31f : 1.0f,
            .step_size = large_steps ? 0x1p40f : 0.5f};
  }

  // `state`: master, exp_avg, exp_avg_sq.
  void Fill(GuardedArray& gradient, std::vector<GuardedArray>& state) {
    for (int64_t i = 0; i < gradient.elements(); ++i) {
      const bool must_not = i == must_not_at_;
      const int kind = must_not ? 3 : static_cast<int>(random_() % 3);
      const float about = Sign() * std::ldexp(1 + 0x1p-23f * (random_() % 4), -94);
      float g = kind == 0 ? Sign() * 0x1p-20f : Tiny();
      float m = kind == 0 || must_not ? Tiny() : about;
      if (kind == 2) g = -m * (1 + 0x1p-23f * static_cast<float>(random_() % 3));
      gradient.Set(i, g);
      state[1].Set(i, m);
      state[2].Set(i, kind == 0 || must_not ? std::fabs(Tiny()) : std::fabs(about));
      state[0].Set(i, kind == 0 ? Tiny() : must_not && random_() % 2 == 0 ? Tiny() : about);
    }
  }

 private:
  float Sign() { return random_() % 2 == 0 ? 1.0f : -1.0f; }
  float Tiny() {
    constexpr std::array kTiny = {0.0f,      0x1p-149f,        0x1p-127f,
                                  0x1p-126f, 0x1.8p-126f,      0x1p-125f,
                                  0x1p-124f, 0x1.000002p-125f, 0x1.555556p-126f};
    return Sign() * kTiny[random_() % kTiny.size()];
  }

  std::mt19937 random_;
  const int64_t must_not_at_;
};

TEST_P(KernelTest, UpdateEqualsTheReferenceWhereTinyOperandsMeetLargerOnes) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    const UpdateCase c = {.values = {.amsgrad = seed % 4 == 3},
                          .gradient_dtype = DType::kFloat32,
                          .shard_dtype = DType::kBFloat16,
                          .elements = 5000,
                          .shift = 0,
                          .in_place = true};
    const AdamScalars scalars =
        NearlyTiny::Scalars(static_cast<WeightDecay>(seed % 3), seed % 5 == 0);
    Planes expected(c, seed);
    NearlyTiny(seed).Fill(expected.gradient, expected.old_state);
    Planes actual(c, seed);
    NearlyTiny(seed).Fill(actual.gradient, actual.old_state);
    UpdateAdamReference(expected.Run(c, scalars));
    UpdateAdam(actual.Run(c), scalars);
    for (size_t plane = 0; plane < 4; ++plane) {
      ASSERT_TRUE(Same(actual.old_state[plane], expected.old_state[plane])) << plane << " " << seed;
    }
    ASSERT_TRUE(Same(actual.shard, expected.shard)) << seed;
  }
}

TEST_P(KernelTest, OtherRulesEqualTheReferenceWhereTinyOperandsMeetLargerOnes) {
  for (uint32_t seed = 0; seed < 80; ++seed) {
    const bool large_steps = seed % 3 == 0;
    HyperParameters values = DefaultsOf(static_cast<Rule>(1 + seed % (Rules().size() - 1)));
    // Powers of two, as in NearlyTiny::Scalars.
    values.lr = large_steps ? 0x1p40 : seed % 3 == 1 ? 0.5 : 0x1p-95;
    values.beta1 = values.momentum = 0.5;
    values.beta2 = 0.75;
    values.eps = large_steps ? 0x1p31 : 1;
    values.weight_decay = seed % 2 == 0 ? 0 : 0.5;
    values.dampening = seed % 5 == 0 ? 0.5 : 0;
    values.nesterov = values.dampening == 0;
    const UpdateCase c = {.values = values,
                          .gradient_dtype = DType::kFloat32,
                          .shard_dtype = DType::kBFloat16,
                          .elements = 5000,
                          .shift = 0,
                          .in_place = true};
    Planes expected(c, seed);
    Planes actual(c, seed);
    for (Planes* const each : {&expected, &actual}) {
      NearlyTiny(seed).Fill(each->gradient, each->old_state);
      for (int64_t i = 0; i < c.elements && IsOfSquares(PlanesOf(values).back()); ++i) {
        each->old_state[1].Set(i, std::fabs(each->old_state[1].Get(i)));
      }
      RuleRun run = each->Run(c, 1 + seed % 3);
      run.multiplier = 1;
      each == &expected ? UpdateReference(run) : UpdateByRule(run);
    }
    ExpectSame(c, actual, expected);
    if (HasFatalFailure()) return;
  }
}

TEST_P(KernelTest, UpdateEqualsTheReferenceOverOrdinaryValuesWithFewSpecialOnes) {
  const std::vector<HyperParameters> options = EveryOption();
  for (uint32_t seed = 0; seed < options.size(); ++seed) {
    const UpdateCase c = {.values = options[seed],
                          .gradient_dtype = kDTypes[seed % 3],
                          .shard_dtype = DType::kBFloat16,
                          .elements = 20000,
                          .shift = seed % 5,
                          .in_place = true};
    ExpectKernelEqualsReference(c, seed, /*special_every=*/3000);
    if (HasFatalFailure()) return;
  }
}

TEST_P(KernelTest, UpdateDoesNotSeeTheCallersRoundingMode) {
  const UpdateCase c = {.values = {},
                        .gradient_dtype = DType::kFloat32,
                        .shard_dtype = DType::kBFloat16,
                        .elements = 257,
                        .shift = 0,
                        .in_place = true};
  const AdamScalars scalars = MakeAdamScalars(c.values, 3, 1);
  Planes expected(c, 1);
  Planes actual(c, 1);
  UpdateAdam(expected.Run(c), scalars);
  {
    const ScopedFloatingPointMode restore_afterwards(Denormals::kKeep);
#if defined(__x86_64__)
    _mm_setcsr(0x1f80u | 0x6000u);  // Towards zero.
#endif
    UpdateAdam(actual.Run(c), scalars);
  }
  for (size_t plane = 0; plane < 3; ++plane) {
    EXPECT_TRUE(Same(actual.old_state[plane], expected.old_state[plane])) << plane;
  }
  EXPECT_TRUE(Same(actual.shard, expected.shard));
}

// --- Sums of squares ---

TEST_P(KernelTest, BlockSumsEqualTheReference) {
  for (const DType dtype : kDTypes) {
    for (const int64_t blocks : {0, 1, 2, 7}) {
      for (const int64_t shift : {0, 1, 13}) {
        GuardedArray gradient(dtype, blocks * kBlockElements, shift);
        Values values(static_cast<uint32_t>(blocks + shift));
        for (int64_t i = 0; i < gradient.elements(); ++i) {
          float value = values.Next();
          // Block 1 and 3 keep what is not finite.
          if (!std::isfinite(value) && i / kBlockElements % 2 == 0) value = 0x1p-149f;
          gradient.Set(i, value);
        }
        std::vector<double> sums(static_cast<size_t>(blocks));
        {
          const ScopedFloatingPointMode callers(shift == 1 ? Denormals::kFlush : Denormals::kKeep);
          BlockSumsOfSquares(gradient.data(), dtype, absl::MakeSpan(sums));
        }
        for (int64_t b = 0; b < blocks; ++b) {
          const double expected = BlockSumOfSquaresReference(
              gradient.data() + b * kBlockElements * SizeBytes(dtype), dtype);
          const double actual = sums[static_cast<size_t>(b)];
          if (std::isnan(expected)) {
            EXPECT_TRUE(std::isnan(actual));
          } else {
            EXPECT_EQ(std::bit_cast<uint64_t>(actual), std::bit_cast<uint64_t>(expected)) << b;
          }
        }
      }
    }
  }
}

// --- Sums of gradients, conversions ---

TEST_P(KernelTest, AddingAGradientEqualsScalarAdditionAndKeepsDenormals) {
  for (const DType dtype : kDTypes) {
    for (const int64_t elements : Sizes()) {
      for (const int64_t shift : {0, 3}) {
        Values values(static_cast<uint32_t>(elements));
        GuardedArray gradient(dtype, elements, shift);
        GuardedArray accumulator(DType::kFloat32, elements, shift);
        GuardedArray expected(DType::kFloat32, elements, 0);
        values.Fill(gradient);
        values.Fill(accumulator);
        for (int64_t i = 0; i < elements; ++i) {
          expected.Set(i, accumulator.Get(i) + gradient.Get(i));
        }
        {
          const ScopedFloatingPointMode callers(Denormals::kFlush);
          AddGradient(accumulator.floats(), gradient.data(), dtype, elements);
        }
        ASSERT_TRUE(Same(accumulator, expected)) << Name(dtype) << " " << elements;
      }
    }
  }
}

TEST_P(KernelTest, SummingTwoGradientsEqualsScalarAdditionAndKeepsDenormals) {
  for (const DType dtype : kDTypes) {
    for (const int64_t elements : Sizes()) {
      for (const int64_t shift : {0, 3}) {
        Values values(static_cast<uint32_t>(elements + 1000));
        GuardedArray first(dtype, elements, shift);
        GuardedArray second(dtype, elements, 2 * shift);
        GuardedArray accumulator(DType::kFloat32, elements, shift);
        GuardedArray expected(DType::kFloat32, elements, 0);
        values.Fill(first);
        values.Fill(second);
        for (int64_t i = 0; i < elements; ++i) expected.Set(i, first.Get(i) + second.Get(i));
        {
          const ScopedFloatingPointMode callers(Denormals::kFlush);
          SumGradients(accumulator.floats(), first.data(), second.data(), dtype, elements);
        }
        ASSERT_TRUE(Same(accumulator, expected)) << Name(dtype) << " " << elements;
      }
    }
  }
}

TEST_P(KernelTest, ConversionToFloatEqualsTheScalarOneForEveryValue) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    GuardedArray from(dtype, 0x10000 + 3, 1);
    for (int64_t i = 0; i < from.elements(); ++i) {
      const auto bits = static_cast<uint16_t>(i);
      std::memcpy(from.data() + 2 * i, &bits, sizeof(bits));
    }
    GuardedArray to(DType::kFloat32, from.elements(), 1);
    ConvertToFloat(from.data(), dtype, to.floats(), from.elements());
    ASSERT_TRUE(Same(to, from)) << Name(dtype);
  }
}

TEST_P(KernelTest, ConversionFromFloatEqualsTheScalarOne) {
  // Every upper half with lower halves around the ties of both formats.
  constexpr std::array<uint32_t, 12> kLowerHalves = {
      0, 1, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0xf000, 0xffff};
  for (const DType dtype : kDTypes) {
    for (const uint32_t lower : kLowerHalves) {
      GuardedArray from(DType::kFloat32, 0x10000, 1);
      GuardedArray expected(dtype, 0x10000, 0);
      for (int64_t i = 0; i < from.elements(); ++i) {
        const float value = std::bit_cast<float>(static_cast<uint32_t>(i) << 16 | lower);
        from.Set(i, value);
        expected.Set(i, value);
      }
      GuardedArray to(dtype, 0x10000, 1);
      ConvertFromFloat(from.floats(), to.data(), dtype, from.elements());
      ASSERT_TRUE(Same(to, expected)) << Name(dtype) << " " << lower;
    }
  }
}

TEST_P(KernelTest, ConversionsTakeEverySizeAndStayInTheirArray) {
  for (const DType dtype : kDTypes) {
    for (const int64_t elements : Sizes()) {
      Values values(static_cast<uint32_t>(elements));
      GuardedArray from(DType::kFloat32, elements, 1);
      values.Fill(from);
      GuardedArray expected(dtype, elements, 0);
      for (int64_t i = 0; i < elements; ++i) expected.Set(i, from.Get(i));
      GuardedArray to(dtype, elements, 5);
      ConvertFromFloat(from.floats(), to.data(), dtype, elements);
      ASSERT_TRUE(Same(to, expected)) << Name(dtype) << " " << elements;
      GuardedArray back(DType::kFloat32, elements, 7);
      ConvertToFloat(to.data(), dtype, back.floats(), elements);
      ASSERT_TRUE(Same(back, expected)) << Name(dtype) << " " << elements;
    }
  }
}

// --- Dispatch ---

TEST_P(KernelTest, UsesTheTargetThatTheTestAskedFor) { EXPECT_EQ(KernelTarget(), GetParam()); }

TEST(KernelTarget, IsTheBestUnlessATestAsksForAnother) {
  const std::vector<std::string> targets = SupportedKernelTargets();
  ASSERT_FALSE(targets.empty());
  EXPECT_EQ(KernelTarget(), targets.front());
  ASSERT_TRUE(SetKernelTargetForTest(targets.back()));
  EXPECT_FALSE(SetKernelTargetForTest("Z80"));
  EXPECT_EQ(KernelTarget(), targets.back());
  EXPECT_EQ(SupportedKernelTargets(), targets);
  ASSERT_TRUE(SetKernelTargetForTest(""));
  EXPECT_EQ(KernelTarget(), targets.front());
}

TEST(RedoWord, IsNotWholeWhereABitIsFlipped) {
  EXPECT_TRUE(RedoWord::IsWhole(0));
  for (const RedoWord& word :
       {RedoWord{}, RedoWord{.chunk = 1},
        RedoWord{.chunk = 12345, .done = 77777, .count = 32, .turn = 3},
        RedoWord{.chunk = (1 << 26) - 2, .done = (1 << 20) - 1, .count = 255, .turn = 3}}) {
    const uint64_t packed = word.Pack();
    EXPECT_TRUE(RedoWord::IsWhole(packed));
    EXPECT_EQ(RedoWord::Unpack(packed).Pack(), packed);
    for (int bit = 0; bit < 64; ++bit) {
      EXPECT_FALSE(RedoWord::IsWhole(packed ^ uint64_t{1} << bit)) << bit;
    }
  }
}

}  // namespace
}  // namespace ballast
