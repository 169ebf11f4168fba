// How many threads of this process can run at once.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_LIMITS_PROCESSORS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_LIMITS_PROCESSORS_H_

#include <string>

#include "cpu_optimizer_service/common/limits/control_groups.h"

namespace ballast {

struct UsableProcessors {
  int count = 1;
  // The bound's source: "as many as this host has", "affinity mask (taskset, cpuset)", "CPU quota
  // of 1.5 in /sys/fs/cgroup/a".
  std::string bound;
};

// The calling thread's affinity mask. Threads that it starts inherit it.
UsableProcessors ProcessorsInAffinityMask();

// `most`, or the smallest CPU quota of the process's control groups, if that is less. A part of a
// processor counts as one.
UsableProcessors FindUsableProcessors(const ControlGroupFiles& files = {},
                                      UsableProcessors most = ProcessorsInAffinityMask());

inline int UsableProcessorCount() { return FindUsableProcessors().count; }

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_LIMITS_PROCESSORS_H_
