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
// The number of errors of each code, by its number, that ToGrpc has converted in this process.
std::array<uint64_t, 17> ErrorCounts();
// The reverse, with the reason. gRPC's error for an unreachable service becomes one with the
// address and what to do.
absl::Status FromGrpc(const grpc::Status& status);
// Why no service was reached, or why the connection broke: "nothing listens there". Empty: another
// error. gRPC's own message in such a status does not help.
std::string CauseOfUnreachable(const grpc::Status& status);
// gRPC's resolved address of the last attempt: "10.0.0.1:7070". Empty: unknown.
std::string AddressTried(const grpc::Status& status);

}  // namespace ballast::proto

#endif  // BALLAST_PROTO_STATUS_H_
