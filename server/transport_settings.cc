#include "server/transport_settings.h"

#include <grpc/support/log.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/support/channel_arguments.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include <algorithm>
#include <mutex>

#include "cpu_optimizer_service/common/system/heap_settings.h"
#include "cpu_optimizer_service/common/system/version.h"

namespace ballast::server {
namespace {

// Larger reads save system calls and slices: 7 to 24% more when both directions are busy, measured.
constexpr int kReadChunkBytes = 4 << 20;
constexpr int kMinReadChunkBytes = 1 << 20;
constexpr int kMaxReadChunkBytes = 16 << 20;

// gRPC counts no pings against a client. It would end a connection that is pinged too often, but
// only once its answers are written: until then 1.51 keeps an error of 5 KB for each further ping.
// What bounds a flood of pings is that gRPC reads nothing while it owes 10,000 answers.
constexpr int kNoPingStrikes = 0;

// The service pings a silent connection too: a peer that is gone, or stopped, or reads nothing at
// all is noticed within the two times together, and what its calls hold is freed.
constexpr int kKeepaliveMs = 20'000;
constexpr int kKeepaliveTimeoutMs = 20'000;

// A connection that has not finished its handshake by then, of TLS or HTTP/2, is closed.
constexpr int kHandshakeMs = 20'000;

// So long an attempt to connect to another member may take.
constexpr int kMemberAttemptMs = 5'000;

// gRPC's own log lines name its source files; the service's say what an operator can do.
void LogAtDebug(gpr_log_func_args* line) { spdlog::debug("grpc: {}", line->message); }

}  // namespace

void ConfigureProcessForTransport() {
  static std::once_flag once;
  std::call_once(once, [] {
    KeepHeapWarm();
    gpr_set_log_function(LogAtDebug);
  });
}

int64_t MostBufferedBytes(int64_t memory_limit_bytes) {
  return std::clamp(memory_limit_bytes / 8, int64_t{512} << 20, int64_t{8} << 30);
}

void EndIfPeerTakesNothing(int connection) {
  const int milliseconds = kKeepaliveMs + kKeepaliveTimeoutMs;
  setsockopt(connection, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof(milliseconds));
}

grpc::ChannelArguments MemberChannelArguments() {
  grpc::ChannelArguments arguments;
  arguments.SetUserAgentPrefix(BallastUserAgent());
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Bounds an attempt to connect. Each one has a channel of its own, so that names are resolved anew.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kMemberAttemptMs);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  return arguments;
}

void ConfigureTransport(grpc::ServerBuilder& builder, int64_t memory_limit_bytes) {
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  grpc::ResourceQuota quota("ballast");
  quota.Resize(static_cast<size_t>(MostBufferedBytes(memory_limit_bytes)));
  builder.SetResourceQuota(quota);
  // A compressed message has no bound: a MiB may become a GiB. Training data does not compress. A
  // call that says that it compresses is refused, and should another bring such a message all the
  // same, nothing inflates it.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsOfConnection);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  // A port that another process listens on is an error, and not shared with it.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, kNoPingStrikes);
  builder.AddChannelArgument(GRPC_ARG_TCP_READ_CHUNK_SIZE, kReadChunkBytes);
  builder.AddChannelArgument(GRPC_ARG_TCP_MIN_READ_CHUNK_SIZE, kMinReadChunkBytes);
  builder.AddChannelArgument(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, kMaxReadChunkBytes);
}

}  // namespace ballast::server
