#include "cpu_optimizer_service/host/topology.h"

#include <gmock/gmock.h>
#include <sched.h>

#include <algorithm>
#include <set>
#include <thread>

#include "tests/cpu_optimizer_service/host/topology_for_tests.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;

std::vector<int> ProcessorsOfThisThread() {
  cpu_set_t set;
  CPU_ZERO(&set);
  EXPECT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  std::vector<int> processors;
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (CPU_ISSET(processor, &set)) processors.push_back(processor);
  }
  return processors;
}

TEST(Topology, OfThisMachineHasEachUsableProcessorOnce) {
  std::vector<int> found;
  for (const NumaNode& node : MachineTopology().nodes) {
    EXPECT_FALSE(node.processors.empty());
    found.insert(found.end(), node.processors.begin(), node.processors.end());
  }
  std::sort(found.begin(), found.end());
  EXPECT_EQ(found, ProcessorsOfThisThread());
  EXPECT_EQ(MachineTopology().processors(), static_cast<int>(found.size()));
}

TEST(Topology, ThreadsGoToTheNodesInProportion) {
  EXPECT_THAT(ThreadsPerNode(NodesOf({8}), 3), ElementsAre(3));
  EXPECT_THAT(ThreadsPerNode(NodesOf({8, 8}), 16), ElementsAre(8, 8));
  EXPECT_THAT(ThreadsPerNode(NodesOf({8, 8}), 5), ElementsAre(3, 2));
  EXPECT_THAT(ThreadsPerNode(NodesOf({12, 4}), 8), ElementsAre(6, 2));
  EXPECT_THAT(ThreadsPerNode(NodesOf({12, 4}), 32), ElementsAre(24, 8));
  EXPECT_THAT(ThreadsPerNode(NodesOf({1, 7}), 8), ElementsAre(1, 7));
}

TEST(Topology, NodesWithoutAThreadAreLeftOut) {
  EXPECT_THAT(ThreadsPerNode(NodesOf({8, 8, 8}), 1), ElementsAre(1));
  EXPECT_THAT(ThreadsPerNode(NodesOf({2, 8, 8}), 2), ElementsAre(1, 1));
}

TEST(Topology, ABoundThreadMayRunWhereItWasBoundAlone) {
  const int last = MachineTopology().nodes.back().processors.back();
  std::vector<int> bound;
  std::thread([&] {
    EXPECT_TRUE(BindThisThread({last}));
    bound = ProcessorsOfThisThread();
  }).join();
  EXPECT_THAT(bound, ElementsAre(last));
  EXPECT_FALSE(BindThisThread({}));
}

}  // namespace
}  // namespace ballast
