// How a rank finds its job: rank 0 creates it, the others wait until it is there, all take their
// rank.
#ifndef BALLAST_CLIENT_JOIN_H_
#define BALLAST_CLIENT_JOIN_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/session.h"
#include "client/transport.h"

namespace ballast::client {

// Waits between attempts: 20 ms, doubled up to 1 s, never past the deadline.
class Backoff {
 public:
  Backoff(Clock& clock, absl::Time deadline) : clock_(clock), deadline_(deadline) {}
  // False, without waiting, if the deadline has passed.
  bool Wait();
  // The same for those who wait in their own way: how long; zero if the deadline has passed.
  absl::Duration Next();
  absl::Duration left() const { return deadline_ - clock_.Now(); }

 private:
  Clock& clock_;
  const absl::Time deadline_;
  absl::Duration next_ = absl::Milliseconds(20);
};

// One process id for all sessions of this process, so that a session opened again does not look
// like another process: host, pid and random bits.
const std::string& DefaultProcessId();

// Creates the job if this is rank 0, and attaches; errors as in Session::Open.
absl::StatusOr<v1::AttachWorkerResponse> Join(Transport& transport, Clock& clock,
                                              const SessionOptions& options, absl::Time deadline);

// Returns when every rank's first weights have come. DEADLINE_EXCEEDED names the ranks not
// attached.
absl::Status AwaitFirstWeights(Transport& transport, Clock& clock, const SessionOptions& options);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_JOIN_H_
