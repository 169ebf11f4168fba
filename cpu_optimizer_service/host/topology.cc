#include "cpu_optimizer_service/host/topology.h"

#include <hwloc.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "cpu_optimizer_service/common/limits/processors.h"

namespace ballast {
namespace {

struct FreeBitmap {
  void operator()(hwloc_bitmap_t bitmap) const { hwloc_bitmap_free(bitmap); }
};
using Bitmap = std::unique_ptr<hwloc_bitmap_s, FreeBitmap>;

// Null if hwloc cannot say. Read only after it was loaded, and kept for the life of the process.
hwloc_topology_t Load() {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return nullptr;
  // Processors and memory nodes only, without those that taskset or a control group takes away.
  hwloc_topology_set_all_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_NONE);
  hwloc_topology_set_flags(topology, HWLOC_TOPOLOGY_FLAG_RESTRICT_TO_CPUBINDING);
  if (hwloc_topology_load(topology) == 0) return topology;
  hwloc_topology_destroy(topology);
  return nullptr;
}

hwloc_topology_t Loaded() {
  static const hwloc_topology_t topology = Load();
  return topology;
}

Topology Find() {
  Topology found;
  const hwloc_topology_t topology = Loaded();
  const int nodes =
      topology == nullptr ? 0 : hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE);
  const Bitmap seen(hwloc_bitmap_alloc());
  for (int i = 0; i < nodes; ++i) {
    const hwloc_obj_t object = hwloc_get_obj_by_type(topology, HWLOC_OBJ_NUMANODE, i);
    // Memory of another kind may be a node of its own, with the processors of a node before it.
    if (hwloc_bitmap_intersects(object->cpuset, seen.get())) continue;
    hwloc_bitmap_or(seen.get(), seen.get(), object->cpuset);
    NumaNode node;
    int processor = hwloc_bitmap_first(object->cpuset);
    while (processor != -1) {
      node.processors.push_back(processor);
      processor = hwloc_bitmap_next(object->cpuset, processor);
    }
    if (!node.processors.empty()) found.nodes.push_back(std::move(node));
  }
  if (!found.nodes.empty()) return found;

  NumaNode all;
  // The numbers are made up: with one node no thread is bound, and only their count matters.
  all.processors.resize(static_cast<size_t>(UsableProcessorCount()));
  std::iota(all.processors.begin(), all.processors.end(), 0);
  found.nodes.push_back(std::move(all));
  return found;
}

}  // namespace

int Topology::processors() const {
  int count = 0;
  for (const NumaNode& node : nodes) count += static_cast<int>(node.processors.size());
  return count;
}

const Topology& MachineTopology() {
  static const Topology& topology = *new Topology(Find());
  return topology;
}

std::vector<int> ThreadsPerNode(const Topology& topology, int threads) {
  std::vector<int> counts(std::min<size_t>(topology.nodes.size(), threads), 1);
  // D'Hondt's rule for seats in proportion to votes, after one seat for each.
  for (int given = static_cast<int>(counts.size()); given < threads; ++given) {
    // The next goes where the fewest stand on a processor, to the first of equals.
    const auto crowded = [&](size_t node) {
      return (counts[node] + 1.0) / static_cast<double>(topology.nodes[node].processors.size());
    };
    size_t best = 0;
    for (size_t node = 1; node < counts.size(); ++node) {
      if (crowded(node) < crowded(best)) best = node;
    }
    ++counts[best];
  }
  return counts;
}

bool BindThisThread(absl::Span<const int> processors) {
  const hwloc_topology_t topology = Loaded();
  if (topology == nullptr) return false;
  const Bitmap set(hwloc_bitmap_alloc());
  for (const int processor : processors) hwloc_bitmap_set(set.get(), processor);
  return hwloc_set_cpubind(topology, set.get(), HWLOC_CPUBIND_THREAD) == 0;
}

}  // namespace ballast
