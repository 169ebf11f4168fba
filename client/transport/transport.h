// A session's interface to the network, so that its logic can be tested without gRPC and with
// faults. grpc_transport.h is the real implementation.
#ifndef BALLAST_CLIENT_TRANSPORT_TRANSPORT_H_
#define BALLAST_CLIENT_TRANSPORT_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/v1/jobs.pb.h"
#include "ballast/v1/state.pb.h"
#include "ballast/v1/train.pb.h"

namespace ballast::client {

// Payload bytes in pieces cut anywhere, valid only during the call that passes them.
using PayloadPieces = absl::Span<const absl::Span<const std::byte>>;

// Receives the messages of a rank's stream, from the stream's one thread, without a lock.
class TrainListener {
 public:
  virtual ~TrainListener() = default;
  // For the bulk kind `message` has only the header.
  virtual void OnMessage(const v1::TrainResponse& message, PayloadPieces payload) = 0;
  // The stream has ended, for any reason; this is the last call.
  virtual void OnClosed(const absl::Status& status) = 0;
};

// The sending side of a rank's stream: one Train call. Thread-safe; first in, first out. Sending
// neither blocks nor calls back on the caller's thread, so the caller may hold a lock. After the
// end of the stream messages are dropped.
class TrainCall {
 public:
  // Ends the stream; no listener call is running or comes after it.
  virtual ~TrainCall() = default;
  virtual void Send(const v1::TrainRequest& message) = 0;
  // The payload is borrowed, not copied. `let_go` runs once, on any thread, when the transport no
  // longer needs it. That may be after the stream is destroyed.
  virtual void SendGradient(const v1::GradientHeader& header, absl::Span<const std::byte> payload,
                            std::function<void()> let_go) = 0;
  // A gradient at its place in shared memory. Waiting ones that differ only in the chunk share one
  // message, which the service counts once for each of them.
  virtual void SendSharedGradient(const v1::GradientHeader& header) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // DEADLINE_EXCEEDED after `limit`, if there is one, or after the transport's own limit.
  virtual absl::StatusOr<v1::Job> CreateJob(const v1::CreateJobRequest& request,
                                            absl::Duration limit) = 0;
  virtual absl::StatusOr<v1::Job> GetJob(const v1::GetJobRequest& request) = 0;
  virtual absl::StatusOr<v1::AttachWorkerResponse> AttachWorker(
      const v1::AttachWorkerRequest& request, absl::Duration limit) = 0;
  virtual absl::StatusOr<v1::UndoStepResponse> UndoStep(const v1::UndoStepRequest& request) = 0;
  virtual absl::StatusOr<v1::SaveJobResponse> SaveJob(const v1::SaveJobRequest& request) = 0;
  virtual absl::StatusOr<v1::LoadJobResponse> LoadJob(const v1::LoadJobRequest& request) = 0;

  // Sends `open`, then what `fill` returns for each of `chunks`, with the step of open.first_state,
  // open.state_write or open.orthogonal_step. DEADLINE_EXCEEDED as in CreateJob.
  virtual absl::StatusOr<v1::UploadWeightsResponse> UploadWeights(
      const v1::OpenTrain& open, absl::Duration limit, absl::Span<const int> chunks,
      const std::function<std::vector<std::byte>(int chunk)>& fill) = 0;
  // Calls `place` for each arriving chunk; its first error ends the call and is returned. Returns
  // the first message, which has the step of the weights.
  virtual absl::StatusOr<v1::ReadWeightsResponse> ReadWeights(
      const v1::ReadWeightsRequest& request, absl::Duration limit,
      const std::function<absl::Status(const v1::WeightHeader& header, PayloadPieces payload)>&
          place) = 0;

  // The listener outlives the stream.
  virtual std::unique_ptr<TrainCall> OpenTrainCall(TrainListener& listener) = 0;

  // False if a broken stream means that the service is permanently gone, because both are in one
  // process. Then no call may be made.
  virtual bool CanReconnect() = 0;

  // Ends all calls above that other threads are making, and every later one, with CANCELLED.
  // Streams stay. For a session that is being destroyed.
  virtual void CancelCalls() = 0;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TRANSPORT_TRANSPORT_H_
