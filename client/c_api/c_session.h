// A session as C has it, and what the functions in several files ask of one.
#ifndef BALLAST_CLIENT_C_API_C_SESSION_H_
#define BALLAST_CLIENT_C_API_C_SESSION_H_

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/ballast.h"
#include "client/c_api/copy_threads.h"
#include "client/c_api/gradient_giver.h"
#include "client/c_api/weight_copies.h"
#include "client/session.h"
#include "client/transport/connection.h"

struct ballast_session {
  const pid_t process = getpid();
  ballast::client::SessionOptions options;
  std::unique_ptr<ballast::client::Connection> connection;  // For what is asked beside the session.
  std::vector<void*> weights;               // By parameter. Empty: the caller reads weights_memory.
  std::vector<std::vector<int>> chunks_of;  // By parameter: where this rank has a part of it.
  std::vector<size_t> unused;  // Parameters, as the last norm or decision has named them.
  // Until its destruction the session notifies these of what may be written to again, and of what
  // has arrived.
  ballast::client::CopyThreads threads;
  std::unique_ptr<ballast::client::GradientGiver> gradients;
  std::unique_ptr<ballast::client::WeightCopies> copies;  // To `weights`.
  std::unique_ptr<ballast::client::Session> session;

  ~ballast_session() {
    if (gradients != nullptr) {
      session->EndPushes();  // Or its thread would wait for a service that is silent.
      gradients->Stop();
    }
    if (copies != nullptr) copies->Stop();  // They read the session's memory.
  }
};

namespace ballast::client {

// INVALID_ARGUMENT for null; FAILED_PRECONDITION in a fork of the process that opened it.
absl::Status CheckSession(const ballast_session* session);
// INVALID_ARGUMENT if the chunk is not the session's rank's.
absl::StatusOr<Chunk> FindOwnChunk(const ballast_session& session, int32_t chunk);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_C_API_C_SESSION_H_
