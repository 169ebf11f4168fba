// trace.
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ballast/v1/tool.pb.h"
#include "client/calls/service.h"
#include "client/cli/chrome_trace.h"
#include "client/cli/cli_command.h"
#include "client/cli/cli_print.h"
#include "client/cli/cli_text.h"
#include "client/cli/output_file.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/steady_time.h"
#include "proto/convert.h"
#include "proto/message_json.h"

namespace ballast::client::cli {
namespace {

constexpr double kDefaultSteps = 3;
// As many as the service records (TraceJobRequest.steps).
constexpr double kMostSteps = 1000;

struct TraceRequest {
  std::string job;
  uint32_t steps = 0;
  std::string out;
};

// Writes a trace to a file as its events arrive.
class TraceDownload {
 public:
  // All arguments outlive it.
  TraceDownload(const TraceRequest& request, const Layout& layout, AtomicFile& file)
      : layout_(layout), chrome_(request.job, layout), file_(file) {
    written_.set_file(request.out);
  }

  absl::Status Receive(const v1::TraceJobResponse& part) {
    std::string text = std::exchange(started_, true) ? "" : chrome_.Head();
    for (const v1::TraceEvent& event : part.events()) {
      if (!KnowsKind(event)) {
        written_.set_unknown_events(written_.unknown_events() + 1);
        continue;
      }
      // What follows takes chunks of the layout by the event's number, without a further check.
      if (const absl::Status status = CheckEvent(event, layout_); !status.ok()) {
        return absl::DataLossError(absl::StrCat("the service sent ", status.message()));
      }
      text += chrome_.Add(event);
      // An attempt at a step that is aborted and repeated begins again.
      if (event.kind() == v1::BEGUN) written_.set_begun_steps(written_.begun_steps() + 1);
      if (event.kind() == v1::COMMITTED) {
        written_.set_committed_steps(written_.committed_steps() + 1);
      }
    }
    written_.set_dropped_events(written_.dropped_events() + part.dropped_events());
    return file_.Append(text);
  }
  absl::Status Finish() {
    BALLAST_RETURN_IF_ERROR(file_.Append(chrome_.Tail(written_.dropped_events())));
    written_.set_events(chrome_.events());
    return file_.Commit();
  }

  const v1::WrittenTrace& written() const { return written_; }

 private:
  const Layout& layout_;
  ChromeTrace chrome_;
  AtomicFile& file_;
  bool started_ = false;
  v1::WrittenTrace written_;
};

// The error if no step began: it names what the job did instead.
absl::Status NothingBegun(Service& service, const TraceRequest& request, absl::Duration waited) {
  BALLAST_ASSIGN_OR_RETURN(const v1::Job job, service.GetJob(request.job, false));
  const bool in_step = job.phase() == v1::OPEN || job.phase() == v1::SEALED ||
                       job.phase() == v1::VOTING || job.phase() == v1::UPDATING;
  const std::string there = in_step
                                ? absl::StrCat("step ", job.committed_step() + 1, " is ",
                                               Name(job.phase()), " and was begun before the trace")
                                : absl::StrCat("it is ", Name(job.phase()), ", with ",
                                               job.committed_step(), " steps committed");
  return absl::DeadlineExceededError(
      absl::StrCat("no step of job ", request.job, " began in ",
                   absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(100))), ": ", there,
                   "; nothing was written; give it longer with --timeout"));
}

std::string Describe(const TraceRequest& request, const v1::WrittenTrace& trace) {
  std::string text =
      absl::StrCat("wrote ", FormatCount(trace.events()), " events of job ", request.job, " to ",
                   request.out, "; open it in https://ui.perfetto.dev or chrome://tracing\n");
  if (trace.dropped_events() > 0) {
    absl::StrAppend(
        &text, FormatCount(static_cast<int64_t>(trace.dropped_events())),
        " more events did not fit in the service's memory for them; trace fewer steps\n");
  }
  if (trace.unknown_events() > 0) {
    absl::StrAppend(
        &text, FormatCount(trace.unknown_events()),
        " more events are of kinds that this client does not know; use the service's version\n");
  }
  if (trace.committed_steps() < request.steps) {
    absl::StrAppend(&text, "only ", trace.committed_steps(), " of ", request.steps,
                    " steps were committed in this time\n");
  }
  return text;
}

absl::StatusOr<std::string> Trace(Service& service, const TraceRequest& request, bool json) {
  const absl::Time start = SteadyNow();
  // Events have only a chunk's number. The layout says whose it is, and which parameters it has.
  BALLAST_ASSIGN_OR_RETURN(const v1::Job job, service.GetJob(request.job, true));
  BALLAST_ASSIGN_OR_RETURN(const JobSpec spec, proto::FromProto(job));
  BALLAST_ASSIGN_OR_RETURN(const Layout layout, Layout::Create(spec.layout));
  // A file that cannot be made is found now, and not after minutes of waiting.
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<AtomicFile> file, CreateOutputFile(request.out));
  TraceDownload download(request, layout, *file);
  v1::TraceJobRequest message;
  message.set_name(proto::JobName(request.job));
  message.set_steps(request.steps);
  BALLAST_RETURN_IF_ERROR(service.ReadTrace(
      message, [&](const v1::TraceJobResponse& part) { return download.Receive(part); }));
  // The file is not committed, so nothing of it stays.
  if (download.written().begun_steps() == 0)
    return NothingBegun(service, request, SteadyNow() - start);
  BALLAST_RETURN_IF_ERROR(download.Finish());
  return json ? proto::ToJson(download.written()) : Describe(request, download.written());
}

absl::StatusOr<Action> PrepareTrace(const Arguments& arguments) {
  BALLAST_ASSIGN_OR_RETURN(const std::optional<double> given, arguments.Number("steps"));
  const double steps = given.value_or(kDefaultSteps);
  if (!(steps >= 1 && steps <= kMostSteps) || steps != std::floor(steps)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--steps is ", arguments.Get("steps", ""), ", expected 1 to ", kMostSteps));
  }
  const TraceRequest request = {.job = arguments.positional(0),
                                .steps = static_cast<uint32_t>(steps),
                                .out = arguments.Get("out", "")};
  if (request.out.empty()) {
    return absl::InvalidArgumentError("--out needs the name of a file");
  }
  return [request](Service& service, bool json) { return Trace(service, request, json); };
}

}  // namespace

Command TraceCommand() {
  return {
      .spec = {.name = "trace",
               .positionals = {"JOB"},
               .summary = "a timeline of the next steps, chunk by chunk",
               .details = "Waits until the next steps are committed. Writes when each chunk "
                          "arrived, was summed, updated\n(or speculated, before the decision) and "
                          "sent, and on which thread of the service, for\nhttps://ui.perfetto.dev "
                          "or chrome://tracing. If a step is aborted and repeated, both are "
                          "shown.\nAfter nine tenths of --timeout the events so far are written.",
               .flags = {{"steps", "N", "number of steps, 1 to 1000 (default 3)"},
                         {"out", "FILE.json", "write the timeline to this file"}}},
      .timeout_seconds = 600,
      .prepare = PrepareTrace};
}

}  // namespace ballast::client::cli
