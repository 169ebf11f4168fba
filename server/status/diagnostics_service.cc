#include "server/status/diagnostics_service.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "proto/status.h"
#include "server/access/access.h"
#include "server/status/metrics.h"
#include "server/status/process_facts.h"
#include "server/status/thread_facts.h"

namespace ballast::server {
namespace {

constexpr size_t kMostFileBytes = 16384;

// The beginning of a file; empty if it cannot be read.
std::string ReadSome(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kMostFileBytes, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

void AddHost(v1::ServiceDescription& response) {
  auto& host = *response.mutable_host();
  for (const char* file : {"/etc/os-release", "/proc/cpuinfo", "/proc/loadavg", "/proc/meminfo",
                           "/proc/pressure/cpu", "/proc/pressure/memory", "/proc/self/cgroup",
                           "/proc/self/limits", "/proc/self/smaps_rollup", "/proc/self/status",
                           "/sys/kernel/mm/transparent_hugepage/enabled"}) {
    if (std::string text = ReadSome(file); !text.empty()) host[file] = std::move(text);
  }
  utsname system = {};
  if (uname(&system) == 0) {
    host["uname"] = absl::StrCat(system.sysname, " ", system.release, " ", system.version, " ",
                                 system.machine, "\n");
  }
}

void AddThreads(v1::ServiceDescription& response) {
  for (ThreadFacts& facts : ReadThreads()) {
    v1::ThreadDescription& thread = *response.add_threads();
    thread.set_id(facts.id);
    thread.set_name(facts.name);
    thread.set_state(std::string(1, facts.state));
    thread.set_cpu_seconds(facts.cpu_seconds);
    for (std::string& frame : facts.stack) thread.add_stack(std::move(frame));
  }
}

}  // namespace

void DiagnosticsService::Fill(v1::ServiceDescription& response) const {
  response.set_version(BallastVersion());
  response.set_instance_id(engine_.instance_id());
  response.set_process_id(getpid());
  response.set_start_time_seconds(ReadProcessFacts().start_time_seconds);
  response.mutable_settings()->insert(process_.settings.begin(), process_.settings.end());
  AddThreads(response);
  if (process_.last_log_lines) {
    for (std::string& line : process_.last_log_lines()) response.add_log_lines(std::move(line));
  }
  if (const Server* server = server_) {
    response.set_metrics(MetricsText(engine_, *server, process_.history));
  }
  for (const std::shared_ptr<Job>& job : engine_.ListJobs()) {
    (*response.mutable_gates())[job->spec().name] = job->Status().gate;
  }
  AddHost(response);
}

absl::Status DiagnosticsService::CheckMay(const grpc::ServerContextBase& context,
                                          const v1::DescribeServiceRequest& request) const {
  const Server* const server = server_;
  if (server == nullptr) return absl::UnavailableError("the service is starting; try again");
  BALLAST_ASSIGN_OR_RETURN(
      const Caller caller,
      server->access().Admit(context, "DiagnosticsService.DescribeService", &request));
  for (const std::shared_ptr<Job>& job : engine_.ListJobs()) {
    BALLAST_RETURN_IF_ERROR(caller.Check(job->spec().name));
  }
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* DiagnosticsService::DescribeService(
    grpc::CallbackServerContext* context, const v1::DescribeServiceRequest* request,
    v1::ServiceDescription* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  if (const absl::Status may = CheckMay(*context, *request); !may.ok()) {
    reactor->Finish(proto::ToGrpc(may));
    return reactor;
  }
  if (busy_.exchange(true)) {
    reactor->Finish(proto::ToGrpc(absl::ResourceExhaustedError(
        "the service describes itself to somebody else just now; try again")));
    return reactor;
  }
  thread_.Run([this, reactor, response] {
    Fill(*response);
    busy_ = false;
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

}  // namespace ballast::server
