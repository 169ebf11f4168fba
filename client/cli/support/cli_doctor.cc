// doctor.
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ballast/v1/diagnostics.grpc.pb.h"
#include "client/cli/cli_command.h"
#include "client/cli/cli_json.h"
#include "client/cli/cli_print.h"
#include "client/cli/cli_service.h"
#include "client/cli/cli_text.h"
#include "client/cli/output_file.h"
#include "client/cli/support/archive.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/version.h"

namespace ballast::client::cli {
namespace {

constexpr char kContents[] =
    "What `ballast doctor` found. Nothing in here is a weight or a gradient; names of parameters,\n"
    "paths and flags are. Look through it before you pass it on.\n\n"
    "client.txt      the tool: version, time, the service's address\n"
    "job.txt, .json  the job: phase, ranks, last steps, memory, speculation, saves\n"
    "groups.txt      hyper-parameters\n"
    "jobs.txt        all jobs of the service\n"
    "gate.txt        what is under way in each job\n"
    "settings.txt    the service's flags\n"
    "log.txt         the last lines of its log\n"
    "threads.txt     its threads, with their stacks\n"
    "metrics.txt     its metrics\n"
    "host.txt        what the system says of its process and host\n"
    "missing.txt     what could not be had, and why\n";

std::string ThreadsText(const v1::ServiceDescription& service) {
  std::string text;
  for (const v1::ThreadDescription& thread : service.threads()) {
    absl::StrAppendFormat(&text, "%d %s, state %s, %.2f s of CPU\n", thread.id(), thread.name(),
                          thread.state(), thread.cpu_seconds());
    if (thread.stack().empty()) absl::StrAppend(&text, "    it did not answer\n");
    for (const std::string& frame : thread.stack()) absl::StrAppend(&text, "    ", frame, "\n");
  }
  return text;
}

void AddService(const v1::ServiceDescription& service, const std::string& job, Archive& archive) {
  std::string settings = absl::StrCat(
      "version ", service.version(), "\ninstance ", service.instance_id(), "\nprocess ",
      service.process_id(), "\nstarted ",
      absl::FormatTime(absl::FromUnixSeconds(static_cast<int64_t>(service.start_time_seconds()))),
      "\n\n");
  // The message's map has no order.
  const std::map<std::string, std::string> sorted(service.settings().begin(),
                                                  service.settings().end());
  for (const auto& [name, value] : sorted) absl::StrAppend(&settings, "--", name, "=", value, "\n");
  archive.Add("settings.txt", settings);
  std::string log;
  for (const std::string& line : service.log_lines()) {
    absl::StrAppend(&log, absl::StripSuffix(line, "\n"), "\n");
  }
  archive.Add("log.txt", log);
  archive.Add("threads.txt", ThreadsText(service));
  archive.Add("metrics.txt", service.metrics());
  std::string host;
  for (const auto& [name, contents] : service.host()) {
    absl::StrAppend(&host, "==> ", name, "\n", contents, "\n");
  }
  archive.Add("host.txt", host);
  std::string gates;
  for (const auto& [name, gate] : service.gates()) {
    absl::StrAppend(&gates, name == job ? "* " : "  ", name, ": ", gate, "\n");
  }
  archive.Add("gate.txt", gates);
}

absl::StatusOr<std::string> Examine(Service& service, const std::string& job,
                                    const std::string& path) {
  // Without the job there is nothing to examine. All else may be missing, and is then named.
  BALLAST_ASSIGN_OR_RETURN(const v1::Job found, service.GetJob(job, /*with_parameters=*/false));
  // Names in an archive have less than 100 bytes, and a job's name may have 128.
  Archive archive(absl::StrCat("ballast-doctor-", job.substr(0, 60)));
  archive.Add("README.txt", kContents);
  archive.Add("client.txt", absl::StrCat("ballast ", VersionAndBuild(), "\n",
                                         absl::FormatTime(absl::Now(), absl::UTCTimeZone()),
                                         "\nservice ", service.address(), "\n"));
  archive.Add("job.txt", JobText(found));
  archive.Add("job.json", Dump(ToJson(found)));
  archive.Add("groups.txt", GroupsText(found));
  std::string missing;
  if (const auto jobs = service.ListJobs(); jobs.ok()) {
    archive.Add("jobs.txt", JobsText(*jobs));
  } else {
    absl::StrAppend(&missing, "jobs.txt: ", jobs.status().message(), "\n");
  }
  // An older service does not know this call, and one with roles refuses it to all but operators.
  v1::DiagnosticsService::Stub diagnostics(service.channel());
  const auto described = service.Read(diagnostics, &v1::DiagnosticsService::Stub::DescribeService,
                                      v1::DescribeServiceRequest());
  if (described.ok()) {
    AddService(*described, job, archive);
  } else {
    absl::StrAppend(&missing,
                    "gate, settings, log, threads, metrics, host: ", described.status().message(),
                    "\n");
  }
  archive.Add("missing.txt", missing);
  BALLAST_ASSIGN_OR_RETURN(const std::string bytes, archive.Compressed());
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<AtomicFile> file, CreateOutputFile(path));
  BALLAST_RETURN_IF_ERROR(file->Append(bytes));
  BALLAST_RETURN_IF_ERROR(file->Commit());
  return missing;
}

absl::StatusOr<Action> PrepareDoctor(const Arguments& arguments) {
  const std::string job = arguments.positional(0);
  if (!IsJobName(job)) {
    return absl::InvalidArgumentError(absl::StrCat("'", job, "' is no name of a job"));
  }
  const std::string path = arguments.Get("out", absl::StrCat("ballast-doctor-", job, ".tar.gz"));
  return [=](Service& service, bool json) -> absl::StatusOr<std::string> {
    BALLAST_ASSIGN_OR_RETURN(const std::string missing, Examine(service, job, path));
    if (json) return Dump({{"job", job}, {"file", path}, {"complete", missing.empty()}});
    return absl::StrCat("wrote ", path,
                        "; look through it before you pass it on: it has names and paths, no "
                        "weights\n",
                        missing.empty() ? "" : absl::StrCat("not in it: ", missing));
  };
}

}  // namespace

Command DoctorCommand() {
  return {
      .spec = {.name = "doctor",
               .positionals = {"JOB"},
               .summary = "one archive for a bug report",
               .details = "Ranks, what is under way, stacks of the service's threads, its last log "
                          "lines and steps, flags,\nmetrics and versions. Training goes on.",
               .flags = {{"out", "FILE.tar.gz", "default: ballast-doctor-JOB.tar.gz"}}},
      .timeout_seconds = 60,
      .prepare = PrepareDoctor};
}

}  // namespace ballast::client::cli
