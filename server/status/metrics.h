// The metrics of a service in Prometheus' text format. README.md lists them.
#ifndef BALLAST_SERVER_STATUS_METRICS_H_
#define BALLAST_SERVER_STATUS_METRICS_H_

#include <string>

#include "cpu_optimizer_service/engine.h"
#include "server/server.h"
#include "server/status/job_view.h"
#include "server/status/service_history.h"

namespace ballast::server {

// Collected now: nothing is kept between calls. Of the jobs that the viewer may see.
std::string MetricsText(const Engine& engine, const Server& server, const ServiceHistory& history,
                        const Viewer& viewer = {});

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_METRICS_H_
