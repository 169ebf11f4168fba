// Converts a session's options from C to C++.
#ifndef BALLAST_CLIENT_C_API_C_OPTIONS_H_
#define BALLAST_CLIENT_C_API_C_OPTIONS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/ballast.h"
#include "client/credentials.h"
#include "client/session.h"
#include "client/tensors/gradient_giver.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/step_settings.h"

namespace ballast::client {

// INVALID_ARGUMENT for values that C++ cannot express: null strings, unknown numbers. Session::Open
// checks the rest.
absl::StatusOr<SessionOptions> ReadOptions(const ballast_options& options);
// Null fields come from the environment.
Credentials ReadCredentials(const ballast_options& options);
// By parameter: whether options.rank has elements of it and it is trainable, so that pointers to it
// may not be null. Without a mesh a parameter with elements counts as every rank's.
std::vector<bool> OwnedBy(const SessionOptions& options);
// INVALID_ARGUMENT as above.
absl::StatusOr<StepSettings> ReadStep(const ballast_step& step, absl::Span<const GroupSpec> groups);
// Null: the default vote.
absl::StatusOr<StepVote> ReadBallot(const ballast_ballot* ballot,
                                    absl::Span<const GroupSpec> groups);
// What the rule lacks is 0.
ballast_hyper_parameters WriteHyperParameters(const HyperParameters& values);
absl::StatusOr<Last> ReadLast(int32_t last);
// 0 leaves `out` unchanged.
absl::Status ReadSeconds(double seconds, const char* name, absl::Duration& out);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_C_API_C_OPTIONS_H_
