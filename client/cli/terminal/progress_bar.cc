#include "client/cli/terminal/progress_bar.h"

#include <grpcpp/client_context.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "ballast/v1/jobs.grpc.pb.h"
#include "cpu_optimizer_service/common/text/printable.h"
#include "proto/convert.h"
#include "proto/deadline.h"

namespace ballast::client::cli {
namespace {

constexpr std::chrono::milliseconds kEvery(500);
// A look that is not answered by then is left out.
constexpr absl::Duration kLookLimit = absl::Seconds(2);
constexpr char kClearLine[] = "\r\033[K";

size_t ColumnsOf(int terminal) {
  winsize size = {};
  return ioctl(terminal, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

void Put(int terminal, absl::string_view text) {
  if (write(terminal, text.data(), text.size()) < 0) return;  // It shows, and is no result.
}

}  // namespace

std::string BarLine(const Activity& activity, size_t columns) {
  constexpr int kCells = 20;
  std::string bar(kCells, ' ');
  std::string percent = "   -";
  if (activity.total_bytes > 0) {
    const double share = std::clamp(
        static_cast<double>(activity.done_bytes) / static_cast<double>(activity.total_bytes), 0.0,
        1.0);
    std::fill_n(bar.begin(), static_cast<int>(share * kCells), '#');
    percent = absl::StrFormat("%3d%%", static_cast<int>(share * 100));
  }
  std::string line = absl::StrCat("[", bar, "] ", percent, " ", OneLine(ToLine(activity), columns));
  if (line.size() > columns) line.resize(columns);
  return line;
}

ProgressBar::ProgressBar(std::function<std::optional<Activity>()> look, int terminal)
    : look_(std::move(look)), terminal_(terminal) {
  if (isatty(terminal_) != 0) thread_.emplace("progress-bar", kEvery, [this] { Draw(); });
}

ProgressBar::~ProgressBar() {
  thread_.reset();
  if (drawn_) Put(terminal_, kClearLine);
}

void ProgressBar::Draw() {
  const std::optional<Activity> activity = look_();
  if (!activity.has_value()) return;
  // One column is left free: some terminals begin another line once the last one is full.
  Put(terminal_, absl::StrCat(kClearLine, BarLine(*activity, ColumnsOf(terminal_) - 1)));
  drawn_ = true;
}

std::function<std::optional<Activity>()> WorkOf(std::shared_ptr<grpc::Channel> channel,
                                                std::string job, std::vector<ActivityKind> kinds) {
  // Its own: the command's calls may connect again meanwhile, and replace theirs.
  return [jobs = std::make_shared<v1::JobService::Stub>(std::move(channel)), job = std::move(job),
          kinds = std::move(kinds)]() -> std::optional<Activity> {
    std::optional<Activity> newest;
    const auto consider = [&](const auto& activities) {
      for (const v1::Activity& message : activities) {
        const Activity activity = proto::FromProto(message);
        if (std::find(kinds.begin(), kinds.end(), activity.kind) == kinds.end()) continue;
        if (!newest.has_value() || activity.seconds < newest->seconds) newest = activity;
      }
    };
    grpc::ClientContext context;
    context.set_deadline(proto::Deadline(kLookLimit));
    if (!job.empty()) {
      v1::GetJobRequest request;
      request.set_name(proto::JobName(job));
      v1::Job response;
      if (jobs->GetJob(&context, request, &response).ok()) consider(response.activities());
      return newest;
    }
    v1::ListJobsResponse response;
    if (!jobs->ListJobs(&context, v1::ListJobsRequest(), &response).ok()) return newest;
    consider(response.activities());
    for (const v1::Job& each : response.jobs()) consider(each.activities());
    return newest;
  };
}

}  // namespace ballast::client::cli
