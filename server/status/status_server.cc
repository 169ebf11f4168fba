#include "server/status/status_server.h"

#include <httplib.h>

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
#include "proto/message_json.h"
#include "server/jobs/history_message.h"
#include "server/status/http_connection.h"
#include "server/status/metrics.h"
#include "server/status/page.h"
#include "server/status/page_messages.h"

namespace ballast::server {
namespace {

HttpAnswer JsonAnswer(std::string text, int code = 200) {
  return {.code = code, .content_type = "application/json", .body = std::move(text)};
}

// {"error": "..."}. Text that is not UTF-8 is shown with marks in its place.
HttpAnswer Says(const char* what, absl::string_view why, int code) {
  const nlohmann::json said = {{what, std::string(why)}};
  return JsonAnswer(said.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), code);
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
  return Says("error", status.message(), CodeOf(status));
}

HttpAnswer ToAnswer(absl::StatusOr<std::string> json) {
  // No error of the caller's, so a browser need not log it as one.
  if (absl::IsUnavailable(json.status()) || absl::IsResourceExhausted(json.status())) {
    return Says("unavailable", json.status().message(), 200);
  }
  return json.ok() ? JsonAnswer(*std::move(json)) : Failure(json.status());
}
HttpAnswer ToAnswer(const google::protobuf::Message& message) {
  return ToAnswer(proto::ToJson(message));
}
template <typename Message>
HttpAnswer ToAnswer(const absl::StatusOr<Message>& message) {
  return message.ok() ? ToAnswer(*message)
                      : ToAnswer(absl::StatusOr<std::string>(message.status()));
}

// The query's number of this name; 0 if it has none.
template <typename Number>
Number NumberOf(const httplib::Request& request, const std::string& name) {
  Number number = 0;
  return absl::SimpleAtoi(request.get_param_value(name), &number) ? number : 0;
}

// In as many entries as a chart can show.
v1::JobHistory HistoryMessage(const Job& job, const httplib::Request& request) {
  constexpr uint32_t kMostEntries = 1000;
  const auto entries = NumberOf<uint32_t>(request, "entries");  // 0: it does not say.
  return ToMessage(
      job.History({.first_step = NumberOf<uint64_t>(request, "first"),
                   .last_step = NumberOf<uint64_t>(request, "last"),
                   .max_entries = entries > 0 ? std::min(entries, kMostEntries) : kMostEntries}));
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

  HttpAnswer Answer(const httplib::Request& request);
  HttpAnswer AnswerApi(const httplib::Request& request, const Viewer& viewer);
  // UNAUTHENTICATED, PERMISSION_DENIED.
  absl::StatusOr<Viewer> WhoLooks(const httplib::Request& request) const;
  // The one that the query names, if the viewer may see it.
  absl::StatusOr<std::shared_ptr<Job>> JobOf(const httplib::Request& request,
                                             const Viewer& viewer) const;
  // One of a kind at a time: each may take seconds, and a thread.
  static HttpAnswer AnswerAlone(std::mutex& kind, const std::function<HttpAnswer()>& make);

  Engine& engine;
  const Server& server;
  const ServiceHistory history;
  AnswerCache cache;
  std::mutex distribution;
  std::mutex timeline;
};

struct StatusServer::Impl {
  HttpAnswer Answer(const httplib::Request& request);

  std::unique_ptr<Shown> shown;
  std::atomic<Shown*> visible = nullptr;  // `shown`, once it is there.
  std::string url;
  std::unique_ptr<HttpServer> http;  // Ends first.
};

absl::StatusOr<Viewer> StatusServer::Shown::WhoLooks(const httplib::Request& request) const {
  const std::string authorization = request.get_header_value("Authorization");
  return server.access().AdmitViewer({.authorization = authorization,
                                      .certificate_name = CertificateName(request.ssl),
                                      .peer = request.remote_addr});
}

absl::StatusOr<std::shared_ptr<Job>> StatusServer::Shown::JobOf(const httplib::Request& request,
                                                                const Viewer& viewer) const {
  const std::string name = request.get_param_value("job");
  BALLAST_RETURN_IF_ERROR(CheckJobName(name));
  // Before it is looked for: the answer must not tell whether there is such a job.
  if (viewer.has_value()) BALLAST_RETURN_IF_ERROR(viewer->Check(name));
  return engine.FindJob(name);
}

HttpAnswer StatusServer::Shown::AnswerAlone(std::mutex& kind,
                                            const std::function<HttpAnswer()>& make) {
  // It does not wait: whoever waits would keep one of the few threads.
  const std::unique_lock lock(kind, std::try_to_lock);
  return lock.owns_lock() ? make()
                          : Says("unavailable", "another page asks for the same; try again", 200);
}

HttpAnswer StatusServer::Shown::AnswerApi(const httplib::Request& request, const Viewer& viewer) {
  const std::string& path = request.path;
  if (path == "/api/service") {
    return cache.Get(path, [&] { return ToAnswer(ProcessMessage(engine, server, history)); });
  }
  if (path == "/api/jobs") {
    const std::string key = absl::StrCat(path, "/", viewer.has_value() ? viewer->principal() : "");
    return cache.Get(key, [&] { return ToAnswer(JobsMessage(engine, viewer)); });
  }
  if (!request.has_param("job")) {
    return Failure(absl::NotFoundError(absl::StrCat("there is no ", path, " without ?job=NAME")));
  }
  const absl::StatusOr<std::shared_ptr<Job>> job = JobOf(request, viewer);
  if (!job.ok()) return Failure(job.status());
  if (path == "/api/job") {
    // The same for all viewers: JobOf has found that this one may see the job.
    return cache.Get((*job)->uid(), [&] { return ToAnswer(JobMessage(engine, **job)); });
  }
  if (path == "/api/history") return ToAnswer(HistoryMessage(**job, request));
  if (path == "/api/parameters") {
    return ToAnswer(ParametersJson(**job, request.get_param_value("match")));
  }
  if (path == "/api/distribution") {
    return AnswerAlone(distribution, [&] {
      return ToAnswer(SummaryMessage(*job, request.get_param_value("parameter")));
    });
  }
  if (path == "/api/timeline") {
    const int asked = NumberOf<int>(request, "patience");
    const int patience_seconds = asked == 0 ? 60 : std::clamp(asked, 1, 60);
    return AnswerAlone(timeline, [&] { return ToAnswer(TraceMessage(*job, patience_seconds)); });
  }
  return Failure(absl::NotFoundError(absl::StrCat("there is no ", path)));
}

HttpAnswer StatusServer::Shown::Answer(const httplib::Request& request) {
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

HttpAnswer StatusServer::Impl::Answer(const httplib::Request& request) {
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
  constexpr char kWhy[] = "the service is starting and is still recovering its jobs";
  return request.path.starts_with("/api/") ? Failure(absl::UnavailableError(kWhy)) : NotReady(kWhy);
}

absl::StatusOr<std::unique_ptr<StatusServer>> StatusServer::Start(const HttpOptions& options,
                                                                  NamedMemory* memory) {
  auto impl = std::make_unique<Impl>();
  auto http = HttpServer::Start(
      options,
      [impl = impl.get()](const httplib::Request& request) { return impl->Answer(request); },
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
