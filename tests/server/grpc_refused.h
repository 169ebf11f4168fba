// Refused (tests/support/messages.h) of what a call returned.
#ifndef BALLAST_TESTS_SERVER_GRPC_REFUSED_H_
#define BALLAST_TESTS_SERVER_GRPC_REFUSED_H_

#include <grpcpp/support/status.h>
#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "proto/status.h"
#include "tests/support/messages.h"

namespace ballast {

inline testing::AssertionResult Refused(const grpc::Status& status, absl::StatusCode code,
                                        absl::string_view reason = "") {
  return Refused(proto::FromGrpc(status), code, reason);
}

}  // namespace ballast

#endif  // BALLAST_TESTS_SERVER_GRPC_REFUSED_H_
