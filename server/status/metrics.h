// The metrics of a service in Prometheus' text format. README.md lists them.
#ifndef BALLAST_SERVER_STATUS_METRICS_H_
#define BALLAST_SERVER_STATUS_METRICS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "cpu_optimizer_service/engine.h"
#include "server/access/access.h"
#include "server/server.h"
#include "server/status/service_history.h"

namespace ballast::server {

// The viewer; nullopt: every peer may look at everything.
using Viewer = std::optional<Caller>;
inline bool MaySee(const Viewer& viewer, const Job& job) {
  return !viewer.has_value() || viewer->MayUse(job.spec().name);
}

// The system's data about this process.
struct ProcessFacts {
  double start_time_seconds = 0;  // Since 1970.
  double cpu_seconds = 0;
  int64_t resident_bytes = 0;
  int64_t virtual_bytes = 0;
  int64_t threads = 0;
  int64_t open_descriptors = 0;
};
ProcessFacts ReadProcessFacts();

// Collected at the call, for the jobs that the viewer may see.
std::string MetricsText(const Engine& engine, const Server& server, const ServiceHistory& history,
                        const Viewer& viewer = {});

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_METRICS_H_
