// Channels to a service: their addresses and arguments, and the heap setting that they need.
//
//   auto channel = client::Connect("127.0.0.1:7070").value();  // Or "unix:/run/ballast.sock".
//   client::Connect("host:7070", absl::Seconds(10), {.tls_ca = "ca.pem", .token_file = "token"});
//
// If a service hangs or its host is dead, the channel's calls end with UNAVAILABLE after at most 40
// seconds: 20 without a byte from it, then 20 for a ping. One exception is a write that a stopped
// process leaves in the kernel. Over TCP the kernel drops it after the same time. Over a unix
// socket it stays until the process continues or ends.
#ifndef BALLAST_CLIENT_CONNECT_H_
#define BALLAST_CLIENT_CONNECT_H_

#include <grpcpp/channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/credentials.h"

namespace ballast::client {

// A channel to "host:port" or "unix:/path". INVALID_ARGUMENT at once if `target` is neither, or if
// the credentials are wrong, as in MakeChannelCredentials. UNAVAILABLE if the service does not
// answer within `timeout`, or soon, if certificates prevent the connection. If this process is
// suspended, at most half a second of that counts.
absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(
    const std::string& target, absl::Duration timeout = absl::Seconds(10),
    const Credentials& credentials = OrEnvironment({}));

// For every channel to a service, including in-process ones.
grpc::ChannelArguments ServiceChannelArguments();

// INVALID_ARGUMENT unless `address` is "host:port", "[IPv6]:port" or "unix:/path".
absl::Status CheckAddress(const std::string& address);

// A channel that connects at its first use. Calls fail at once if no service answers.
// INVALID_ARGUMENT: the credentials are wrong.
absl::StatusOr<std::shared_ptr<grpc::Channel>> NewChannel(
    const std::string& target, const Credentials& credentials = OrEnvironment({}));

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_CONNECT_H_
