#include "server/status/diagnostics_service.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/status.h"
#include "server/access/access.h"
#include "server/status/metrics.h"
#include "server/status/page_messages.h"
#include "server/unary_call.h"

namespace ballast::server {
namespace {

constexpr size_t kMostFileBytes = 16384;

// The beginning of a file; empty if it cannot be read.
std::string ReadSome(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  // Files of /proc do not say how large they are; that of a host with many processors (cpuinfo) is
  // cut.
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
  // Names, states and ticks of the threads, as proc(5) has them.
  std::string& threads = host["/proc/self/task"];
  std::error_code error;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task", error)) {
    threads += ReadSome(thread.path() / "stat");
  }
  utsname system = {};
  if (uname(&system) == 0) {
    host["uname"] = absl::StrCat(system.sysname, " ", system.release, " ", system.version, " ",
                                 system.machine, "\n");
  }
}

}  // namespace

absl::StatusOr<v1::ServiceDescription> DiagnosticsService::Describe(const Caller& caller) const {
  BALLAST_RETURN_IF_ERROR(caller.CheckAllJobs());
  const Server& server = *server_.load();
  v1::ServiceDescription response = ProcessMessage(engine_, server, process_.history);
  response.mutable_settings()->insert(process_.settings.begin(), process_.settings.end());
  if (process_.last_log_lines) {
    for (std::string& line : process_.last_log_lines()) response.add_log_lines(std::move(line));
  }
  // Of all jobs, because the caller is an operator of all, as checked above.
  response.set_metrics(MetricsText(engine_, server, process_.history));
  for (const std::shared_ptr<Job>& job : engine_.ListJobs()) {
    (*response.mutable_gates())[job->spec().name] = job->Status().gate;
  }
  AddHost(response);
  return response;
}

grpc::ServerUnaryReactor* DiagnosticsService::DescribeService(grpc::CallbackServerContext* context,
                                                              const grpc::ByteBuffer* request,
                                                              grpc::ByteBuffer* response) {
  // The service is registered before its server starts, so a call may come before Describes.
  const Server* const server = server_;
  if (server == nullptr) {
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    reactor->Finish(proto::ToGrpc(absl::UnavailableError("the service is starting; try again")));
    return reactor;
  }
  return UnaryCall::Run<v1::DescribeServiceRequest>(
      server->access().Admit(*context, "DiagnosticsService.DescribeService"),
      server->pools().descriptions, {context, request, response},
      [this](const Caller& caller, const v1::DescribeServiceRequest&) { return Describe(caller); });
}

}  // namespace ballast::server
