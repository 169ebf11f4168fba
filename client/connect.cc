#include "client/connect.h"

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <sys/un.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "ballast/v1/jobs.grpc.pb.h"
#include "client/transport/connection.h"
#include "client/transport/handshake.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/heap_settings.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "proto/deadline.h"
#include "proto/status.h"

namespace ballast::client {
namespace {

constexpr int kKeepaliveIntervalMs = 20'000;
constexpr int kKeepaliveTimeoutMs = 20'000;
constexpr int kReconnectMs = 1'000;
// As long as a Connection's attempts go on side by side.
constexpr int kAttemptMs = 8'000;
// Connecting is waited for in pieces of this length, so that time in which this process did not
// run, on a machine that was paused, counts as one of them, and does not use up the limit.
constexpr absl::Duration kConnectWait = absl::Milliseconds(500);
// Between an attempt that failed and the next.
constexpr absl::Duration kPause = absl::Milliseconds(200);
// For the reason why there is no connection, which the next attempt tells when it fails. Without
// the processor a handshake takes long.
constexpr absl::Duration kReasonWait = absl::Seconds(5);
constexpr size_t kMaxPathBytes = sizeof(sockaddr_un::sun_path) - 1;

bool IsHostAndPort(absl::string_view address) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) return false;
  const absl::string_view host = address.substr(0, colon);
  const bool bracketed = absl::StartsWith(host, "[") && absl::EndsWith(host, "]");
  // In an IPv6 address without brackets nothing tells its last part from a port.
  if (!bracketed && absl::StrContains(host, ':')) return false;
  int port = 0;
  return absl::SimpleAtoi(address.substr(colon + 1), &port) && port > 0 && port <= 65535;
}

// What a call says that needs the connection.
grpc::Status WhyNotConnected(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::ClientContext context;
  context.set_deadline(proto::Deadline(kReasonWait));
  v1::ListJobsResponse jobs;
  return v1::JobService::NewStub(channel)->ListJobs(&context, v1::ListJobsRequest(), &jobs);
}

}  // namespace

absl::Status CheckAddress(const std::string& address) {
  absl::string_view path = address;
  const bool is_path = absl::ConsumePrefix(&path, "unix:");
  if (is_path && path.size() > kMaxPathBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", address, "' cannot be a socket: its path has ", path.size(),
                     " bytes, where the system allows ", kMaxPathBytes));
  }
  if (is_path ? absl::StartsWith(path, "/") : IsHostAndPort(address)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("'", address,
                   "' is not the address of a service; expected "
                   "host:port, such as 127.0.0.1:7070, or unix:/path"));
}

grpc::ChannelArguments ServiceChannelArguments() {
  grpc::ChannelArguments arguments;
  arguments.SetUserAgentPrefix(BallastUserAgent());
  // Descriptions of large jobs are larger than gRPC's default limit of 4 MiB.
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  // Larger reads raise the throughput by 7 to 24% with traffic both ways.
  arguments.SetInt("grpc.experimental.tcp_read_chunk_size", 4 << 20);
  arguments.SetInt("grpc.experimental.tcp_min_read_chunk_size", 1 << 20);
  arguments.SetInt("grpc.experimental.tcp_max_read_chunk_size", 16 << 20);
  // Pings detect a peer that is gone without closing the connection, also while a rank waits for
  // others and sends nothing. The second setting lifts gRPC's limit of two pings without data; the
  // service permits as many (server/transport_settings.cc). Without a call nothing is pinged. The
  // timeout is also the kernel's, for bytes that the peer does not take.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveIntervalMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  // A channel that failed stays so for a second, in which a call on it says why. Connection tries
  // again with others (client/transport/connection.h).
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMs);
  // What is misnamed so bounds an attempt to connect, 20 seconds by default. A call waits for the
  // attempt that it causes when its connection has just been lost.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kAttemptMs);
  // Each channel has its own connection, also when a process has several ranks.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return arguments;
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> NewChannel(const std::string& target,
                                                          const Credentials& credentials) {
  KeepHeapWarm();
  BALLAST_ASSIGN_OR_RETURN(const auto checked, MakeChannelCredentials(target, credentials));
  return MakeReplaceable([target, checked] {
    return grpc::CreateCustomChannel(target, checked, ServiceChannelArguments());
  });
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const std::string& target,
                                                       absl::Duration timeout,
                                                       const Credentials& credentials) {
  BALLAST_RETURN_IF_ERROR(CheckAddress(target));
  BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel, NewChannel(target, credentials));
  Connection connection(std::move(channel));
  absl::Duration left = timeout;
  std::string last_why;
  absl::Duration for_that;  // That reason.
  absl::StatusOr<std::shared_ptr<grpc::Channel>> last;
  do {
    const auto begun = std::chrono::steady_clock::now();
    last = connection.Connected(std::min(left, kConnectWait));
    if (last.ok() && (*last)->GetState(false) == GRPC_CHANNEL_READY) return last;
    const bool may_say_why = last.ok() && !credentials.tls_ca.empty();
    const std::string why =
        may_say_why ? WhyHandshakeFailed(WhyNotConnected(*last), target, credentials) : "";
    if (last.ok()) absl::SleepFor(std::min(left, kPause));
    // What a paused machine has missed is not this service's.
    const absl::Duration took = std::min(absl::FromChrono(std::chrono::steady_clock::now() - begun),
                                         may_say_why ? absl::Seconds(10) : kConnectWait);
    left -= took;
    for_that = why == last_why ? for_that + took : absl::ZeroDuration();
    last_why = why;
    // Before anybody has changed a file the next handshake fails like this one; a service that is
    // being given other files has them after some seconds.
    if (!why.empty() && for_that >= kRotation) break;
  } while (left > absl::ZeroDuration());
  if (!last_why.empty()) {
    return absl::UnavailableError(
        absl::StrCat("no connection to the service at ", target, ": ", last_why));
  }
  const std::string cause = last.ok() ? proto::CauseOfUnreachable(WhyNotConnected(*last))
                                      : std::string(last.status().message());
  return absl::UnavailableError(absl::StrCat(
      "no service answered at ", target, " within ", absl::FormatDuration(timeout),
      cause.empty() ? "" : ": ", cause, "; start ballastd there or correct the address"));
}

}  // namespace ballast::client
