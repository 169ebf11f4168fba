#include "cpu_optimizer_service/self_benchmark.h"

#include <gmock/gmock.h>

#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/kernels/kernels.h"
#include "cpu_optimizer_service/kernels/roofline.h"
#include "tests/cpu_optimizer_service/host/topology_for_tests.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(SelfBenchmark, MeasuresBothLoopsWithAllThreadsAndOne) {
  const Topology topology = SeveralNodesInOne(2);
  const SelfBenchmark result =
      RunSelfBenchmark({.threads = 2,
                        .memory_bytes = 21 << 20,
                        .seconds = 0.01,
                        .rules = {HyperParameters(), DefaultsOf(Rule::kLion)},
                        .topology = &topology})
          .value();
  EXPECT_EQ(result.elements, 5 << 18);  // Whole chunks, of 16 bytes an element.
  EXPECT_GE(result.rounds, 1);
  EXPECT_EQ(result.facts.threads, 2);
  EXPECT_EQ(result.facts.nodes, 2);
  ASSERT_EQ(result.all_threads.size(), 2u);
  EXPECT_EQ(result.all_threads[0].threads, 2);
  EXPECT_EQ(result.all_threads[1].planes, 2);
  EXPECT_EQ(result.one_thread[0].threads, 1);
  for (const std::vector<KernelSpeed>& speeds : {result.all_threads, result.one_thread}) {
    for (const KernelSpeed& speed : speeds) {
      EXPECT_GT(speed.roofline_elements_per_second, 0);
      EXPECT_GT(speed.kernel_elements_per_second, 0);
      EXPECT_GT(speed.fraction, 0);
    }
  }
  EXPECT_THAT(ToLine(result), HasSubstr("with 2 threads"));
  EXPECT_THAT(ToTable(result), HasSubstr("\nAdamW        2 threads "));
  EXPECT_THAT(ToTable(result), HasSubstr("\nLion         1 thread "));
}

TEST(SelfBenchmark, TakesNoMoreMemoryThanItMay) {
  EXPECT_EQ(BriefSelfBenchmark(0, int64_t{1} << 40).memory_bytes, 256 << 20);
  EXPECT_EQ(BriefSelfBenchmark(0, 80 << 20).memory_bytes, 10 << 20);
  EXPECT_EQ(RunSelfBenchmark({.memory_bytes = 1 << 20}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(SelfBenchmark, WarnsOfEachThingThatMakesTheHostSlow) {
  const HostFacts good{.threads = 8,
                       .processors = 8,
                       .nodes = 2,
                       .bound = true,
                       .huge_page_share = 1.0,
                       .kernel_fraction = 0.97};
  EXPECT_THAT(HostWarnings(good), IsEmpty());
  HostFacts facts = good;
  facts.threads = 9;
  EXPECT_THAT(HostWarnings(facts), ElementsAre(HasSubstr("9 for updates take turns on the 8")));
  facts.threads = 4;
  EXPECT_THAT(HostWarnings(facts), ElementsAre(HasSubstr("4 for updates, where")));
  facts = good;
  facts.bound = false;
  EXPECT_THAT(HostWarnings(facts), ElementsAre(HasSubstr("could not be bound to the 2 nodes")));
  facts.nodes = 1;
  EXPECT_THAT(HostWarnings(facts), IsEmpty());
  facts.huge_page_share = 0;
  EXPECT_THAT(HostWarnings(facts), ElementsAre(HasSubstr("huge pages")));
  facts.huge_page_share.reset();
  facts.kernel_fraction = 0.5;
  EXPECT_THAT(HostWarnings(facts), ElementsAre(HasSubstr("updates reach 0.50")));
}

// A roofline that left memory out would be no limit.
TEST(Roofline, ReadsAndWritesEveryElementAndChangesNoState) {
  for (const std::string& target : SupportedKernelTargets()) {
    ASSERT_TRUE(SetKernelTargetForTest(target));
    for (int number = 0; number < 4 * kMaxPlanes; ++number) {
      const int ahead = kPrefetchAheadElements[number % 4];
      const int count = number / 4 + 1;
      constexpr int64_t kElements = 1024;
      alignas(64) uint16_t shard[kElements] = {};
      std::vector<uint16_t> gradient(kElements, FloatToBFloat16(3.0f));
      std::vector<float> planes[kMaxPlanes];
      for (int64_t i = 0; i < kElements; ++i) {
        for (int plane = 0; plane < count; ++plane) planes[plane].push_back(i * 3.0f + plane - 500);
      }
      const auto before = std::to_array(planes);
      UpdateTraffic traffic{
          .elements = kElements, .gradient = gradient.data(), .planes = {}, .shard = shard};
      for (int plane = 0; plane < count; ++plane) traffic.planes[plane] = planes[plane].data();
      MoveTraffic(traffic, ahead);
      EXPECT_EQ(std::to_array(planes), before) << target;
      for (int64_t i = 0; i < kElements; ++i) {
        uint32_t bits;
        std::memcpy(&bits, &planes[0][i], sizeof(bits));
        ASSERT_EQ(shard[i], bits >> 16) << target << " " << i;
      }
      // A NaN in the gradient shows that it was read, and each plane written.
      gradient.assign(kElements, FloatToBFloat16(NAN));
      MoveTraffic(traffic, ahead);
      for (int plane = 0; plane < count; ++plane) {
        for (const float value : planes[plane]) ASSERT_NE(value, value) << target;
      }
    }
  }
  SetKernelTargetForTest("");
}

}  // namespace
}  // namespace ballast
