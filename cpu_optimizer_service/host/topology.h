// The processors that this process may use, by NUMA node, as hwloc finds them.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_HOST_TOPOLOGY_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_HOST_TOPOLOGY_H_

#include <vector>

#include "absl/types/span.h"

namespace ballast {

struct NumaNode {
  std::vector<int> processors;  // Logical ones, by the system's numbers; never empty.
};

struct Topology {
  std::vector<NumaNode> nodes;  // Those with a processor that we may use; never empty.

  int processors() const;
};

// Found once, at the first call, which should not come from a thread that was bound to some of the
// processors. Where hwloc finds nothing, one node of std::thread::hardware_concurrency.
const Topology& MachineTopology();

// How many of `threads` go to each node: in proportion to its processors, and at least one to each
// of as many nodes as there are threads. Nodes at the end that get none are left out.
std::vector<int> ThreadsPerNode(const Topology& topology, int threads);

// Lets the calling thread run on these processors only. False if the system refuses.
bool BindThisThread(absl::Span<const int> processors);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_TOPOLOGY_H_
