// What is set once for the process and for every channel, because measurements asked for it.
#ifndef BALLAST_SERVER_TRANSPORT_SETTINGS_H_
#define BALLAST_SERVER_TRANSPORT_SETTINGS_H_

namespace grpc {
class ServerBuilder;
}

namespace ballast::server {

// Heap and logging of the process; the first call counts.
void ConfigureProcessForTransport();

// Message sizes and channel arguments.
void ConfigureTransport(grpc::ServerBuilder& builder);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRANSPORT_SETTINGS_H_
