// How a rank finds its job: rank 0 creates it, the others wait until it exists, and each takes its
// rank.
#ifndef BALLAST_CLIENT_SESSION_JOIN_H_
#define BALLAST_CLIENT_SESSION_JOIN_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/session.h"
#include "client/transport/clock.h"
#include "client/transport/transport.h"

namespace ballast::client {

// One id for all sessions of this process, so that a session opened again does not look like
// another process: the host's name, the process id and random bits.
const std::string& DefaultProcessId();

// Creates the job if this is rank 0 and options.job_uid is empty, and attaches; errors as in
// Session::Open. UNAVAILABLE is not retried here, except for JOB_BEING_CREATED. While the service
// makes progress with the job's memory, the deadline moves on, and the log has the progress.
absl::StatusOr<v1::AttachWorkerResponse> Join(Transport& transport, Clock& clock,
                                              const SessionOptions& options, absl::Time& deadline);

// The additional time to join a large job: the service makes the job's memory and the shared
// memory, and clears page after page. Whole seconds.
absl::Duration TimeForMemory(const JobSpec& job);

// The job with this uid. NOT_FOUND if no job, or another one, has its name.
absl::StatusOr<v1::Job> GetJob(Transport& transport, const std::string& name,
                               const std::string& uid);

// Waits until every rank's first weights have arrived, and returns the job. DEADLINE_EXCEEDED names
// the ranks that are not attached. Reads the job with `get_job`.
absl::StatusOr<v1::Job> AwaitFirstWeights(const std::function<absl::StatusOr<v1::Job>()>& get_job,
                                          Clock& clock, const SessionOptions& options);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_JOIN_H_
