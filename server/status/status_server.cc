#include "server/status/status_server.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/status.h"
#include "google/protobuf/util/json_util.h"
#include "server/jobs/history_message.h"
#include "server/status/job_json.h"
#include "server/status/metrics.h"
#include "server/status/page.h"
#include "server/status/state_json.h"

namespace ballast::server {
namespace {

using nlohmann::json;

// Text that is not UTF-8 is shown with marks in its place.
std::string Dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

HttpAnswer JsonAnswer(std::string text, int code = 200) {
  return {.code = code, .content_type = "application/json", .body = std::move(text)};
}

HttpAnswer NotReady(absl::string_view why) {
  return {.code = 503, .body = absl::StrCat("not ready: ", why, "\n")};
}

int CodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      return 400;
    case absl::StatusCode::kUnauthenticated:
      return 401;
    case absl::StatusCode::kPermissionDenied:
      return 403;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kInternal:
      return 500;
    default:
      return 503;
  }
}

HttpAnswer Failure(const absl::Status& status) {
  const int code = CodeOf(status);
  return JsonAnswer(Dump({{"error", std::string(status.message())}}), code);
}

HttpAnswer ToAnswer(const absl::StatusOr<json>& value) {
  // No error of the caller's, so a browser need not log it as one.
  if (absl::IsUnavailable(value.status()) || absl::IsResourceExhausted(value.status())) {
    return JsonAnswer(Dump({{"unavailable", std::string(value.status().message())}}));
  }
  return value.ok() ? JsonAnswer(Dump(*value)) : Failure(value.status());
}

// The query's number of this name; 0 if it has none.
template <typename Number>
Number NumberOf(const HttpRequest& request, const std::string& name) {
  Number number = 0;
  return absl::SimpleAtoi(request.Get(name), &number) ? number : 0;
}

// protobuf's JSON form of JobHistory, in as many entries as a chart can show.
HttpAnswer HistoryAnswer(const Job& job, const HttpRequest& request) {
  constexpr uint32_t kMostEntries = 1000;
  const auto entries = NumberOf<uint32_t>(request, "entries");  // 0: it does not say.
  const v1::JobHistory history = ToMessage(
      job.History({.first_step = NumberOf<uint64_t>(request, "first"),
                   .last_step = NumberOf<uint64_t>(request, "last"),
                   .max_entries = entries > 0 ? std::min(entries, kMostEntries) : kMostEntries}));
  std::string text;
  const auto written = google::protobuf::util::MessageToJsonString(history, &text);
  return written.ok() ? JsonAnswer(std::move(text))
                      : Failure(absl::InternalError(written.message().as_string()));
}

// The same answers for all who look at the same time, however many they are.
class AnswerCache {
 public:
  HttpAnswer Get(const std::string& key, const std::function<HttpAnswer()>& make) {
    std::promise<HttpAnswer> promise;
    Entry entry;
    bool is_new = false;
    {
      const std::lock_guard lock(mutex_);
      const auto now = Clock::now();
      std::erase_if(answers_, [&](const auto& each) { return now > each.second.until; });
      // Who places the entry makes the answer, without the lock; all others wait for it.
      const auto placed = answers_.try_emplace(key);
      is_new = placed.second;
      if (is_new) placed.first->second.answer = promise.get_future().share();
      entry = placed.first->second;
    }
    if (!is_new) return entry.answer.get();
    try {
      promise.set_value(make());
    } catch (...) {
      // All who wait get it, too. If it left this function here, the entry would stay for ever.
      promise.set_exception(std::current_exception());
    }
    const std::lock_guard lock(mutex_);
    // It is still there: an entry that is being made has no end.
    answers_[key].until = Clock::now() + kFresh;
    return entry.answer.get();
  }

 private:
  using Clock = std::chrono::steady_clock;
  // Less than the second after which a page asks again.
  static constexpr std::chrono::milliseconds kFresh{400};
  struct Entry {
    Clock::time_point until = Clock::time_point::max();  // While it is being made.
    std::shared_future<HttpAnswer> answer;
  };
  std::mutex mutex_;
  std::map<std::string, Entry> answers_;
};

}  // namespace

// All that is shown.
struct StatusServer::Shown {
  Shown(Engine& engine, const Server& server, const ServiceHistory& history)
      : engine(engine), server(server), history(history) {}

  HttpAnswer Answer(const HttpRequest& request);
  HttpAnswer AnswerApi(const HttpRequest& request, const Viewer& viewer);
  // UNAUTHENTICATED, PERMISSION_DENIED.
  absl::StatusOr<Viewer> WhoLooks(const HttpRequest& request) const;
  // The one that the query names, if the viewer may see it.
  absl::StatusOr<std::shared_ptr<Job>> JobOf(const HttpRequest& request,
                                             const Viewer& viewer) const;
  // One of a kind at a time: each may take seconds, and a thread.
  HttpAnswer AnswerAlone(std::mutex& kind, const absl::StatusOr<std::shared_ptr<Job>>& job,
                         const std::function<absl::StatusOr<json>(Job&)>& make);

  Engine& engine;
  const Server& server;
  const ServiceHistory history;
  AnswerCache cache;
  std::mutex distribution;
  std::mutex timeline;
};

struct StatusServer::Impl {
  HttpAnswer Answer(const HttpRequest& request);

  std::unique_ptr<Shown> shown;
  std::atomic<Shown*> visible = nullptr;  // `shown`, once it is there.
  std::string url;
  std::unique_ptr<HttpServer> http;  // Ends first.
};

absl::StatusOr<Viewer> StatusServer::Shown::WhoLooks(const HttpRequest& request) const {
  return server.access().AdmitViewer({.authorization = request.authorization,
                                      .certificate_name = request.certificate_name,
                                      .peer = request.peer});
}

absl::StatusOr<std::shared_ptr<Job>> StatusServer::Shown::JobOf(const HttpRequest& request,
                                                                const Viewer& viewer) const {
  const std::string name = request.Get("job");
  BALLAST_RETURN_IF_ERROR(CheckJobName(name));
  // Before it is looked for: the answer must not tell whether there is such a job.
  if (viewer.has_value()) BALLAST_RETURN_IF_ERROR(viewer->Check(name));
  return engine.FindJob(name);
}

HttpAnswer StatusServer::Shown::AnswerAlone(std::mutex& kind,
                                            const absl::StatusOr<std::shared_ptr<Job>>& job,
                                            const std::function<absl::StatusOr<json>(Job&)>& make) {
  if (!job.ok()) return Failure(job.status());
  // It does not wait: whoever waits would keep one of the few threads.
  const std::unique_lock lock(kind, std::try_to_lock);
  if (!lock.owns_lock()) {
    return ToAnswer(absl::UnavailableError("another page asks for the same; try again"));
  }
  return ToAnswer(make(**job));
}

HttpAnswer StatusServer::Shown::AnswerApi(const HttpRequest& request, const Viewer& viewer) {
  if (request.path == "/api/service") {
    // No job's uid begins so.
    const std::string key = absl::StrCat("/api/", viewer.has_value() ? viewer->principal() : "");
    return cache.Get(key, [&] { return ToAnswer(ServiceJson(engine, server, history, viewer)); });
  }
  const auto job = JobOf(request, viewer);
  if (request.path == "/api/job") {
    if (!job.ok()) return Failure(job.status());
    // The same for all viewers: JobOf has found that this one may see the job.
    return cache.Get((*job)->uid(), [&] { return ToAnswer(JobJson(engine, **job)); });
  }
  if (request.path == "/api/history") {
    if (!job.ok()) return Failure(job.status());
    return HistoryAnswer(**job, request);
  }
  if (request.path == "/api/parameters") {
    if (!job.ok()) return Failure(job.status());
    return ToAnswer(ParametersJson(**job, request.Get("match")));
  }
  if (request.path == "/api/distribution") {
    return AnswerAlone(distribution, job,
                       [&](Job& job) { return DistributionJson(job, request.Get("parameter")); });
  }
  if (request.path == "/api/timeline") {
    int patience_seconds = 0;
    if (!absl::SimpleAtoi(request.Get("patience"), &patience_seconds)) patience_seconds = 60;
    patience_seconds = std::clamp(patience_seconds, 1, 60);
    return AnswerAlone(timeline, job,
                       [=](Job& job) { return TimelineJson(job, patience_seconds); });
  }
  return Failure(absl::NotFoundError(absl::StrCat("there is no ", request.path)));
}

HttpAnswer StatusServer::Shown::Answer(const HttpRequest& request) {
  if (request.path == "/ready") {
    return server.serving() ? HttpAnswer{.body = "ready\n"} : NotReady("the service is draining");
  }
  const absl::StatusOr<Viewer> viewer = WhoLooks(request);
  if (!viewer.ok()) return Failure(viewer.status());
  if (request.path == "/metrics") {
    // By principal, because each sees other jobs.
    return cache.Get(absl::StrCat("/metrics/", viewer->has_value() ? (*viewer)->principal() : ""),
                     [&] {
                       return HttpAnswer{.content_type = "text/plain; version=0.0.4; charset=utf-8",
                                         .body = MetricsText(engine, server, history, *viewer)};
                     });
  }
  return AnswerApi(request, *viewer);
}

HttpAnswer StatusServer::Impl::Answer(const HttpRequest& request) {
  if (request.path == "/live") return {.body = "live\n"};
  for (const PageFile& file : PageFiles()) {
    if (request.path == file.path) {
      return {.content_type = std::string(file.content_type), .body = std::string(file.contents)};
    }
  }
  if (request.path != "/ready" && request.path != "/metrics" &&
      !request.path.starts_with("/api/")) {
    return {.code = 404, .body = "there is no such page; the status page is at /\n"};
  }
  Shown* const now = visible;
  if (now != nullptr) return now->Answer(request);
  constexpr char kWhy[] = "the service is starting, and takes over jobs that it has left";
  return request.path.starts_with("/api/") ? Failure(absl::UnavailableError(kWhy)) : NotReady(kWhy);
}

absl::StatusOr<std::unique_ptr<StatusServer>> StatusServer::Start(const HttpOptions& options,
                                                                  NamedMemory* memory) {
  auto impl = std::make_unique<Impl>();
  auto http = HttpServer::Start(
      options, [impl = impl.get()](const HttpRequest& request) { return impl->Answer(request); },
      memory);
  if (!http.ok()) return http.status();
  impl->url = absl::StrCat(options.access.tls_certificate.empty() ? "http://" : "https://",
                           (*http)->address());
  impl->http = *std::move(http);
  return std::unique_ptr<StatusServer>(new StatusServer(std::move(impl)));
}

void StatusServer::Show(Engine& engine, const Server& server, const ServiceHistory& history) {
  impl_->shown = std::make_unique<Shown>(engine, server, history);
  // Last, because threads of the HTTP server go by it from now on.
  impl_->visible = impl_->shown.get();
}

StatusServer::StatusServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

StatusServer::~StatusServer() = default;

const std::string& StatusServer::url() const { return impl_->url; }

}  // namespace ballast::server
