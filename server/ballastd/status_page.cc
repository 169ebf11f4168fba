#include "server/ballastd/status_page.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "cpu_optimizer_service/common/status.h"
#include "server/access/access.h"

namespace ballast::server {
namespace {

// Doubled after each attempt that fails.
constexpr absl::Duration kFirstPause = absl::Seconds(5);
constexpr absl::Duration kLongestPause = absl::Minutes(5);

void LogWhoMayLook(const std::string& url, const Access& access) {
  const bool by_certificate = !access.options().tls_client_ca.empty();
  // Peers come over TCP, where nobody is a user of this host: roles of users do not count here.
  if (access.has_tokens() || by_certificate) {
    spdlog::info("metrics and the status page at {} take {} of a viewer", url,
                 !by_certificate       ? "the token"
                 : access.has_tokens() ? "the token or the certificate"
                                       : "the certificate");
  } else if (access.has_roles()) {
    spdlog::warn(
        "--roles-file without --tokens-file does not hold for --metrics-listen: every peer that "
        "reaches {} may look at all jobs",
        url);
  }
  spdlog::info("status page at {0}/, metrics at {0}/metrics", url);
}

}  // namespace

absl::Status StatusPage::Start() {
  if (options_.listen.empty()) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<StatusServer>> started = StatusServer::Start(options_, memory_);
  if (!started.ok()) {
    return Annotate(started.status(), "flag --metrics-listen=" + options_.listen);
  }
  server_ = *std::move(started);
  return absl::OkStatus();
}

void StatusPage::StartLater(const absl::Status& why) {
  spdlog::error("no status page and no metrics for now: {} (tried again by itself)",
                std::string(why.message()));
  pause_ = kFirstPause;
  next_try_ = absl::Now() + pause_;
}

void StatusPage::Show(Engine& engine, const Server& server, const ServiceHistory& history) {
  // Kept for a server that KeepTrying starts later.
  show_ = [this, &engine, &server, history] {
    server_->Show(engine, server, history);
    LogWhoMayLook(server_->url(), server.access());
  };
  if (server_ != nullptr) show_();
}

void StatusPage::KeepTrying(absl::Time now) {
  // In the infinite future where it has started, or is not wanted.
  if (now < next_try_) return;
  if (const absl::Status started = Start(); started.ok()) {
    next_try_ = absl::InfiniteFuture();
    if (show_ != nullptr) show_();
    return;
  }
  pause_ = std::min(2 * pause_, kLongestPause);
  next_try_ = now + pause_;
}

}  // namespace ballast::server
