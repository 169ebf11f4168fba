// What a function of client/ballast.h returned, with reason and message: as Refused in
// tests/support/messages.h.
#ifndef BALLAST_TESTS_CLIENT_C_API_C_REFUSED_H_
#define BALLAST_TESTS_CLIENT_C_API_C_REFUSED_H_

#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "client/ballast.h"
#include "cpu_optimizer_service/common/reason.h"
#include "tests/support/messages.h"

namespace ballast::client {

// By this thread's last call.
inline testing::AssertionResult Refused(int32_t returned, ballast_status code,
                                        absl::string_view reason = "") {
  const absl::Status status(static_cast<absl::StatusCode>(returned), ballast_message());
  return ballast::Refused(WithReason(status, ballast_reason()), static_cast<absl::StatusCode>(code),
                          reason);
}

}  // namespace ballast::client

#endif  // BALLAST_TESTS_CLIENT_C_API_C_REFUSED_H_
