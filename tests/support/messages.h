// The texts of a component's errors, which stand in one golden file beside its tests.
//
//   EXPECT_TRUE(Refused(session.Push({}), absl::StatusCode::kInvalidArgument));
//   EXPECT_TRUE(Refused(engine.FindJob("gtp"), absl::StatusCode::kNotFound, reason::kNoSuchJob));
//   EXPECT_TRUE(Says(outcome.skip_reason));
//
// A test says code and reason. The whole message is compared with the test's next line in
// tests/COMPONENT/messages.txt: "Suite.Test: message". What differs from run to run is masked
// there: ports, temporary paths, uids, times. So are a job's bytes, which change with the code.
// After a message was reworded, one run with BALLAST_UPDATE_GOLDEN=1 in the environment, from the
// root, writes the lines of the tests that run.
// From one thread at a time, and not of messages that depend on who is faster.
#ifndef BALLAST_TESTS_SUPPORT_MESSAGES_H_
#define BALLAST_TESTS_SUPPORT_MESSAGES_H_

#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast {

// "": it has no reason.
testing::AssertionResult Refused(const absl::Status& status, absl::StatusCode code,
                                 absl::string_view reason = "");
template <typename T>
testing::AssertionResult Refused(const absl::StatusOr<T>& result, absl::StatusCode code,
                                 absl::string_view reason = "") {
  return Refused(result.status(), code, reason);
}

// For a text without a code.
testing::AssertionResult Says(absl::string_view text);

}  // namespace ballast

#endif  // BALLAST_TESTS_SUPPORT_MESSAGES_H_
