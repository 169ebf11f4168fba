// What a session needs of the wire, behind an interface, so that its logic can be tested without
// gRPC and with faults. grpc_transport.h is the real one.
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
#include "ballast/v1/ballast.pb.h"

namespace ballast::client {

// Payload bytes in pieces cut anywhere, valid during the call that hands them over.
using PayloadPieces = absl::Span<const absl::Span<const std::byte>>;

// Hears what comes down a rank's stream, from the stream's one thread, with no lock held.
class TrainListener {
 public:
  virtual ~TrainListener() = default;
  // For the bulk kind `message` holds the header only.
  virtual void OnMessage(const v1::TrainResponse& message, PayloadPieces payload) = 0;
  // The stream has ended, for whatever reason; the last call.
  virtual void OnClosed(const absl::Status& status) = 0;
};

// The sending side of a rank's stream. Thread-safe; first in, first out. Sending neither blocks nor
// calls back on the caller's thread, so it may be done under a lock. What is sent after the end of
// the stream is dropped.
class TrainCall {
 public:
  virtual ~TrainCall() =
      default;  // Ends the stream; no listener call is running or comes after it.
  virtual void Send(const v1::TrainRequest& message) = 0;
  // The payload is borrowed, not copied. `let_go` runs once, on any thread, when the transport does
  // not need it any more; that may be after the stream is destroyed.
  virtual void SendGradient(const v1::GradientHeader& header, absl::Span<const std::byte> payload,
                            std::function<void()> let_go) = 0;
  // A gradient that lies at its place in shared memory. Those that wait together and differ in
  // nothing but the chunk go in one message, which the service counts as one for each of them.
  virtual void SendSharedGradient(const v1::GradientHeader& header) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // With a limit: DEADLINE_EXCEEDED after it, or after the transport's own.
  virtual absl::StatusOr<v1::Job> CreateJob(const v1::CreateJobRequest& request,
                                            absl::Duration limit) = 0;
  virtual absl::StatusOr<v1::Job> GetJob(const v1::GetJobRequest& request) = 0;
  virtual absl::StatusOr<v1::AttachWorkerResponse> AttachWorker(
      const v1::AttachWorkerRequest& request, absl::Duration limit) = 0;
  virtual absl::StatusOr<v1::SaveJobResponse> SaveJob(const v1::SaveJobRequest& request) = 0;
  virtual absl::StatusOr<v1::LoadJobResponse> LoadJob(const v1::LoadJobRequest& request) = 0;

  // Sends `open`, then the weights of each of `chunks` as `fill` returns them.
  virtual absl::StatusOr<v1::UploadWeightsResponse> UploadWeights(
      const v1::OpenTrain& open, absl::Span<const int> chunks,
      const std::function<std::vector<float>(int chunk)>& fill) = 0;
  // Calls `place` for each chunk that comes; its first error ends the call and is returned. Returns
  // the step at which the weights stand.
  virtual absl::StatusOr<uint64_t> ReadWeights(
      const v1::ReadWeightsRequest& request, absl::Duration limit,
      const std::function<absl::Status(const v1::WeightHeader& header, PayloadPieces payload)>&
          place) = 0;

  // The listener outlives the stream.
  virtual std::unique_ptr<TrainCall> OpenTrainCall(TrainListener& listener) = 0;

  // False if a stream that breaks means that the service is gone for good, because both are in one
  // process. No call may be made then.
  virtual bool CanReconnect() = 0;

  // Ends all calls above that are under way in other threads, and every later one, with CANCELLED;
  // streams stay. For a session that is being destroyed.
  virtual void CancelCalls() = 0;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TRANSPORT_TRANSPORT_H_
