// Channels to a service: their arguments, and the heap setting that both need, in one place.
#ifndef BALLAST_CLIENT_CONNECT_H_
#define BALLAST_CLIENT_CONNECT_H_

#include <grpcpp/channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <memory>
#include <string>

namespace ballast::client {

// For every channel to a service, in-process ones included.
grpc::ChannelArguments ServiceChannelArguments();

// A channel that connects when it is first used. Calls on it fail at once if nothing answers.
std::shared_ptr<grpc::Channel> NewChannel(const std::string& target);

// Keeps freed memory in the heap instead of giving it back to the system. Done once, for the
// process.
void KeepHeapWarm();

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_CONNECT_H_
