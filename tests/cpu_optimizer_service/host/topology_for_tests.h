// Machines that are not there.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_HOST_TOPOLOGY_FOR_TESTS_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_HOST_TOPOLOGY_FOR_TESTS_H_

#include "cpu_optimizer_service/host/topology.h"

namespace ballast {

// `nodes` nodes, each with all the processors that this machine has, so that threads can be bound.
inline Topology SeveralNodesInOne(int nodes) {
  NumaNode all;
  for (const NumaNode& node : MachineTopology().nodes) {
    all.processors.insert(all.processors.end(), node.processors.begin(), node.processors.end());
  }
  Topology topology;
  topology.nodes.assign(nodes, all);
  return topology;
}

// Nodes of so many processors each, whose numbers mean nothing.
inline Topology NodesOf(const std::vector<int>& processors) {
  Topology topology;
  for (const int count : processors) {
    topology.nodes.push_back({.processors = std::vector<int>(count, 0)});
  }
  return topology;
}

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_HOST_TOPOLOGY_FOR_TESTS_H_
