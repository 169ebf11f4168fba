// A session for C, and functions that several files use.
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
#include "client/session.h"
#include "client/tensors/copy_threads.h"
#include "client/tensors/gradient_giver.h"
#include "client/tensors/weight_copies.h"

struct ballast_session {
  const pid_t process = getpid();
  ballast::client::SessionOptions options;
  std::vector<void*> weights;               // By parameter.
  std::vector<std::vector<int>> chunks_of;  // By parameter: the chunks with this rank's part of it.
  std::vector<size_t> unused;               // Parameters named by the last norm or decision.
  // Until its destruction the session tells these which memory is writable again, and what has
  // arrived.
  ballast::client::CopyThreads threads;
  std::unique_ptr<ballast::client::GradientGiver> gradients;
  std::unique_ptr<ballast::client::WeightCopies> copies;  // To `weights`.
  std::unique_ptr<ballast::client::Session> session;

  ~ballast_session() {
    if (gradients != nullptr) {
      session->EndPushes();  // Otherwise its thread would wait for a silent service.
      gradients->Stop();
    }
    if (copies != nullptr) copies->Stop();  // They read the session's memory.
  }
};

namespace ballast::client {

// Before any use of gRPC. FAILED_PRECONDITION in a fork of a process that has used it.
absl::Status BeginTransport();
// INVALID_ARGUMENT for null; FAILED_PRECONDITION in a fork of the process that opened it.
absl::Status CheckSession(const ballast_session* session);
// INVALID_ARGUMENT if the chunk is not the session's rank's.
absl::StatusOr<Chunk> FindOwnChunk(const ballast_session& session, int32_t chunk);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_C_API_C_SESSION_H_
