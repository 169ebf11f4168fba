// What is set once for the process and for every channel, because measurements asked for it.
#ifndef BALLAST_SERVER_TRANSPORT_SETTINGS_H_
#define BALLAST_SERVER_TRANSPORT_SETTINGS_H_

namespace grpc {
class ServerBuilder;
}

namespace ballast::server {

// The largest bulk message is a chunk of 2^18 fp32 elements, 1 MiB. Descriptions of jobs are
// larger: 100,000 parameters with long names and their partitions stay below this.
inline constexpr int kMaxMessageBytes = 32 << 20;

// The unary calls, ReadState and TraceJob block a thread each while they wait for a lock, a slow
// reader or the steps to trace (one trace for each job), and gRPC starts threads as calls come,
// without end. Calls beyond this get RESOURCE_EXHAUSTED. It leaves room for all ranks of a job that
// attach at once; the streams of training block no thread.
inline constexpr int kMaxCallThreads = 256;

// Heap and logging of the process; the first call counts.
void ConfigureProcessForTransport();

// Message sizes, threads and channel arguments.
void ConfigureTransport(grpc::ServerBuilder& builder);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRANSPORT_SETTINGS_H_
