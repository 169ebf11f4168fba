// Settings of the process and of every channel, most of them because of measurements.
#ifndef BALLAST_SERVER_TRANSPORT_SETTINGS_H_
#define BALLAST_SERVER_TRANSPORT_SETTINGS_H_

#include <cstdint>

namespace grpc {
class ServerBuilder;
}

namespace ballast::server {

// The largest bulk message is a chunk's first weights with three moments, 2^18 fp32 elements each:
// 4 MiB. Descriptions of jobs are larger: 100,000 parameters with long names and their partitions
// stay below this.
inline constexpr int kMaxMessageBytes = 32 << 20;

// Sets heap and logging of the process; only the first call has an effect.
void ConfigureProcessForTransport();

// What all connections together may hold in messages that have not been handled, of a service with
// this memory limit for jobs. gRPC checks a message's size when it has it whole, and one may say
// that it has 4 GiB: beyond this it first slows the senders down, then ends streams.
int64_t MostBufferedBytes(int64_t memory_limit_bytes);

// The streams that one connection may have. A client's further calls wait in the client.
inline constexpr int kMaxStreamsOfConnection = 1024;

// Has the system end a TCP connection whose peer takes nothing for as long as a silent one may be.
// gRPC does that for connections that it accepts itself. Its pings cannot: it sends none before what
// is being written is written.
void EndIfPeerTakesNothing(int connection);

// Sets message sizes, what is buffered and channel arguments.
void ConfigureTransport(grpc::ServerBuilder& builder, int64_t memory_limit_bytes);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRANSPORT_SETTINGS_H_
