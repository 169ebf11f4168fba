// The only conversions between absl::Status and grpc::Status.
#ifndef BALLAST_PROTO_STATUS_H_
#define BALLAST_PROTO_STATUS_H_

#include <grpcpp/support/status.h>

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace ballast::proto {

// Same code and message, with google.rpc.ErrorInfo {domain "ballast", reason} in the details: the
// status's reason (common/reason.h), or the code's name if it has none.
grpc::Status ToGrpc(const absl::Status& status);
// How many errors of each code, by its number, ToGrpc has been given in this process.
std::array<uint64_t, 17> ErrorCounts();
// And back, with the reason. gRPC's own error for a service that cannot be reached becomes one that
// says where it was looked for and what to do.
absl::Status FromGrpc(const grpc::Status& status);
// Why no service was reached, or the connection to it broke: "nothing listens there". Empty: it is
// not that. gRPC's own words, which such a status has, help no reader.
std::string CauseOfUnreachable(const grpc::Status& status);
// Where that was last tried, as gRPC had resolved it: "10.0.0.1:7070". Empty: it does not say.
std::string AddressTried(const grpc::Status& status);

}  // namespace ballast::proto

#endif  // BALLAST_PROTO_STATUS_H_
