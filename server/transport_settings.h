// Settings of the process and of every channel. Most come from measurements.
#ifndef BALLAST_SERVER_TRANSPORT_SETTINGS_H_
#define BALLAST_SERVER_TRANSPORT_SETTINGS_H_

#include <cstdint>

namespace grpc {
class ChannelArguments;
class ServerBuilder;
}

namespace ballast::server {

// The largest bulk message is a chunk's first weights with three moments, 2^18 fp32 elements each:
// 4 MiB. Descriptions of jobs are larger: 100,000 parameters with long names and their partitions
// stay below this.
inline constexpr int kMaxMessageBytes = 32 << 20;

// Sets heap and logging of the process; only the first call has an effect.
void ConfigureProcessForTransport();

// How many bytes of unhandled messages all connections together may hold, in a service with this
// memory limit for jobs. gRPC checks a message's size only when it has the whole message, and a
// message may claim 4 GiB. Beyond this limit gRPC first slows the senders down, then ends streams.
int64_t MostBufferedBytes(int64_t memory_limit_bytes);

// The maximal number of streams of one connection. Further calls of a client wait in the client.
inline constexpr int kMaxStreamsOfConnection = 1024;

// Lets the system end a TCP connection whose peer reads nothing for as long as a silent peer may.
// gRPC does that for connections that it accepts itself. Its pings do not help: gRPC sends no ping
// before its current write ends.
void EndIfPeerTakesNothing(int connection);

// For a channel to another member of a job.
grpc::ChannelArguments MemberChannelArguments();

// Sets message sizes, buffer limits and channel arguments.
void ConfigureTransport(grpc::ServerBuilder& builder, int64_t memory_limit_bytes);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRANSPORT_SETTINGS_H_
