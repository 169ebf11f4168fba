// A session's options as C gives them, and as C++ takes them.
#ifndef BALLAST_CLIENT_C_API_C_OPTIONS_H_
#define BALLAST_CLIENT_C_API_C_OPTIONS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/ballast.h"
#include "client/c_api/gradient_giver.h"
#include "client/credentials.h"
#include "client/session.h"
#include "cpu_optimizer_service/common/step_settings.h"

namespace ballast::client {

// INVALID_ARGUMENT for what C++ cannot express: null strings, unknown numbers. The rest is checked
// by Session::Open.
absl::StatusOr<SessionOptions> ReadOptions(const ballast_options& options);
// Those of the environment where a field is null.
Credentials ReadCredentials(const ballast_options& options);
// Whether options.rank has elements of a trainable parameter, so that pointers to it may not be
// null. Without a mesh a parameter with elements counts as every rank's.
bool OwnsOf(const SessionOptions& options, size_t parameter);
// INVALID_ARGUMENT as above.
absl::StatusOr<StepSettings> ReadStep(const ballast_step& step, int group_count);
// Null: the default vote.
absl::StatusOr<StepVote> ReadBallot(const ballast_ballot* ballot, int group_count);
absl::StatusOr<Last> ReadLast(int32_t last);
// 0 leaves what `out` has.
absl::Status ReadSeconds(double seconds, const char* name, absl::Duration& out);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_C_API_C_OPTIONS_H_
