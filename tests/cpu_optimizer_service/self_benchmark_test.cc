#include "cpu_optimizer_service/self_benchmark.h"

#include <gmock/gmock.h>

#include <list>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/kernels/kernels.h"
#include "cpu_optimizer_service/kernels/roofline.h"
#include "hwy/aligned_allocator.h"
#include "tests/cpu_optimizer_service/host/topology_for_tests.h"

namespace ballast {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(SelfBenchmark, MeasuresBothLoopsWithAllThreadsAndOne) {
  const Topology topology = SeveralNodesInOne(2);
  const SelfBenchmark result =
      RunSelfBenchmark({.threads = 2,
                        .memory_bytes = 21 << 20,
                        .seconds = 0.01,
                        .updates = {{}, {.values = DefaultsOf(Rule::kLion)}},
                        .topology = &topology})
          .value();
  EXPECT_EQ(result.elements, 5 << 18);  // Whole chunks, of 16 bytes an element.
  EXPECT_GE(result.rounds, 1);
  EXPECT_EQ(result.facts.threads, 2);
  EXPECT_EQ(result.facts.nodes, 2);
  ASSERT_EQ(result.all_threads.size(), 2u);
  EXPECT_EQ(result.all_threads[0].threads, 2);
  EXPECT_EQ(result.all_threads[1].bytes_per_element, 2 + 2 * 8 + 2);
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

TEST(SelfBenchmark, MeasuresEachFormatWithItsOwnTraffic) {
  const SelfBenchmark result =
      RunSelfBenchmark(
          {.threads = 1,
           .memory_bytes = 16 << 20,
           .seconds = 0.01,
           .updates = {{}, {.format = StateFormat::kBFloat16}, {.format = StateFormat::k8Bit}}})
          .value();
  EXPECT_EQ(result.elements, 2 << 18);  // Of 30.125 bytes: the states, a gradient and a shard.
  ASSERT_EQ(result.one_thread.size(), 3u);
  EXPECT_EQ(result.one_thread[1].optimizer, "AdamW bf16");
  EXPECT_EQ(result.one_thread[1].bytes_per_element, 2 + 2 * 8 + 2);
  EXPECT_EQ(result.one_thread[2].optimizer, "AdamW 8bit");
  EXPECT_EQ(result.one_thread[2].bytes_per_element, 2 + 2 * (6 + 2 * 4.0 / 64) + 2);
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

// What an update of `planes` in `format` moves: bytes of 0x30, and gradients of 0.
struct Memory {
  Memory(PlaneList planes, StateFormat format)
      : gradient(kElements), shard(hwy::AllocateAligned<uint16_t>(kElements)) {
    state.format = format;
    for (const Plane plane : StoredPlanesOf(planes, format)) {
      stored.emplace_back(StoredBytes(format, plane, kElements), 0x30);
      state.planes[static_cast<int>(plane)] = stored.back().data();
    }
  }
  UpdateTraffic traffic() { return {kElements, gradient.data(), state, shard.get()}; }

  static constexpr int64_t kElements = 256;
  std::vector<uint16_t> gradient;
  Slot state;
  std::list<std::vector<uint8_t>> stored;
  hwy::AlignedFreeUniquePtr<uint16_t[]> shard;
};

// A roofline that left memory out would be no limit.
TEST(Roofline, ReadsAndWritesEveryElementAndChangesNoState) {
  std::vector<std::pair<PlaneList, StateFormat>> updates;
  HyperParameters amsgrad;
  amsgrad.amsgrad = true;
  const PlaneList planes = PlanesOf(amsgrad);
  for (const size_t count : {1, 2, 3, 4}) {
    updates.emplace_back(planes.first(count), StateFormat::kFloat32);
    updates.emplace_back(planes.first(count), StateFormat::kBFloat16);
  }
  updates.emplace_back(planes.first(3), StateFormat::k8Bit);
  for (const std::string& target : SupportedKernelTargets()) {
    ASSERT_TRUE(SetKernelTargetForTest(target));
    for (const auto& [planes, format] : updates) {
      SCOPED_TRACE(absl::StrCat(target, " ", Name(format), " ", planes.size()));
      for (const int ahead : kPrefetchAheadElements) {
        Memory memory(planes, format);
        MoveTraffic(memory.traffic(), ahead);
        for (const std::vector<uint8_t>& each : memory.stored) EXPECT_THAT(each, Each(0x30));
        memory.gradient.assign(Memory::kElements, 0x0101);
        MoveTraffic(memory.traffic(), ahead, 0xffff);
        for (const std::vector<uint8_t>& each : memory.stored) EXPECT_THAT(each, Each(0x31));
        EXPECT_THAT(absl::MakeSpan(memory.shard.get(), Memory::kElements), Each(0x3131));
      }
      for (int64_t i = 0; i < Memory::kElements; ++i) {
        Memory memory(planes, format);
        memory.gradient[i] = 0x0101;
        MoveTraffic(memory.traffic(), 0, 0xffff);
        ASSERT_THAT(memory.stored.front(), Contains(0x31)) << i;
      }
    }
  }
  SetKernelTargetForTest("");
}

}  // namespace
}  // namespace ballast
