// The zero-copy codec of the two bulk messages, for both ends of the Train stream.
//
// A frame is an ordinary serialized TrainRequest, TrainResponse, UploadWeightsRequest or
// ReadWeightsResponse. If its kind is the bulk one (gradient, weights), the payload stays in the
// grpc::ByteBuffer's slices and only the header is parsed; every other kind is parsed whole. Any
// legal protobuf encoding is accepted: fields in any order, unknown fields skipped, the last value
// of a repeated field and the last oneof member in force.
//
//   field tag, length | header tag, length, header | payload tag, length | payload
//   `---------------------------- one slice ----------------------------' `-another-'
//
// Thread-compatible. Nothing here is copied through a protobuf string.
#ifndef BALLAST_PROTO_FRAME_H_
#define BALLAST_PROTO_FRAME_H_

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/v1/train.pb.h"

namespace ballast::proto {

// Payload bytes in pieces, cut anywhere, that live as long as this object.
class Payload {
 public:
  Payload() = default;
  // `pieces` lie in the slices of `message`.
  Payload(std::unique_ptr<const grpc::ByteBuffer> message,
          std::vector<absl::Span<const std::byte>> pieces);

  absl::Span<const absl::Span<const std::byte>> pieces() const { return pieces_; }
  size_t size_bytes() const { return size_bytes_; }
  // Copies all pieces to `out`, which has size_bytes() bytes.
  void CopyTo(std::byte* out) const;

 private:
  // The whole message rather than its slices: in gRPC 1.51 only a ByteBuffer's end frees them
  // within an ExecCtx. If a slice frees memory of an exhausted ResourceQuota without an ExecCtx, it
  // crashes.
  std::unique_ptr<const grpc::ByteBuffer> message_;
  std::vector<absl::Span<const std::byte>> pieces_;
  size_t size_bytes_ = 0;
};

// `message` is the frame without the payload: for the bulk kind, the header with an empty payload
// field.
template <typename Message>
struct Frame {
  Message message;
  Payload payload;
};

// INVALID_ARGUMENT if the bytes are not a serialized message of that type.
absl::StatusOr<Frame<v1::TrainRequest>> ParseTrainRequest(const grpc::ByteBuffer& bytes);
absl::StatusOr<Frame<v1::TrainResponse>> ParseTrainResponse(const grpc::ByteBuffer& bytes);
absl::StatusOr<Frame<v1::UploadWeightsRequest>> ParseUploadWeightsRequest(
    const grpc::ByteBuffer& bytes);
absl::StatusOr<Frame<v1::ReadWeightsResponse>> ParseReadWeightsResponse(
    const grpc::ByteBuffer& bytes);

// For a message that is not a bulk one.
grpc::ByteBuffer SerializeControl(const google::protobuf::Message& message);
// INVALID_ARGUMENT if the bytes are not a serialized message of this type.
absl::Status ParseInto(const grpc::ByteBuffer& bytes, google::protobuf::Message& message);
template <typename Message>
absl::StatusOr<Message> ParseControl(const grpc::ByteBuffer& bytes) {
  Message message;
  const absl::Status parsed = ParseInto(bytes, message);
  if (!parsed.ok()) return parsed;
  return message;
}

// The size limit of requests without a description of a job: they have names and numbers.
inline constexpr size_t kMaxRequestBytes = 64 << 10;
// The same for bytes from any peer, without unknown fields. INVALID_ARGUMENT, before anything is
// parsed, also for too many bytes or fields (field_count.h).
absl::Status ParseRequestInto(const grpc::ByteBuffer& bytes, size_t most_bytes,
                              google::protobuf::Message& message);
template <typename Message>
absl::StatusOr<Message> ParseRequest(const grpc::ByteBuffer& bytes,
                                     size_t most_bytes = kMaxRequestBytes) {
  Message message;
  const absl::Status parsed = ParseRequestInto(bytes, most_bytes, message);
  if (!parsed.ok()) return parsed;
  return message;
}

// For the bulk kind: sends `payload` without copying it. `released` runs once, on any thread, when
// gRPC no longer needs the bytes. An empty payload is omitted.
grpc::ByteBuffer SerializeGradient(const v1::GradientHeader& header,
                                   absl::Span<const std::byte> payload,
                                   std::function<void()> released);
grpc::ByteBuffer SerializeTrainWeights(const v1::WeightHeader& header,
                                       absl::Span<const std::byte> payload,
                                       std::function<void()> released);
grpc::ByteBuffer SerializeUploadWeights(const v1::WeightHeader& header,
                                        absl::Span<const std::byte> payload,
                                        std::function<void()> released);
grpc::ByteBuffer SerializeReadWeights(const v1::WeightHeader& header,
                                      absl::Span<const std::byte> payload,
                                      std::function<void()> released);

}  // namespace ballast::proto

#endif  // BALLAST_PROTO_FRAME_H_
