#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/packed/codes.h"
#include "cpu_optimizer_service/common/packed/packed_state.h"
#include "cpu_optimizer_service/kernels/kernels.h"
#include "cpu_optimizer_service/kernels/packed_turn.h"
#include "gtest/gtest.h"
#include "hwy/aligned_allocator.h"

namespace ballast {
namespace {

// A slot in memory of its own. Each plane lies at the end of a page range, so that what is stored behind
// it ends the process.
class PackedSlot {
 public:
  PackedSlot(const HyperParameters& values, StateFormat format, int64_t elements)
      : planes_(PlanesOf(values)), elements_(elements) {
    slot_.format = format;
    for (const Plane plane : StoredPlanesOf(planes_, format)) {
      // Slots are of whole groups.
      const int64_t bytes = StoredBytes(format, plane, RoundUp(elements, kPackedGroup));
      const int64_t mapped = RoundUp(bytes, kPageBytes);
      void* const memory = mmap(nullptr, mapped + kPageBytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) abort();
      auto* const first = static_cast<std::byte*>(memory) + mapped - bytes;
      mprotect(first + bytes, kPageBytes, PROT_NONE);
      slot_.planes[static_cast<int>(plane)] = first;
      stored_.push_back({plane, bytes, memory, mapped});
    }
  }
  PackedSlot(const PackedSlot&) = delete;
  PackedSlot& operator=(const PackedSlot&) = delete;
  ~PackedSlot() {
    for (const Stored& each : stored_) munmap(each.memory, each.mapped + kPageBytes);
  }

  const Slot& slot() const { return slot_; }
  PlaneList planes() const { return planes_; }
  size_t stored() const { return stored_.size(); }
  Plane stored(size_t which) const { return stored_[which].plane; }

  void Fill(uint32_t seed);
  std::vector<float> Values(Plane plane) const {
    std::vector<float> values(elements_);
    ReadPlane(slot_, plane, 0, absl::MakeSpan(values));
    return values;
  }
  // Bit for bit, padding included.
  testing::AssertionResult Equals(const PackedSlot& other) const {
    for (const Stored& each : stored_) {
      const auto* const a = slot_.As<std::byte>(each.plane);
      const auto* const b = other.slot_.As<std::byte>(each.plane);
      for (int64_t i = 0; i < each.bytes; ++i) {
        if (a[i] == b[i]) continue;
        return testing::AssertionFailure() << Name(each.plane) << " differs at byte " << i;
      }
    }
    return testing::AssertionSuccess();
  }
  void Protect(size_t which, int protection) {
    mprotect(stored_[which].memory, stored_[which].mapped, protection);
  }

  static constexpr int64_t kPageBytes = 4096;

 private:
  struct Stored {
    Plane plane;
    int64_t bytes;
    void* memory;
    int64_t mapped;
  };
  const PlaneList planes_;
  const int64_t elements_;
  Slot slot_;
  std::vector<Stored> stored_;
};

// Ordinary values of many magnitudes, zeros, and what is special to fp32.
float NextValue(std::mt19937& random) {
  static constexpr float kSpecial[] = {0.0f,     0x1p-149f, 0x1p-126f, 0x1.000002p-126f,
                                       0x1p-63f, 1.0f,      0x1p-25f,  0x1p60f};
  if (random() % 8 == 0) {
    const float special = kSpecial[random() % std::size(kSpecial)];
    return random() % 2 == 0 ? special : -special;
  }
  const float mantissa = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f;
  return std::ldexp(mantissa, static_cast<int>(random() % 40) - 30);
}

void PackedSlot::Fill(uint32_t seed) {
  std::mt19937 random(seed);
  for (const Plane plane : planes_) {
    std::vector<float> values(elements_);
    for (int64_t i = 0; i < elements_; ++i) {
      // Groups of zeros, too.
      values[i] = i / kPackedGroup % 5 == 4 ? 0 : NextValue(random);
      if (IsOfSquares(plane)) values[i] = Z(values[i] * values[i]);
    }
    WritePlane(slot_, plane, 0, values);
  }
}

struct Case {
  HyperParameters values;
  StateFormat format = StateFormat::k8Bit;
  DType gradient_dtype = DType::kBFloat16;
  std::optional<DType> shard_dtype;
  int64_t elements = 0;
  int64_t begin = 0;
  bool in_place = true;
};

std::string Describe(const Case& c) {
  return absl::StrCat(Name(c.format), " ", ToString(c.values), " gradient ", Name(c.gradient_dtype),
                      " shard ", c.shard_dtype ? Name(*c.shard_dtype) : "none", " elements ",
                      c.elements, " from ", c.begin, " in place ", c.in_place);
}

std::vector<std::pair<HyperParameters, StateFormat>> EveryPackedOption() {
  std::vector<std::pair<HyperParameters, StateFormat>> all;
  for (const StateFormat format : {StateFormat::kBFloat16, StateFormat::k8Bit}) {
    const auto add = [&](HyperParameters values) {
      if (CheckStateFormat(values, format).ok()) all.emplace_back(values, format);
    };
    for (const RuleRow& row : Rules()) {
      for (const int flags : {0, 1, 2, 3, 4, 5, 6, 7}) {
        HyperParameters values = row.defaults;
        values.lr = flags == 7 ? 3 : 0.01;  // Above 1 no product may be left out.
        values.beta2 = 0.95;
        values.weight_decay = flags % 2 == 0 ? 0 : 0.1;
        values.decoupled_weight_decay = flags < 4;
        values.amsgrad = (flags & 2) != 0;
        values.momentum = flags < 2 ? 0 : 0.9;
        values.nesterov = flags > 3 && values.momentum > 0;
        values.maximize = flags == 5;
        add(values);
      }
    }
    HyperParameters slow;
    slow.beta2 = 0.999;
    add(slow);
  }
  return all;
}

// One update of a slot, by the reference or by the kernel.
struct Update {
  Update(const Case& c, uint32_t seed)
      : gradient(c.elements * SizeBytes(c.gradient_dtype)),
        shard_bytes(c.elements * SizeBytes(c.shard_dtype.value_or(DType::kFloat32)) + kBehind),
        shard_memory(hwy::AllocateAligned<std::byte>(shard_bytes + kBehind)),
        // Half of them can be streamed to.
        shard(shard_memory.get() + seed % 2 * SizeBytes(c.shard_dtype.value_or(DType::kFloat32))),
        from(c.values, c.format, c.begin + c.elements),
        to(c.values, c.format, c.begin + c.elements) {
    std::memset(shard_memory.get(), 0, shard_bytes + kBehind);
    std::mt19937 random(seed);
    for (int64_t i = 0; i < c.elements; ++i) {
      // Finite in fp16, too.
      StoreElement(gradient.data(), c.gradient_dtype, i,
                   std::clamp(NextValue(random), -1e4f, 1e4f));
    }
    from.Fill(seed + 1);
    run = {.rule = {.elements = c.elements,
                    .gradient = gradient.data(),
                    .gradient_dtype = c.gradient_dtype,
                    .shard = c.shard_dtype ? shard : nullptr,
                    .shard_dtype = c.shard_dtype.value_or(DType::kFloat32),
                    .values = &c.values,
                    .update_count = 1 + seed % 50,
                    .multiplier = 0.75f},
           .from = from.slot(),
           .to = c.in_place ? from.slot() : to.slot(),
           .from_begin = c.begin,
           .to_begin = c.begin};
  }

  // With what is behind the shard.
  absl::Span<const std::byte> ShardAndMore() const { return {shard, shard_bytes}; }

  static constexpr size_t kBehind = 64;
  std::vector<std::byte> gradient;
  size_t shard_bytes;
  hwy::AlignedFreeUniquePtr<std::byte[]> shard_memory;
  std::byte* shard;
  PackedSlot from;
  PackedSlot to;
  PackedRun run;
};

class PackedKernelTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(SetKernelTargetForTest(GetParam())); }
  void TearDown() override { ASSERT_TRUE(SetKernelTargetForTest("")); }
};

INSTANTIATE_TEST_SUITE_P(Targets, PackedKernelTest, testing::ValuesIn(SupportedKernelTargets()),
                         [](const auto& param_info) { return param_info.param; });

TEST_P(PackedKernelTest, EqualsTheReferenceForEveryRuleFormatAndSize) {
  uint32_t seed = 0;
  std::mt19937 random(17);
  for (const auto& [values, format] : EveryPackedOption()) {
    for (const int64_t elements : {1, 31, 32, 33, 63, 64, 65, 127, 128, 640, 1000}) {
      for (const DType gradient : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
        for (const std::optional<DType> shard :
             {std::optional<DType>(), std::optional(DType::kBFloat16),
              std::optional(DType::kFloat16), std::optional(DType::kFloat32)}) {
          if (++seed % 3 != 0 && elements > 65) continue;
          const Case c = {.values = values,
                          .format = format,
                          .gradient_dtype = gradient,
                          .shard_dtype = shard,
                          .elements = elements,
                          .begin = random() % 3 == 0 ? 128 : 0,
                          .in_place = random() % 2 == 0};
          Update expected(c, seed);
          Update actual(c, seed);
          UpdatePackedReference(expected.run);
          UpdatePacked(actual.run);
          ASSERT_TRUE(actual.from.Equals(expected.from)) << Describe(c);
          ASSERT_TRUE(actual.to.Equals(expected.to)) << Describe(c);
          ASSERT_EQ(actual.ShardAndMore(), expected.ShardAndMore()) << Describe(c);
        }
      }
    }
  }
}

TEST_P(PackedKernelTest, TheWeightsMayReplaceTheGradient) {
  const Case c = {.shard_dtype = DType::kBFloat16, .elements = 1000};
  Update apart(c, 4);
  Update replacing(c, 4);
  replacing.run.rule.shard = replacing.gradient.data();
  UpdatePacked(apart.run);
  UpdatePacked(replacing.run);
  EXPECT_TRUE(replacing.from.Equals(apart.from));
  EXPECT_EQ(std::memcmp(replacing.gradient.data(), apart.shard, 2000), 0);
  EXPECT_EQ(std::memcmp(apart.shard, apart.from.slot().As<void>(Plane::kMaster), 2000), 0)
      << "what goes out is what is stored";
}

TEST_P(PackedKernelTest, TheModeOfFloatingPointDoesNotShow) {
  const Case c = {.elements = 640};
  Update one(c, 9);
  Update other(c, 9);
  UpdatePackedReference(one.run);  // Denormals are kept.
  UpdatePacked(other.run);         // They are flushed.
  EXPECT_TRUE(other.from.Equals(one.from));
}

// An update of rule and format in place, with its lane.
struct Cut {
  Cut(const Case& c, uint32_t seed) : update(c, seed) {}
  void Run(int64_t begin, int64_t end, RedoLane& lane) {
    PackedRun part = update.run;
    part.rule.elements = end - begin;
    part.rule.gradient = update.gradient.data() + begin * SizeBytes(part.rule.gradient_dtype);
    part.from_begin = part.to_begin = begin;
    RedoWriter redo(lane, 7, begin);
    UpdatePacked(part, &redo);
  }
  // As a process does that takes over.
  void Finish(RedoLane& lane) {
    const RedoWord word = RedoWord::Unpack(lane.word);
    StoreTurn(lane.turns[word.turn], update.from.planes(), update.from.slot(),
              word.done - word.count, word.count);
    Run(word.done, update.run.rule.elements, lane);
  }
  Update update;
};

TEST_P(PackedKernelTest, AnUpdateThatIsCutOffBehindAnyTurnIsFinishedFromItsRecord) {
  for (const auto& [values, format] : EveryPackedOption()) {
    const Case c = {.values = values, .format = format, .elements = 1000};
    Update whole(c, 3);
    UpdatePacked(whole.run);
    for (const int64_t done : {64, 128, 640, 960, 1000}) {
      Cut cut(c, 3);
      RedoLane lane;
      cut.Run(0, done, lane);
      const RedoWord word = RedoWord::Unpack(lane.word);
      ASSERT_EQ(word.done, done);
      // Its last turn may not have come to the planes.
      for (const Plane plane : cut.update.from.planes()) {
        const std::vector<float> wrong(word.count, 3.0f);
        WritePlane(cut.update.from.slot(), plane, done - word.count, wrong);
      }
      cut.Finish(lane);
      EXPECT_TRUE(cut.update.from.Equals(whole.from)) << done << " done, " << Describe(c);
    }
  }
}

sigjmp_buf packed_store_failed;

TEST_P(PackedKernelTest, AnUpdateThatEndsAtAStoreToAnyPlaneIsFinishedFromItsRecord) {
  struct sigaction fails = {};
  fails.sa_handler = [](int) { siglongjmp(packed_store_failed, 1); };
  struct sigaction before = {};
  std::fenv_t mode;
  ASSERT_EQ(std::fegetenv(&mode), 0);
  for (const auto& [values, format] : EveryPackedOption()) {
    const Case c = {.values = values, .format = format, .elements = 1000};
    Update whole(c, 3);
    UpdatePacked(whole.run);
    for (size_t which = 0; which < whole.from.stored(); ++which) {
      Cut cut(c, 3);
      RedoLane lane;
      cut.update.from.Protect(which, PROT_READ);
      sigaction(SIGSEGV, &fails, &before);
      if (sigsetjmp(packed_store_failed, 1) == 0) {
        cut.Run(0, c.elements, lane);
        sigaction(SIGSEGV, &before, nullptr);
        FAIL() << "the store did not fail";
      }
      sigaction(SIGSEGV, &before, nullptr);
      std::fesetenv(&mode);
      cut.update.from.Protect(which, PROT_READ | PROT_WRITE);
      EXPECT_GT(RedoWord::Unpack(lane.word).done, 0);
      cut.Finish(lane);
      EXPECT_TRUE(cut.update.from.Equals(whole.from))
          << Name(whole.from.stored(which)) << ", " << Describe(c);
    }
  }
}

// ---- The formats

TEST(PackedState, HoldsTheMasterWeightsExactly) {
  for (uint32_t high = 0; high < 0x7f80; high += 5) {
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      for (const uint32_t sign : {0u, 0x80000000u}) {
        const uint32_t bits = sign | high << 16 | low;
        const auto master = std::bit_cast<float>(bits);
        const uint16_t weight = PackWeight(master);
        ASSERT_EQ(std::bit_cast<uint32_t>(UnpackMaster(weight, PackRemainder(master))), bits);
        // Rounded to nearest; a tie goes away from zero.
        ASSERT_EQ(weight, (bits + 0x8000u) >> 16);
        if (low != 0x8000) ASSERT_EQ(weight, FloatToBFloat16(master)) << bits;
      }
    }
  }
}

TEST(PackedState, ReadsAndWritesBackTheSame) {
  for (const auto& [values, format] : EveryPackedOption()) {
    PackedSlot first(values, format, 1000);
    PackedSlot second(values, format, 1000);
    first.Fill(11);
    for (const Plane plane : first.planes()) {
      const std::vector<float> read = first.Values(plane);
      WritePlane(second.slot(), plane, 0, read);
      EXPECT_EQ(second.Values(plane), read) << Name(format) << Name(plane);
    }
  }
}

TEST(PackedState, EightBitsAreAsNearAsTheFormulaSays) {
  constexpr int64_t kElements = 4096;
  PackedSlot slot({}, StateFormat::k8Bit, kElements);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> m(kElements), v(kElements);
  for (int64_t i = 0; i < kElements; ++i) {
    m[i] = normal(random) * 1e-4f;
    v[i] = std::pow(normal(random) * 1e-4f, 2.0f);
  }
  WritePlane(slot.slot(), Plane::kExpAvg, 0, m);
  WritePlane(slot.slot(), Plane::kExpAvgSq, 0, v);
  const std::vector<float> read_m = slot.Values(Plane::kExpAvg);
  const std::vector<float> read_v = slot.Values(Plane::kExpAvgSq);
  for (int64_t group = 0; group < kElements; group += kPackedGroup) {
    float largest = 0, largest_sq = 0;
    for (int64_t i = group; i < group + kPackedGroup; ++i) {
      largest = std::max(largest, std::fabs(m[i]));
      largest_sq = std::max(largest_sq, v[i]);
    }
    for (int64_t i = group; i < group + kPackedGroup; ++i) {
      // Half a step of y, which has 3 bits of mantissa.
      const auto most = [](const CodeTable& table, float x, float scale) {
        return 1.01f * scale * table.inverse_d * (std::fabs(x) / scale * table.d + table.c) / 16;
      };
      ASSERT_NEAR(read_m[i], m[i], most(kExpAvgCodes, m[i], largest));
      // A code of 0 is for 0 alone.
      ASSERT_NEAR(read_v[i], v[i], 2 * most(kExpAvgSqCodes, v[i], largest_sq));
      if (v[i] > 0) ASSERT_GT(read_v[i], 0);
      if (std::fabs(m[i]) == largest) EXPECT_EQ(read_m[i], m[i]);
    }
  }
}

TEST(PackedState, CopiesRunsAndPaddingWithoutTheScaleOfTheNeighbour) {
  const HyperParameters values;
  PackedSlot from(values, StateFormat::k8Bit, 256);
  PackedSlot to(values, StateFormat::k8Bit, 256);
  PackedSlot expected(values, StateFormat::k8Bit, 256);
  from.Fill(1);
  to.Fill(2);
  expected.Fill(2);
  // A parameter of 100 elements is newer in `to`; what is behind it is copied.
  CopyStored(from.slot(), to.slot(), 100, 156);
  for (const Plane plane : from.planes()) {
    const std::vector<float> kept = expected.Values(plane);
    const std::vector<float> got = to.Values(plane);
    EXPECT_TRUE(std::equal(got.begin(), got.begin() + 100, kept.begin())) << Name(plane);
    const std::vector<float> copied = from.Values(plane);
    EXPECT_TRUE(std::equal(got.begin() + 128, got.end(), copied.begin() + 128)) << Name(plane);
  }
  CopyStored(from.slot(), to.slot(), 0, 256);
  EXPECT_TRUE(to.Equals(from));
}

TEST(PackedState, IsRefusedWhereItWouldNotHoldTheState) {
  const auto refused = [](const HyperParameters& values, StateFormat format) {
    return absl::IsInvalidArgument(CheckStateFormat(values, format));
  };
  HyperParameters adam;
  adam.beta2 = 0.999;
  EXPECT_TRUE(refused(adam, StateFormat::kBFloat16));
  EXPECT_FALSE(refused(adam, StateFormat::k8Bit));
  adam.beta2 = kMostBeta2OfBFloat16;
  EXPECT_FALSE(refused(adam, StateFormat::kBFloat16));
  adam.amsgrad = true;
  EXPECT_TRUE(refused(adam, StateFormat::k8Bit));
  EXPECT_FALSE(refused(adam, StateFormat::kBFloat16));
  adam.beta1 = 0.999;
  EXPECT_TRUE(refused(adam, StateFormat::kBFloat16));
  HyperParameters sgd = DefaultsOf(Rule::kSgd);
  sgd.momentum = 0.999;
  EXPECT_TRUE(refused(sgd, StateFormat::kBFloat16));
  for (const Rule rule : {Rule::kSgd, Rule::kLion, Rule::kAdagrad, Rule::kSignSgd}) {
    EXPECT_FALSE(refused(DefaultsOf(rule), StateFormat::kBFloat16)) << RowOf(rule).name;
    EXPECT_TRUE(refused(DefaultsOf(rule), StateFormat::k8Bit)) << RowOf(rule).name;
  }
  EXPECT_TRUE(refused(DefaultsOf(Rule::kMuon), StateFormat::kBFloat16));
}

TEST(PackedState, BoundsHoldWhatIsStored) {
  StateBounds bounds;
  bounds.planes = {1, 2, 3, 0};
  const StateBounds stored = BoundsStored(bounds, StateFormat::kBFloat16);
  EXPECT_EQ(stored.planes[0], 1);
  EXPECT_GT(stored.planes[1], BFloat16ToFloat(FloatToBFloat16(2 * (1 + 0x1p-9f))));
  bounds.planes[2] = 1.01 * kMostPackedMoment;
  EXPECT_FALSE(BoundsStored(bounds, StateFormat::k8Bit).finite());
  EXPECT_TRUE(BoundsStored(bounds, StateFormat::kFloat32).finite());
}

TEST(PackedState, AdagradsSumInBf16GrowsAsInFp32) {
  // Each gradient's square is at last far less than half a step of its sum. Some come every 7 updates.
  const HyperParameters values = DefaultsOf(Rule::kAdagrad);
  PackedSlot packed(values, StateFormat::kBFloat16, kPackedGroup);
  std::vector<double> exact(kPackedGroup);
  std::vector<float> gradient(kPackedGroup);
  constexpr int64_t kUpdates = 20'000;
  for (int64_t update = 1; update <= kUpdates; ++update) {
    for (int64_t i = 0; i < kPackedGroup; ++i) {
      gradient[i] = i % 2 == 0 || update % 7 == 0 ? 1e-3f * static_cast<float>(1 + i) : 0.0f;
      exact[i] += static_cast<double>(gradient[i]) * gradient[i];
    }
    UpdatePacked({.rule = {.elements = kPackedGroup,
                           .gradient = gradient.data(),
                           .gradient_dtype = DType::kFloat32,
                           .values = &values,
                           .update_count = update},
                  .from = packed.slot(),
                  .to = packed.slot()});
  }
  const std::vector<float> sums = packed.Values(Plane::kSum);
  for (int64_t i = 0; i < kPackedGroup; ++i)
    EXPECT_NEAR(sums[i] / exact[i], 1, i % 2 == 0 ? 0.02 : 0.03) << i;
}

TEST(PackedState, ASumThatIsNotANumberStaysSo) {
  for (const uint32_t bits : {0x7fffffffu, 0xffffffffu, 0x7fc00000u}) {
    const uint16_t packed = PackSum(std::bit_cast<float>(bits), 0xffff);
    EXPECT_TRUE(std::isnan(BFloat16ToFloat(packed))) << bits;
  }
}

// What a format is chosen for (tests/bench has curves of trainings).
class Follows : public testing::TestWithParam<double> {};
INSTANTIATE_TEST_SUITE_P(Beta2, Follows, testing::Values(0.95, 0.999));

// Against fp32: gradients that fall, that are 10^4 times smaller than others of the group, that vanish.
TEST_P(Follows, WhatFp32Does) {
  HyperParameters values;
  values.beta2 = GetParam();
  values.weight_decay = 0;
  PackedSlot packed(values, StateFormat::k8Bit, kPackedGroup);
  std::vector<std::vector<float>> exact(3, std::vector<float>(kPackedGroup));
  std::vector<float> gradient(kPackedGroup);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const auto scale_of = [](int64_t element, int64_t update) {
    if (element < 20) return 1e-3f;
    if (element < 40) return update <= 1000 ? 1e-3f : 1e-4f;
    if (element < 60) return element < 50 ? 1e-6f : 1e-7f;
    return update <= 1000 ? 1e-3f : 0.0f;
  };
  constexpr int64_t kUpdates = 10'000, kFrom = 7'000;
  // By element: sums of the ratio of the roots of exp_avg_sq, and of squared changes of the weight.
  std::vector<double> ratios(kPackedGroup), changes(kPackedGroup), exact_changes(kPackedGroup);
  for (int64_t update = 1; update <= kUpdates; ++update) {
    for (int64_t i = 0; i < kPackedGroup; ++i) gradient[i] = scale_of(i, update) * normal(random);
    const std::vector<float> before = packed.Values(Plane::kMaster);
    const std::vector<float> exact_before = exact[0];
    RuleRun rule = {.elements = kPackedGroup,
                    .gradient = gradient.data(),
                    .gradient_dtype = DType::kFloat32,
                    .values = &values,
                    .update_count = update};
    UpdatePacked({.rule = rule, .from = packed.slot(), .to = packed.slot()});
    for (size_t place = 0; place < 3; ++place) {
      rule.from[place] = rule.to[place] = exact[place].data();
    }
    UpdateByRule(rule);
    if (update <= kFrom) continue;
    const std::vector<float> v = packed.Values(Plane::kExpAvgSq);
    const std::vector<float> weights = packed.Values(Plane::kMaster);
    for (int64_t i = 0; i < kPackedGroup; ++i) {
      ratios[i] += std::sqrt(v[i] / exact[2][i]) / (kUpdates - kFrom);
      changes[i] += std::pow(weights[i] - before[i], 2);
      exact_changes[i] += std::pow(exact[0][i] - exact_before[i], 2);
    }
  }
  // With a beta2 of 0.999 exp_avg_sq of an element is as noisy as fp32's with one of 0.96.
  for (int64_t i = 0; i < 60; ++i) EXPECT_NEAR(std::log(ratios[i]), 0, 0.4) << i;
  for (const auto& [begin, end] : {std::pair(0, 20), {20, 40}, {40, 50}, {50, 60}}) {
    double ratio = 0, change = 0, exact_change = 0;
    for (int i = begin; i < end; ++i) {
      ratio += ratios[i] / (end - begin);
      change += changes[i];
      exact_change += exact_changes[i];
    }
    EXPECT_NEAR(ratio, 1, 0.1) << begin;
    EXPECT_NEAR(std::sqrt(change / exact_change), 1, 0.1) << begin;
  }
  for (int64_t i = 60; i < 64; ++i) EXPECT_EQ(changes[i], 0) << i << " drifts on";
}

}  // namespace
}  // namespace ballast
