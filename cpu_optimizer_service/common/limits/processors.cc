#include "cpu_optimizer_service/common/limits/processors.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

// A bound on the mask: the kernel has at most 8192 processors (CONFIG_NR_CPUS).
constexpr int kMostProcessors = 1 << 16;

// 0: the system does not say.
int CountInAffinityMask() {
  // One cpu_set_t has 1024 places. The kernel refuses a mask that is smaller than its own.
  for (int places = CPU_SETSIZE; places <= kMostProcessors; places *= 2) {
    std::vector<cpu_set_t> mask(static_cast<size_t>(places / CPU_SETSIZE));
    const size_t bytes = mask.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, mask.data()) == 0) return CPU_COUNT_S(bytes, mask.data());
    if (errno != EINVAL) break;
  }
  return 0;
}

// In processors; 0: none. Version 2 says "50000 100000" or "max 100000", version 1 says the two in
// two files, and -1 for none.
double QuotaOf(const std::string& folder, ControlGroupVersion version) {
  std::string quota;
  std::string period;
  if (version == ControlGroupVersion::k2) {
    std::ifstream(folder + "/cpu.max") >> quota >> period;
  } else {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  double quota_us = 0;
  double period_us = 0;
  if (!absl::SimpleAtod(quota, &quota_us) || !absl::SimpleAtod(period, &period_us)) return 0;
  return quota_us > 0 && period_us > 0 ? quota_us / period_us : 0;
}

}  // namespace

UsableProcessors ProcessorsInAffinityMask() {
  const int of_host = std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  const int in_mask = CountInAffinityMask();
  if (in_mask > 0 && in_mask < of_host) {
    return {.count = in_mask, .bound = "affinity mask (taskset, cpuset)"};
  }
  return {.count = of_host, .bound = "as many as this host has"};
}

UsableProcessors FindUsableProcessors(const ControlGroupFiles& files, UsableProcessors most) {
  UsableProcessors found = std::move(most);
  VisitControlGroups(files, "cpu", [&](const std::string& folder, ControlGroupVersion version) {
    const double quota = QuotaOf(folder, version);
    // Rounded up, as JVM, .NET and Go do. Rounded down, a quota of 1.5 would leave a third unused;
    // a thread that is over the quota waits for the next period, a tenth of a second.
    if (quota == 0 || std::ceil(quota) >= found.count) return;
    found = {.count = static_cast<int>(std::ceil(quota)),
             .bound = absl::StrCat("CPU quota of ", quota, " in ", folder)};
  });
  return found;
}

}  // namespace ballast
