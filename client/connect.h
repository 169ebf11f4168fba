// Channels to a service: their addresses and arguments, and the heap setting that both need, in one
// place.
//
// A service that no longer answers (a dead host, a stopped process) ends the calls of its channel
// with UNAVAILABLE after at most 40 seconds: 20 without a byte from it, then 20 for a ping. One
// exception: a write that a stopped process leaves in the kernel. Over TCP the kernel drops it in
// the same time; over a unix socket it stays until the process goes on or dies.
#ifndef BALLAST_CLIENT_CONNECT_H_
#define BALLAST_CLIENT_CONNECT_H_

#include <grpcpp/channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <memory>
#include <string>

#include "absl/status/status.h"

namespace ballast::client {

// For every channel to a service, in-process ones included.
grpc::ChannelArguments ServiceChannelArguments();

// INVALID_ARGUMENT unless it is "host:port", "[IPv6]:port" or "unix:/path".
absl::Status CheckAddress(const std::string& address);

// A channel that connects when it is first used. Calls on it fail at once if nothing answers.
std::shared_ptr<grpc::Channel> NewChannel(const std::string& target);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_CONNECT_H_
