#include "proto/frame.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/field_count.h"

namespace ballast::proto {
namespace {

// The wire format: https://protobuf.dev/programming-guides/encoding.
enum WireType : uint8_t {
  kVarint = 0,
  kFixed64 = 1,
  kLengthDelimited = 2,
  kStartGroup = 3,
  kEndGroup = 4,
  kFixed32 = 5,
};
constexpr int kMaxTagBytes = 5;
constexpr int kMaxVarintBytes = 10;
// Today's headers have about 30 bytes; the rest is room for fields of later versions.
constexpr size_t kMaxHeaderBytes = 64 << 10;
// Of a message to the service, without its payload. The largest is the opening of an upload with
// the update counts of 2^20 parameters.
constexpr size_t kMaxOtherBytes = size_t{10} << 20;
// Groups occur only as unknown fields. The generated code refuses 100 levels.
constexpr size_t kMaxGroupDepth = 32;

constexpr int kHeaderField = v1::GradientChunk::kHeaderFieldNumber;
constexpr int kPayloadField = v1::GradientChunk::kPayloadFieldNumber;
// MergeChunk reads both kinds of chunks by the same numbers.
static_assert(kHeaderField == v1::WeightChunk::kHeaderFieldNumber);
static_assert(kPayloadField == v1::WeightChunk::kPayloadFieldNumber);

// A position in a range of bytes that spans slices. Cheap to copy.
class Cursor {
 public:
  explicit Cursor(absl::Span<const grpc::Slice> slices) : slices_(slices) {
    for (const grpc::Slice& slice : slices) remaining_ += slice.size();
  }

  size_t position() const { return position_; }
  size_t remaining() const { return remaining_; }

  std::optional<uint8_t> NextByte() {
    if (remaining_ == 0) return std::nullopt;
    SkipToBytes();
    const uint8_t byte = slices_[slice_].begin()[offset_];
    ++offset_;
    ++position_;
    --remaining_;
    return byte;
  }

  // The next `bytes` bytes as a range of their own; `this` moves past them. nullopt if there are
  // fewer.
  std::optional<Cursor> Take(uint64_t bytes) {
    if (bytes > remaining_) return std::nullopt;
    // The copy begins where this one stood, and ends after `bytes`.
    Cursor range = *this;
    range.remaining_ = bytes;
    Walk(bytes, [](const grpc::Slice&, size_t, size_t) {});
    return range;
  }

  void AppendTo(std::string& out) const {
    Cursor(*this).Walk(remaining_, [&](const grpc::Slice& slice, size_t begin, size_t end) {
      out.append(reinterpret_cast<const char*>(slice.begin()) + begin, end - begin);
    });
  }

  void AppendTo(Payload& out) const {
    Cursor(*this).Walk(remaining_, [&](const grpc::Slice& slice, size_t begin, size_t end) {
      out.Append(slice, begin, end);
    });
  }

 private:
  void SkipToBytes() {
    // Slices may be empty. There is a byte ahead: callers have looked at remaining_.
    while (offset_ == slices_[slice_].size()) {
      ++slice_;
      offset_ = 0;
    }
  }

  // Moves over `bytes` <= remaining() bytes, calling `visit(slice, begin, end)` for each piece.
  template <typename Visit>
  void Walk(size_t bytes, const Visit& visit) {
    position_ += bytes;
    remaining_ -= bytes;
    while (bytes > 0) {
      SkipToBytes();
      const grpc::Slice& slice = slices_[slice_];
      const size_t piece = std::min(bytes, slice.size() - offset_);
      visit(slice, offset_, offset_ + piece);
      offset_ += piece;
      bytes -= piece;
    }
  }

  absl::Span<const grpc::Slice> slices_;
  size_t slice_ = 0;
  size_t offset_ = 0;    // In the slice.
  size_t position_ = 0;  // In the message.
  size_t remaining_ = 0;
};

absl::Status Malformed(absl::string_view what, const Cursor& at) {
  return absl::InvalidArgumentError(absl::StrCat(what, " at byte ", at.position()));
}

// A varint of at most `max_bytes`. Bits beyond 64 are dropped, as in the generated code.
absl::StatusOr<uint64_t> ReadVarint(Cursor& cursor, int max_bytes) {
  uint64_t value = 0;
  for (int i = 0; i < max_bytes; ++i) {
    const std::optional<uint8_t> byte = cursor.NextByte();
    if (!byte) return Malformed("truncated varint", cursor);
    value |= static_cast<uint64_t>(*byte & 0x7f) << (7 * i);
    if ((*byte & 0x80) == 0) return value;
  }
  return Malformed("varint too long", cursor);
}

struct Tag {
  uint32_t field = 0;
  uint8_t wire_type = 0;
};

absl::StatusOr<Tag> ReadTag(Cursor& cursor) {
  BALLAST_ASSIGN_OR_RETURN(const uint64_t value, ReadVarint(cursor, kMaxTagBytes));
  // A tag is a number of 32 bits. Field number 0 is not allowed.
  const uint32_t tag = static_cast<uint32_t>(value);
  if (tag != value || tag >> 3 == 0) return Malformed("field number out of range", cursor);
  return Tag{tag >> 3, static_cast<uint8_t>(tag & 7)};
}

absl::StatusOr<Cursor> TakeBytes(Cursor& cursor, uint64_t bytes) {
  std::optional<Cursor> range = cursor.Take(bytes);
  if (!range) {
    return Malformed(
        absl::StrCat("a field of ", bytes, " bytes where ", cursor.remaining(), " are left"),
        cursor);
  }
  return *range;
}

// Moves past one value that is not a group.
absl::Status SkipScalar(Cursor& cursor, uint8_t wire_type) {
  switch (wire_type) {
    case kVarint:
      return ReadVarint(cursor, kMaxVarintBytes).status();
    case kFixed64:
      return TakeBytes(cursor, 8).status();
    case kFixed32:
      return TakeBytes(cursor, 4).status();
    case kLengthDelimited: {
      // A length has at most five bytes, as in the generated parser. TakeBytes compares it with
      // what is there.
      BALLAST_ASSIGN_OR_RETURN(const uint64_t bytes, ReadVarint(cursor, kMaxTagBytes));
      return TakeBytes(cursor, bytes).status();
    }
    default:
      return Malformed("unknown wire type", cursor);
  }
}

// Moves past the value of a field whose tag has been read.
absl::Status SkipValue(Cursor& cursor, Tag tag) {
  if (tag.wire_type != kStartGroup) return SkipScalar(cursor, tag.wire_type);
  // A list, and not a recursion: the peer decides how deep groups are nested.
  std::vector<uint32_t> open = {tag.field};
  while (!open.empty()) {
    BALLAST_ASSIGN_OR_RETURN(const Tag inner, ReadTag(cursor));
    if (inner.wire_type == kStartGroup) {
      if (open.size() == kMaxGroupDepth) return Malformed("groups nested too deeply", cursor);
      open.push_back(inner.field);
    } else if (inner.wire_type == kEndGroup) {
      if (inner.field != open.back()) return Malformed("group ends that did not begin", cursor);
      open.pop_back();
    } else {
      BALLAST_RETURN_IF_ERROR(SkipScalar(cursor, inner.wire_type));
    }
  }
  return absl::OkStatus();
}

// Merges a serialized GradientChunk or WeightChunk into `chunk` and `payload`. `header_bytes` are
// those of the message's headers so far.
template <typename Chunk>
absl::Status MergeChunk(Cursor range, Chunk& chunk, Payload& payload, size_t& header_bytes) {
  while (range.remaining() > 0) {
    BALLAST_ASSIGN_OR_RETURN(const Tag tag, ReadTag(range));
    const bool known = tag.field == kHeaderField || tag.field == kPayloadField;
    if (!known || tag.wire_type != kLengthDelimited) {
      BALLAST_RETURN_IF_ERROR(SkipValue(range, tag));
      continue;
    }
    BALLAST_ASSIGN_OR_RETURN(const uint64_t bytes, ReadVarint(range, kMaxTagBytes));
    BALLAST_ASSIGN_OR_RETURN(const Cursor content, TakeBytes(range, bytes));
    if (tag.field == kPayloadField) {
      payload = Payload();  // The last payload is in force.
      content.AppendTo(payload);
      continue;
    }
    // All headers of the message count together: many small ones cost as much as a large one.
    header_bytes += bytes;
    if (header_bytes > kMaxHeaderBytes) return Malformed("header too large", content);
    // Unlike the payload, a header is copied: it is small, and may lie across slices.
    std::string header;
    content.AppendTo(header);
    if (!chunk.mutable_header()->MergeFromString(header)) {
      return Malformed("malformed header", content);
    }
  }
  return absl::OkStatus();
}

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

// Fields are parsed in the order of the wire, as in the generated parser: a message that occurs
// twice is merged, and another member of the oneof replaces the previous one. Consecutive fields
// that are not the bulk one go through the generated parser together.
template <typename Message>
class FrameParser {
 public:
  absl::StatusOr<Frame<Message>> Parse(Cursor cursor) {
    while (cursor.remaining() > 0) {
      Cursor start = cursor;
      BALLAST_ASSIGN_OR_RETURN(const Tag tag, ReadTag(cursor));
      BALLAST_RETURN_IF_ERROR(CheckBound(++fields_, kMostFields, "fields", start));
      if (tag.field == Bulk<Message>::kField && tag.wire_type == kLengthDelimited) {
        // What came before this field is merged first, since it may be another member of the oneof.
        BALLAST_RETURN_IF_ERROR(MergeOthers(start));
        BALLAST_ASSIGN_OR_RETURN(const uint64_t bytes, ReadVarint(cursor, kMaxTagBytes));
        BALLAST_ASSIGN_OR_RETURN(const Cursor content, TakeBytes(cursor, bytes));
        BALLAST_RETURN_IF_ERROR(MergeChunk(content, Bulk<Message>::Mutable(frame_.message),
                                           frame_.payload, header_bytes_));
      } else {
        BALLAST_RETURN_IF_ERROR(SkipValue(cursor, tag));
        const size_t bytes = cursor.position() - start.position();
        // The tag belongs to what the generated parser reads later.
        other_bytes_ += bytes;
        BALLAST_RETURN_IF_ERROR(
            CheckBound(other_bytes_, kMaxOtherBytes, "bytes without its payload", start));
        start.Take(bytes)->AppendTo(others_);
      }
    }
    BALLAST_RETURN_IF_ERROR(MergeOthers(cursor));
    return std::move(frame_);
  }

 private:
  absl::Status MergeOthers(const Cursor& end) {
    if (others_.empty()) return absl::OkStatus();
    // Parsing is what takes the memory, so fields are counted before it. Those at the top are
    // counted here and in Parse; the bound has room for that.
    if (Bulk<Message>::kIsToService) {
      google::protobuf::io::ArrayInputStream bytes(others_.data(),
                                                   static_cast<int>(others_.size()));
      fields_ += CountFields(*Message::descriptor(), bytes, kMostFields);
      BALLAST_RETURN_IF_ERROR(CheckBound(fields_, kMostFields, "fields", end));
    }
    if (!frame_.message.MergeFromString(others_)) return Malformed("malformed fields before", end);
    others_.clear();
    // Another member of the oneof has come after the bulk one, and takes its place with its
    // payload.
    if (static_cast<int>(frame_.message.kind_case()) != Bulk<Message>::kField) {
      frame_.payload = Payload();
    }
    return absl::OkStatus();
  }

  static absl::Status CheckBound(size_t there, size_t most, absl::string_view what,
                                 const Cursor& at) {
    // A client trusts the service that it has chosen; a service cannot trust its clients.
    if (!Bulk<Message>::kIsToService || there <= most) return absl::OkStatus();
    return Malformed(absl::StrCat("more than ", most, " ", what), at);
  }

  Frame<Message> frame_;
  std::string others_;
  size_t fields_ = 0;
  size_t header_bytes_ = 0;
  size_t other_bytes_ = 0;
};

std::string NotA(const google::protobuf::Message& message) {
  return absl::StrCat("not a ", message.GetDescriptor()->full_name());
}

absl::StatusOr<std::vector<grpc::Slice>> SlicesOf(const grpc::ByteBuffer& bytes,
                                                  const google::protobuf::Message& message) {
  std::vector<grpc::Slice> slices;
  if (!bytes.Dump(&slices).ok()) {
    return absl::InvalidArgumentError(absl::StrCat(NotA(message), ": no bytes"));
  }
  return slices;
}

template <typename Message>
absl::StatusOr<Frame<Message>> ParseFrame(const grpc::ByteBuffer& bytes) {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<grpc::Slice> slices, SlicesOf(bytes, Message()));
  absl::StatusOr<Frame<Message>> frame = FrameParser<Message>().Parse(Cursor(slices));
  if (!frame.ok()) {
    return WithReason(Annotate(frame.status(), NotA(Message())), reason::kMalformedMessage);
  }
  if (frame->payload.size_bytes() > 0) frame->payload.KeepWhole(bytes);
  return frame;
}

void AppendVarint(uint64_t value, std::string& out) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void AppendLengthDelimitedTag(int field, uint64_t bytes, std::string& out) {
  AppendVarint(static_cast<uint64_t>(field) << 3 | kLengthDelimited, out);
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

void Payload::Append(const grpc::Slice& slice, size_t begin, size_t end) {
  if (begin == end) return;
  const grpc::Slice& kept = slices_.emplace_back(slice);
  pieces_.push_back(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(kept.begin()) + begin, end - begin));
  size_bytes_ += end - begin;
}

void Payload::KeepWhole(const grpc::ByteBuffer& message) {
  message_ = std::make_unique<const grpc::ByteBuffer>(message);
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
  BALLAST_ASSIGN_OR_RETURN(const std::vector<grpc::Slice> slices, SlicesOf(bytes, message));
  std::string flat;
  Cursor(slices).AppendTo(flat);
  if (message.ParseFromString(flat)) return absl::OkStatus();
  return WithReason(absl::InvalidArgumentError(NotA(message)), reason::kMalformedMessage);
}

absl::Status ParseRequestInto(const grpc::ByteBuffer& bytes, size_t most_bytes,
                              google::protobuf::Message& message) {
  const auto refuse = [&message](absl::string_view what, absl::string_view why) {
    return WithReason(absl::InvalidArgumentError(absl::StrCat(
                          "the request is ", what, message.GetDescriptor()->full_name(), why,
                          "; send one as in ballast.proto")),
                      reason::kMalformedMessage);
  };
  // Bytes are compared first, which costs nothing; then fields are counted in the slices; only what
  // passes both is copied and parsed.
  if (bytes.Length() > most_bytes) {
    return refuse("too large for a ",
                  absl::StrCat(": it has ", bytes.Length(), " bytes, of ", most_bytes, " at most"));
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
