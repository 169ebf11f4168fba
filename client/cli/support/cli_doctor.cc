// doctor.
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ballast/v1/diagnostics.pb.h"
#include "ballast/v1/jobs.pb.h"
#include "ballast/v1/tool.pb.h"
#include "client/calls/service.h"
#include "client/cli/cli_command.h"
#include "client/cli/cli_print.h"
#include "client/cli/cli_text.h"
#include "client/cli/output_file.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "proto/message_json.h"

namespace ballast::client::cli {
namespace {

constexpr char kContents[] =
    "What `ballast doctor` found. Nothing in here is a weight or a gradient; names of parameters,\n"
    "paths and flags are. Look through it before you pass it on. For the stacks of the service's\n"
    "threads add what `eu-stack -p PROCESS` prints.\n";

void Add(std::string& report, absl::string_view title, absl::string_view contents) {
  absl::StrAppend(&report, "\n==> ", title, "\n", absl::StripSuffix(contents, "\n"), "\n");
}

void AddService(const v1::ServiceDescription& service, std::string& report) {
  // The message's maps have no order.
  std::string settings;
  const std::map<std::string, std::string> sorted(service.settings().begin(),
                                                  service.settings().end());
  for (const auto& [name, value] : sorted) absl::StrAppend(&settings, "--", name, "=", value, "\n");
  Add(report, "service",
      absl::StrCat("version ", service.version(), "\ninstance ", service.instance_id(),
                   "\nprocess ", service.process_id(), "\nstarted ",
                   absl::FormatTime(
                       absl::FromUnixSeconds(static_cast<int64_t>(service.start_time_seconds()))),
                   "\n", settings));
  std::string gates;
  for (const auto& [name, gate] : service.gates()) absl::StrAppend(&gates, name, ": ", gate, "\n");
  Add(report, "what is under way in each job", gates);
  Add(report, "log, the last lines", absl::StrJoin(service.log_lines(), ""));
  Add(report, "metrics", service.metrics());
  const std::map<std::string, std::string> host(service.host().begin(), service.host().end());
  for (const auto& [name, contents] : host) Add(report, name, contents);
}

// Returns why some of it is missing; empty if nothing is.
absl::StatusOr<std::string> Examine(Service& service, const std::string& job,
                                    const std::string& path) {
  // Without the job there is nothing to examine. All else may be missing, and is then named.
  BALLAST_ASSIGN_OR_RETURN(const v1::Job found, service.GetJob(job, /*with_parameters=*/false));
  std::string report = kContents;
  Add(report, "tool",
      absl::StrCat("ballast ", VersionAndBuild(), "\n",
                   absl::FormatTime(absl::Now(), absl::UTCTimeZone()), "\nservice ",
                   service.address()));
  Add(report, absl::StrCat("job ", job), JobText(found));
  BALLAST_ASSIGN_OR_RETURN(const std::string as_json, proto::ToJson(found));
  Add(report, "the same as JSON", as_json);
  Add(report, "groups", GroupsText(found));
  std::string missing;
  if (const auto jobs =
          service.Call<v1::ListJobsResponse>("JobService/ListJobs", v1::ListJobsRequest());
      jobs.ok()) {
    Add(report, "jobs", JobsText(*jobs));
  } else {
    absl::StrAppend(&missing, "jobs: ", jobs.status().message(), "\n");
  }
  // An older service does not know this call, and one with roles refuses it to all but operators.
  const auto described = service.Call<v1::ServiceDescription>("DiagnosticsService/DescribeService",
                                                              v1::DescribeServiceRequest());
  if (described.ok()) {
    AddService(*described, report);
  } else {
    absl::StrAppend(&missing, "service, what is under way, log, metrics, host: ",
                    described.status().message(), "\n");
  }
  if (!missing.empty()) Add(report, "missing", missing);
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<AtomicFile> file, CreateOutputFile(path));
  BALLAST_RETURN_IF_ERROR(file->Append(report));
  BALLAST_RETURN_IF_ERROR(file->Commit());
  return missing;
}

absl::StatusOr<Action> PrepareDoctor(const Arguments& arguments) {
  const std::string job = arguments.positional(0);
  if (!IsJobName(job)) {
    return absl::InvalidArgumentError(absl::StrCat("'", job, "' is no name of a job"));
  }
  const std::string path = arguments.Get("out", absl::StrCat("ballast-doctor-", job, ".txt"));
  return [=](Service& service, bool json) -> absl::StatusOr<std::string> {
    BALLAST_ASSIGN_OR_RETURN(const std::string missing, Examine(service, job, path));
    v1::WrittenArchive written;
    written.set_file(path);
    written.set_missing(missing);
    if (json) return proto::ToJson(written);
    return absl::StrCat("wrote ", path,
                        "; look through it before you pass it on: it has names and paths, no "
                        "weights\n",
                        missing.empty() ? "" : absl::StrCat("not in it: ", missing));
  };
}

}  // namespace

Command DoctorCommand() {
  return {.spec = {.name = "doctor",
                   .positionals = {"JOB"},
                   .summary = "one text file for a bug report",
                   .details = "Ranks, work in progress, the service's last log lines and steps, "
                              "flags,\nmetrics and versions. Training goes on.",
                   .flags = {{"out", "FILE", "default: ballast-doctor-JOB.txt"}}},
          .timeout_seconds = 60,
          .prepare = PrepareDoctor};
}

}  // namespace ballast::client::cli
