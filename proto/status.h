// The only conversions between absl::Status and grpc::Status.
#ifndef BALLAST_PROTO_STATUS_H_
#define BALLAST_PROTO_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace ballast::proto {

// Same code and message, with google.rpc.ErrorInfo {domain "ballast", reason the code's name} in
// the details.
grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace ballast::proto

#endif  // BALLAST_PROTO_STATUS_H_
