// Settings of the process and of every channel, most of them because of measurements.
#ifndef BALLAST_SERVER_TRANSPORT_SETTINGS_H_
#define BALLAST_SERVER_TRANSPORT_SETTINGS_H_

namespace grpc {
class ServerBuilder;
}

namespace ballast::server {

// The largest bulk message is a chunk of 2^18 fp32 elements, 1 MiB. Descriptions of jobs are
// larger: 100,000 parameters with long names and their partitions stay below this.
inline constexpr int kMaxMessageBytes = 32 << 20;

// gRPC starts threads without end for services that block them. Its reflection service is the only
// one here; our own calls block none (call_pool.h). Calls beyond this get RESOURCE_EXHAUSTED.
inline constexpr int kMaxReflectionThreads = 16;

// Sets heap and logging of the process; only the first call has an effect.
void ConfigureProcessForTransport();

// Sets message sizes, threads and channel arguments.
void ConfigureTransport(grpc::ServerBuilder& builder);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRANSPORT_SETTINGS_H_
