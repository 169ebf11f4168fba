#include "proto/frame.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/field_count.h"

namespace ballast::proto {
namespace {

using ::google::protobuf::internal::WireFormatLite;
using ::google::protobuf::io::CodedInputStream;
using ::google::protobuf::io::CodedOutputStream;

// The longest varint of 32 bits: a length that is written with more bytes is refused, as in the
// generated parser.
constexpr int kMaxLengthBytes = 5;
// Today's headers have about 30 bytes; the rest is room for fields of later versions.
constexpr size_t kMaxHeaderBytes = 64 << 10;
// Of a message to the service, without its payload. The largest is the opening of an upload with
// the update counts of 2^20 parameters.
constexpr size_t kMaxOtherBytes = size_t{10} << 20;

constexpr int kHeaderField = v1::GradientChunk::kHeaderFieldNumber;
constexpr int kPayloadField = v1::GradientChunk::kPayloadFieldNumber;
// Both kinds of chunks have the same numbers.
static_assert(kHeaderField == v1::WeightChunk::kHeaderFieldNumber);
static_assert(kPayloadField == v1::WeightChunk::kPayloadFieldNumber);

// Which member of `Message::kind` is the bulk one. Of messages to the service what they take is
// bounded.
template <typename Message>
struct Bulk;
template <>
struct Bulk<v1::TrainRequest> {
  static constexpr bool kIsToService = true;
  static constexpr int kField = v1::TrainRequest::kGradientFieldNumber;
  static v1::GradientChunk& Mutable(v1::TrainRequest& m) { return *m.mutable_gradient(); }
};
template <>
struct Bulk<v1::TrainResponse> {
  static constexpr bool kIsToService = false;
  static constexpr int kField = v1::TrainResponse::kWeightsFieldNumber;
  static v1::WeightChunk& Mutable(v1::TrainResponse& m) { return *m.mutable_weights(); }
};
template <>
struct Bulk<v1::UploadWeightsRequest> {
  static constexpr bool kIsToService = true;
  static constexpr int kField = v1::UploadWeightsRequest::kWeightsFieldNumber;
  static v1::WeightChunk& Mutable(v1::UploadWeightsRequest& m) { return *m.mutable_weights(); }
};
template <>
struct Bulk<v1::ReadWeightsResponse> {
  static constexpr bool kIsToService = false;
  static constexpr int kField = v1::ReadWeightsResponse::kWeightsFieldNumber;
  static v1::WeightChunk& Mutable(v1::ReadWeightsResponse& m) { return *m.mutable_weights(); }
};

uint32_t BytesTag(int field) {
  return WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
}

void AppendVarint(uint32_t value, std::string& out) {
  uint8_t bytes[kMaxLengthBytes];
  const uint8_t* const end = CodedOutputStream::WriteVarint32ToArray(value, bytes);
  out.append(reinterpret_cast<const char*>(bytes), end - bytes);
}

// Takes the payloads out of a serialized message, and leaves the rest as it is to the generated
// parser: which fields, members of the oneof and payloads are in force is said there alone.
class PayloadTaker {
 public:
  // What stands in the rest for a payload: its place in `payloads`.
  using Number = uint32_t;

  PayloadTaker(grpc::ByteBuffer& bytes, int bulk_field, bool is_to_service)
      : bulk_tag_(BytesTag(bulk_field)),
        most_others_(is_to_service ? kMaxOtherBytes : std::numeric_limits<size_t>::max()),
        slices_(&bytes),
        slices_again_(&bytes) {}

  absl::Status Take(size_t bytes) {
    // So there is always a limit, and what is left up to it is known.
    in_.PushLimit(static_cast<int>(bytes));
    while (const uint32_t tag = in_.ReadTag()) {
      if (tag == bulk_tag_) {
        BALLAST_RETURN_IF_ERROR(Copy(rest, others_, most_others_, kTooManyOthers));
        BALLAST_RETURN_IF_ERROR(TakeFromChunk());
      } else if (!WireFormatLite::SkipField(&in_, tag)) {
        return Malformed("malformed field");
      }
    }
    if (!in_.ConsumedEntireMessage()) return Malformed("malformed tag");
    return Copy(rest, others_, most_others_, kTooManyOthers);
  }

  std::string rest;
  std::vector<std::vector<absl::Span<const std::byte>>> payloads;

 private:
  static constexpr char kTooManyOthers[] = "too many bytes outside its payload";

  absl::Status Malformed(absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(what, " at byte ", in_.CurrentPosition()));
  }

  // Appends what was read and neither copied nor dropped; `count` is that of all such calls.
  absl::Status Copy(std::string& out, size_t& count, size_t most, absl::string_view what) {
    const int bytes = in_.CurrentPosition() - copy_.CurrentPosition();
    count += bytes;
    if (count > most) return Malformed(what);
    const size_t before = out.size();
    out.resize(before + bytes);
    copy_.ReadRaw(out.data() + before, bytes);
    return absl::OkStatus();
  }
  void Drop() { copy_.Skip(in_.CurrentPosition() - copy_.CurrentPosition()); }

  absl::Status ReadLength(int& length) {
    const int begin = in_.CurrentPosition();
    if (in_.ReadVarintSizeAsInt(&length) && in_.CurrentPosition() - begin <= kMaxLengthBytes &&
        length <= in_.BytesUntilLimit()) {
      return absl::OkStatus();
    }
    return Malformed("a length exceeds the remaining bytes");
  }

  // Of a GradientChunk or a WeightChunk, whose length comes next.
  absl::Status TakeFromChunk() {
    int bytes = 0;
    BALLAST_RETURN_IF_ERROR(ReadLength(bytes));
    Drop();
    std::string chunk;
    const CodedInputStream::Limit outer = in_.PushLimit(bytes);
    while (const uint32_t tag = in_.ReadTag()) {
      if (tag != BytesTag(kPayloadField)) {
        if (!WireFormatLite::SkipField(&in_, tag)) return Malformed("malformed field of a chunk");
        continue;
      }
      // All headers of the message count together: many small ones cost as much as a large one.
      BALLAST_RETURN_IF_ERROR(Copy(chunk, headers_, kMaxHeaderBytes, "header too large"));
      BALLAST_RETURN_IF_ERROR(TakePayload());
      const Number number = payloads.size() - 1;
      AppendVarint(sizeof(number), chunk);
      chunk.append(reinterpret_cast<const char*>(&number), sizeof(number));
    }
    if (!in_.ConsumedEntireMessage()) return Malformed("malformed tag of a chunk");
    in_.PopLimit(outer);
    BALLAST_RETURN_IF_ERROR(Copy(chunk, headers_, kMaxHeaderBytes, "header too large"));
    AppendVarint(chunk.size(), rest);
    rest += chunk;
    return absl::OkStatus();
  }

  absl::Status TakePayload() {
    int left = 0;
    BALLAST_RETURN_IF_ERROR(ReadLength(left));
    payloads.emplace_back();
    while (left > 0) {
      const void* data = nullptr;
      int bytes = 0;
      if (!in_.GetDirectBufferPointer(&data, &bytes)) return Malformed("truncated payload");
      bytes = std::min(bytes, left);
      payloads.back().emplace_back(static_cast<const std::byte*>(data), bytes);
      in_.Skip(bytes);
      left -= bytes;
    }
    Drop();
    return absl::OkStatus();
  }

  const uint32_t bulk_tag_;
  const size_t most_others_;
  grpc::ProtoBufferReader slices_;
  grpc::ProtoBufferReader slices_again_;
  CodedInputStream in_{&slices_};
  CodedInputStream copy_{&slices_again_};  // Follows `in_`.
  size_t headers_ = 0;                     // Bytes, as of the next.
  size_t others_ = 0;
};

std::string NotA(const google::protobuf::Message& message) {
  return absl::StrCat("not a ", message.GetDescriptor()->full_name());
}

template <typename Message>
absl::Status ParseInto(std::unique_ptr<grpc::ByteBuffer> bytes, Frame<Message>& frame) {
  using Kind = Bulk<Message>;
  if (!bytes->Valid()) return absl::InvalidArgumentError("no bytes");
  const size_t size = bytes->Length();
  if (size > std::numeric_limits<int>::max()) return absl::InvalidArgumentError("too many bytes");
  PayloadTaker taker(*bytes, Kind::kField, Kind::kIsToService);
  BALLAST_RETURN_IF_ERROR(taker.Take(size));
  // Parsing is what takes the memory, so fields are counted before it. A client trusts the service
  // that it has chosen; a service cannot trust its clients. A field has at least two bytes.
  if (Kind::kIsToService && taker.rest.size() > 2 * kMostFields) {
    google::protobuf::io::ArrayInputStream rest(taker.rest.data(),
                                                static_cast<int>(taker.rest.size()));
    if (CountFields(*Message::descriptor(), rest, kMostFields) > kMostFields) {
      return absl::InvalidArgumentError(absl::StrCat("more than ", kMostFields, " fields"));
    }
  }
  if (!frame.message.ParseFromString(taker.rest)) {
    return absl::InvalidArgumentError("malformed fields");
  }
  if (static_cast<int>(frame.message.kind_case()) != Kind::kField) return absl::OkStatus();
  std::string& place = *Kind::Mutable(frame.message).mutable_payload();
  if (place.empty()) return absl::OkStatus();
  PayloadTaker::Number number = 0;
  std::memcpy(&number, place.data(), sizeof(number));
  place.clear();
  frame.payload = Payload(std::move(bytes), std::move(taker.payloads[number]));
  return absl::OkStatus();
}

template <typename Message>
absl::StatusOr<Frame<Message>> ParseFrame(const grpc::ByteBuffer& bytes) {
  Frame<Message> frame;
  // Another reference to the same slices.
  const absl::Status parsed = ParseInto(std::make_unique<grpc::ByteBuffer>(bytes), frame);
  if (parsed.ok()) return frame;
  return WithReason(Annotate(parsed, NotA(Message())), reason::kMalformedMessage);
}

void AppendLengthDelimitedTag(int field, uint64_t bytes, std::string& out) {
  AppendVarint(BytesTag(field), out);
  AppendVarint(bytes, out);
}

void RunAndDelete(void* released) {
  const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(released));
  (*owned)();
}

grpc::ByteBuffer SerializeBulk(int field, const google::protobuf::MessageLite& header,
                               absl::Span<const std::byte> payload,
                               std::function<void()> released) {
  std::string chunk;  // The serialized GradientChunk or WeightChunk, without the payload's bytes.
  AppendLengthDelimitedTag(kHeaderField, header.ByteSizeLong(), chunk);
  header.AppendToString(&chunk);
  if (!payload.empty()) AppendLengthDelimitedTag(kPayloadField, payload.size(), chunk);

  std::string front;
  AppendLengthDelimitedTag(field, chunk.size() + payload.size(), front);
  front += chunk;
  // There is no slice then by whose end gRPC could call `released`.
  if (payload.empty()) {
    released();
    const grpc::Slice slice(front);
    return grpc::ByteBuffer(&slice, 1);
  }
  const grpc::Slice slices[] = {
      grpc::Slice(front),
      // gRPC only reads the payload, although its type is not const.
      grpc::Slice(const_cast<std::byte*>(payload.data()), payload.size(), RunAndDelete,
                  std::make_unique<std::function<void()>>(std::move(released)).release()),
  };
  return grpc::ByteBuffer(slices, 2);
}

}  // namespace

Payload::Payload(std::unique_ptr<const grpc::ByteBuffer> message,
                 std::vector<absl::Span<const std::byte>> pieces)
    : message_(std::move(message)), pieces_(std::move(pieces)) {
  for (const absl::Span<const std::byte> piece : pieces_) size_bytes_ += piece.size();
}

void Payload::CopyTo(std::byte* out) const {
  for (const absl::Span<const std::byte> piece : pieces_) {
    std::memcpy(out, piece.data(), piece.size());
    out += piece.size();
  }
}

absl::StatusOr<Frame<v1::TrainRequest>> ParseTrainRequest(const grpc::ByteBuffer& bytes) {
  return ParseFrame<v1::TrainRequest>(bytes);
}
absl::StatusOr<Frame<v1::TrainResponse>> ParseTrainResponse(const grpc::ByteBuffer& bytes) {
  return ParseFrame<v1::TrainResponse>(bytes);
}
absl::StatusOr<Frame<v1::UploadWeightsRequest>> ParseUploadWeightsRequest(
    const grpc::ByteBuffer& bytes) {
  return ParseFrame<v1::UploadWeightsRequest>(bytes);
}
absl::StatusOr<Frame<v1::ReadWeightsResponse>> ParseReadWeightsResponse(
    const grpc::ByteBuffer& bytes) {
  return ParseFrame<v1::ReadWeightsResponse>(bytes);
}

absl::Status ParseInto(const grpc::ByteBuffer& bytes, google::protobuf::Message& message) {
  grpc::ByteBuffer same = bytes;  // Another reference.
  grpc::ProtoBufferReader reader(&same);
  if (reader.status().ok() && message.ParseFromZeroCopyStream(&reader)) return absl::OkStatus();
  return WithReason(absl::InvalidArgumentError(NotA(message)), reason::kMalformedMessage);
}

absl::Status ParseRequestInto(const grpc::ByteBuffer& bytes, size_t most_bytes,
                              google::protobuf::Message& message) {
  const auto refuse = [&message](absl::string_view what, absl::string_view why) {
    return WithReason(absl::InvalidArgumentError(absl::StrCat("the request is ", what,
                                                              message.GetDescriptor()->full_name(),
                                                              why, "; see proto/ballast/v1")),
                      reason::kMalformedMessage);
  };
  // Bytes are compared first, which costs nothing; then fields are counted in the slices; only what
  // passes both is copied and parsed.
  if (bytes.Length() > most_bytes) {
    return refuse("too large for a ", absl::StrCat(": it has ", bytes.Length(),
                                                   " bytes; expected at most ", most_bytes));
  }
  grpc::ByteBuffer same = bytes;  // Another reference.
  grpc::ProtoBufferReader reader(&same);
  if (reader.status().ok() &&
      CountFields(*message.GetDescriptor(), reader, kMostFields) > kMostFields) {
    return refuse("too large for a ", absl::StrCat(": it has more than ", kMostFields, " fields"));
  }
  if (!ParseInto(bytes, message).ok()) return refuse("not a ", "");
  // Unknown fields would take memory for as long as the request lives.
  message.DiscardUnknownFields();
  return absl::OkStatus();
}

grpc::ByteBuffer SerializeControl(const google::protobuf::Message& message) {
  grpc::Slice slice(message.ByteSizeLong());
  // The slice is new and nobody else's, so its bytes may be written.
  message.SerializeWithCachedSizesToArray(const_cast<uint8_t*>(slice.begin()));
  return grpc::ByteBuffer(&slice, 1);
}

grpc::ByteBuffer SerializeGradient(const v1::GradientHeader& header,
                                   absl::Span<const std::byte> payload,
                                   std::function<void()> released) {
  return SerializeBulk(Bulk<v1::TrainRequest>::kField, header, payload, std::move(released));
}
grpc::ByteBuffer SerializeTrainWeights(const v1::WeightHeader& header,
                                       absl::Span<const std::byte> payload,
                                       std::function<void()> released) {
  return SerializeBulk(Bulk<v1::TrainResponse>::kField, header, payload, std::move(released));
}
grpc::ByteBuffer SerializeUploadWeights(const v1::WeightHeader& header,
                                        absl::Span<const std::byte> payload,
                                        std::function<void()> released) {
  return SerializeBulk(Bulk<v1::UploadWeightsRequest>::kField, header, payload,
                       std::move(released));
}
grpc::ByteBuffer SerializeReadWeights(const v1::WeightHeader& header,
                                      absl::Span<const std::byte> payload,
                                      std::function<void()> released) {
  return SerializeBulk(Bulk<v1::ReadWeightsResponse>::kField, header, payload, std::move(released));
}

}  // namespace ballast::proto
