// The JSON behind the status page: a service and its jobs. README.md has the fields.
#ifndef BALLAST_SERVER_STATUS_JOB_JSON_H_
#define BALLAST_SERVER_STATUS_JOB_JSON_H_

#include <nlohmann/json_fwd.hpp>

#include "cpu_optimizer_service/engine.h"
#include "server/server.h"
#include "server/status/job_view.h"
#include "server/status/service_history.h"

namespace ballast::server {

// With the jobs that the viewer may see.
nlohmann::json ServiceJson(const Engine& engine, const Server& server,
                           const ServiceHistory& history, const Viewer& viewer);
nlohmann::json JobJson(const Engine& engine, const Job& job);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_JOB_JSON_H_
