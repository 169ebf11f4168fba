// This process's usable processors by NUMA node, from hwloc.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_HOST_TOPOLOGY_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_HOST_TOPOLOGY_H_

#include <vector>

#include "absl/types/span.h"

namespace ballast {

struct NumaNode {
  std::vector<int> processors;  // Logical ones, by the system's numbers; never empty.
};

struct Topology {
  std::vector<NumaNode> nodes;  // Nodes with a usable processor; never empty.

  int processors() const;
};

// Found once, at the first call, which should not come from a bound thread. If hwloc finds nothing:
// one node of std::thread::hardware_concurrency.
const Topology& MachineTopology();

// Divides `threads` among the nodes in proportion to their processors, with at least one for each
// of as many nodes as there are threads. Leaves out nodes at the end without threads.
std::vector<int> ThreadsPerNode(const Topology& topology, int threads);

// Restricts the calling thread to these processors. False if the system refuses.
bool BindThisThread(absl::Span<const int> processors);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_TOPOLOGY_H_
