#include "proto/frame.h"

#include <gmock/gmock.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/support/messages.h"

namespace ballast::proto {
namespace {

using ::google::protobuf::util::MessageDifferencer;

grpc::ByteBuffer OneSlice(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// `bytes` in slices that end at `cuts`, ascending.
grpc::ByteBuffer CutAt(const std::string& bytes, std::vector<size_t> cuts) {
  cuts.push_back(bytes.size());
  std::vector<grpc::Slice> slices;
  size_t begin = 0;
  for (const size_t cut : cuts) {
    slices.emplace_back(bytes.data() + begin, cut - begin);
    begin = cut;
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::string BytesOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

std::string BytesOf(const Payload& payload) {
  std::string bytes(payload.size_bytes(), '\0');
  payload.CopyTo(reinterpret_cast<std::byte*>(bytes.data()));
  return bytes;
}

absl::Span<const std::byte> AsBytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

std::string SomePayload(size_t size) {
  std::string payload(size, '\0');
  for (size_t i = 0; i < size; ++i) payload[i] = static_cast<char>(i * 37 + 1);
  return payload;
}

v1::TrainRequest GradientMessage(const std::string& payload) {
  v1::TrainRequest message;
  v1::GradientHeader& header = *message.mutable_gradient()->mutable_header();
  header.set_step(300);
  header.set_chunk(7);
  header.set_micro_step_begin(1);
  header.set_micro_step_end(2);
  header.set_final(true);
  message.mutable_gradient()->set_payload(payload);
  return message;
}

// The generated parser's message of `bytes`, without unknown fields; nullopt if it refuses them.
std::optional<v1::TrainRequest> Generated(const std::string& bytes) {
  v1::TrainRequest message;
  if (!message.ParseFromString(bytes)) return std::nullopt;
  message.DiscardUnknownFields();
  return message;
}

// The frame as one message, with its payload.
v1::TrainRequest Whole(Frame<v1::TrainRequest> frame) {
  EXPECT_TRUE(!frame.message.has_gradient() || frame.message.gradient().payload().empty());
  if (frame.payload.size_bytes() > 0) {
    frame.message.mutable_gradient()->set_payload(BytesOf(frame.payload));
  }
  frame.message.DiscardUnknownFields();
  return std::move(frame.message);
}

void ExpectReadAsGenerated(const std::string& bytes) {
  const std::optional<v1::TrainRequest> expected = Generated(bytes);
  ASSERT_TRUE(expected.has_value());
  absl::StatusOr<Frame<v1::TrainRequest>> frame = ParseTrainRequest(OneSlice(bytes));
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_TRUE(MessageDifferencer::Equals(Whole(*std::move(frame)), *expected))
      << expected->DebugString();
}

// One length-delimited field.
std::string Field(int number, const std::string& content) {
  std::string out;
  {
    google::protobuf::io::StringOutputStream stream(&out);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.WriteTag(number << 3 | 2);
    coded.WriteVarint32(content.size());
    coded.WriteString(content);
  }
  return out;
}

TEST(Frame, ReadsWhatGeneratedCodeWrote) {
  const v1::TrainRequest message = GradientMessage(SomePayload(1000));
  absl::StatusOr<Frame<v1::TrainRequest>> frame =
      ParseTrainRequest(OneSlice(message.SerializeAsString()));
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->payload.size_bytes(), 1000);
  EXPECT_TRUE(MessageDifferencer::Equals(Whole(*std::move(frame)), message));
}

TEST(Frame, IsReadByGeneratedCode) {
  const v1::TrainRequest message = GradientMessage(SomePayload(1000));
  bool released = false;
  {
    const grpc::ByteBuffer bytes =
        SerializeGradient(message.gradient().header(), AsBytes(message.gradient().payload()),
                          [&] { released = true; });
    v1::TrainRequest read;
    ASSERT_TRUE(read.ParseFromString(BytesOf(bytes)));
    EXPECT_TRUE(MessageDifferencer::Equals(read, message));
    EXPECT_FALSE(released);
  }
  EXPECT_TRUE(released);
}

TEST(Frame, OfEachBulkMessageIsReadByGeneratedCodeAndBack) {
  v1::WeightHeader header;
  header.set_step(9);
  header.set_chunk(3);
  const std::string payload = SomePayload(600);
  const auto nothing = [] {};
  {
    v1::TrainResponse expected;
    *expected.mutable_weights()->mutable_header() = header;
    const grpc::ByteBuffer bytes = SerializeTrainWeights(header, AsBytes(payload), nothing);
    absl::StatusOr<Frame<v1::TrainResponse>> frame = ParseTrainResponse(bytes);
    ASSERT_TRUE(frame.ok()) << frame.status();
    EXPECT_TRUE(MessageDifferencer::Equals(frame->message, expected));
    EXPECT_EQ(BytesOf(frame->payload), payload);
    expected.mutable_weights()->set_payload(payload);
    EXPECT_EQ(BytesOf(bytes), expected.SerializeAsString());
  }
  {
    v1::UploadWeightsRequest expected;
    *expected.mutable_weights()->mutable_header() = header;
    const grpc::ByteBuffer bytes = SerializeUploadWeights(header, AsBytes(payload), nothing);
    absl::StatusOr<Frame<v1::UploadWeightsRequest>> frame = ParseUploadWeightsRequest(bytes);
    ASSERT_TRUE(frame.ok()) << frame.status();
    EXPECT_TRUE(MessageDifferencer::Equals(frame->message, expected));
    EXPECT_EQ(BytesOf(frame->payload), payload);
    expected.mutable_weights()->set_payload(payload);
    EXPECT_EQ(BytesOf(bytes), expected.SerializeAsString());
  }
  {
    v1::ReadWeightsResponse expected;
    *expected.mutable_weights()->mutable_header() = header;
    const grpc::ByteBuffer bytes = SerializeReadWeights(header, AsBytes(payload), nothing);
    absl::StatusOr<Frame<v1::ReadWeightsResponse>> frame = ParseReadWeightsResponse(bytes);
    ASSERT_TRUE(frame.ok()) << frame.status();
    EXPECT_TRUE(MessageDifferencer::Equals(frame->message, expected));
    EXPECT_EQ(BytesOf(frame->payload), payload);
    expected.mutable_weights()->set_payload(payload);
    EXPECT_EQ(BytesOf(bytes), expected.SerializeAsString());
  }
}

TEST(Frame, ControlMessagesGoThroughWhole) {
  v1::TrainRequest message;
  message.mutable_begin_step()->set_step(5);
  (*message.mutable_begin_step()->mutable_overrides())[1].set_lr(0.25);
  absl::StatusOr<Frame<v1::TrainRequest>> frame = ParseTrainRequest(SerializeControl(message));
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_TRUE(MessageDifferencer::Equals(frame->message, message));
  EXPECT_EQ(frame->payload.size_bytes(), 0);
}

TEST(Frame, EmptyPayloadIsLeftOutAndReleasedAtOnce) {
  v1::GradientHeader header;
  header.set_empty(true);
  int released = 0;
  const grpc::ByteBuffer bytes = SerializeGradient(header, {}, [&] { ++released; });
  EXPECT_EQ(released, 1);
  v1::TrainRequest expected;
  expected.mutable_gradient()->mutable_header()->set_empty(true);
  EXPECT_EQ(BytesOf(bytes), expected.SerializeAsString());
}

TEST(Frame, CutAtEveryTwoOffsetsReadsTheSame) {
  const v1::TrainRequest message = GradientMessage(SomePayload(64));
  const std::string bytes = message.SerializeAsString();
  for (size_t first = 0; first <= bytes.size(); ++first) {
    for (size_t second = first; second <= bytes.size(); ++second) {
      absl::StatusOr<Frame<v1::TrainRequest>> frame =
          ParseTrainRequest(CutAt(bytes, {first, second}));
      ASSERT_TRUE(frame.ok()) << first << " " << second << " " << frame.status();
      ASSERT_TRUE(MessageDifferencer::Equals(Whole(*std::move(frame)), message))
          << first << " " << second;
    }
  }
}

TEST(Frame, OfOneByteSlicesReadsTheSame) {
  const v1::TrainRequest message = GradientMessage(SomePayload(300));
  std::string bytes = message.SerializeAsString();
  // gRPC joins slices that it has copied or that share an owner, so each of these is its own.
  std::vector<grpc::Slice> slices;
  for (char& byte : bytes) slices.emplace_back(&byte, 1, [](void*) {});
  absl::StatusOr<Frame<v1::TrainRequest>> frame =
      ParseTrainRequest(grpc::ByteBuffer(slices.data(), slices.size()));
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->payload.pieces().size(), 300);
  EXPECT_TRUE(MessageDifferencer::Equals(Whole(*std::move(frame)), message));
}

TEST(Frame, TruncatedAnywhereIsInvalid) {
  const std::string bytes = GradientMessage(SomePayload(200)).SerializeAsString();
  for (size_t size = 1; size < bytes.size(); ++size) {
    ASSERT_EQ(ParseTrainRequest(OneSlice(bytes.substr(0, size))).status().code(),
              absl::StatusCode::kInvalidArgument)
        << size;
  }
  EXPECT_TRUE(Refused(ParseTrainRequest(OneSlice(bytes.substr(0, 1))),
                      absl::StatusCode::kInvalidArgument, reason::kMalformedMessage));
}

TEST(Frame, PayloadIsNotCopied) {
  const std::string payload = SomePayload(5000);
  v1::GradientHeader header;
  header.set_chunk(1);
  const grpc::ByteBuffer bytes = SerializeGradient(header, AsBytes(payload), [] {});
  absl::StatusOr<Frame<v1::TrainRequest>> frame = ParseTrainRequest(bytes);
  ASSERT_TRUE(frame.ok()) << frame.status();
  ASSERT_EQ(frame->payload.pieces().size(), 1);
  EXPECT_EQ(frame->payload.pieces()[0].data(), AsBytes(payload).data());
}

TEST(Frame, PayloadOutlivesItsByteBuffer) {
  const std::string payload = SomePayload(5000);
  bool released = false;
  {
    Payload kept;
    {
      grpc::ByteBuffer bytes =
          SerializeGradient(v1::GradientHeader(), AsBytes(payload), [&] { released = true; });
      absl::StatusOr<Frame<v1::TrainRequest>> frame = ParseTrainRequest(bytes);
      ASSERT_TRUE(frame.ok()) << frame.status();
      kept = std::move(frame->payload);
    }
    EXPECT_FALSE(released);
    EXPECT_EQ(BytesOf(kept), payload);
  }
  EXPECT_TRUE(released);
}

// A slice that ends otherwise, while the ResourceQuota that it is of is used up, ends the process.
TEST(Frame, SlicesEndWithTheirByteBuffer) {
  v1::TrainRequest header;
  header.mutable_gradient()->mutable_header()->set_chunk(1);
  // The payload's slice is the first, so the order says which end freed the slices.
  const std::string parts[] = {Field(3, Field(2, SomePayload(5000))), header.SerializeAsString()};
  struct Ending {
    int part;
    std::vector<int>& ended;
  };
  std::vector<int> ended;
  Ending endings[] = {{0, ended}, {1, ended}};
  const auto note = [](void* ending) {
    static_cast<Ending*>(ending)->ended.push_back(static_cast<Ending*>(ending)->part);
  };
  const auto parse = [&] {
    std::vector<grpc::Slice> slices;
    for (Ending& ending : endings) {
      const std::string& part = parts[ending.part];
      slices.emplace_back(const_cast<char*>(part.data()), part.size(), note, &ending);
    }
    return ParseTrainRequest(grpc::ByteBuffer(slices.data(), slices.size())).value();
  };
  {
    const Frame<v1::TrainRequest> frame = parse();
    ASSERT_EQ(frame.payload.size_bytes(), 5000);
    EXPECT_TRUE(ended.empty());
  }
  EXPECT_EQ(ended, (std::vector<int>{0, 1}));
  ended.clear();
  Frame<v1::TrainRequest> frame = parse();
  frame.payload = Payload();
  EXPECT_EQ(ended, (std::vector<int>{0, 1}));
}

TEST(Frame, FieldsInAnyOrderReadTheSame) {
  const v1::TrainRequest message = GradientMessage(SomePayload(50));
  const std::string header = Field(1, message.gradient().header().SerializeAsString());
  const std::string payload = Field(2, message.gradient().payload());
  ExpectReadAsGenerated(Field(3, payload + header));
  ExpectReadAsGenerated(Field(3, payload) + Field(3, header));
  // The last payload and the last value of a header's field are in force.
  v1::GradientHeader other;
  other.set_step(4);
  const std::string other_header = Field(1, other.SerializeAsString());
  ExpectReadAsGenerated(Field(3, header + payload + other_header + Field(2, "later")));
  ExpectReadAsGenerated(Field(3, header + payload) + Field(3, Field(2, "")));
}

TEST(Frame, UnknownFieldsAreSkipped) {
  const std::string unknown = Field(99, "text") +
                              std::string("\xc0\x3e\x96\x01", 4) +                  // 1000: varint
                              std::string("\xc1\x3e\1\2\3\4\5\6\7\x8", 10) +        // fixed64
                              std::string("\xc5\x3e\1\2\3\4", 6) +                  // fixed32
                              std::string("\xc3\x3e\x08\x01\x0b\x0c\xc4\x3e", 8) +  // groups
                              std::string("\x08\x05", 2);  // Field 1 with another wire type.
  const v1::TrainRequest message = GradientMessage(SomePayload(50));
  const std::string header = Field(1, message.gradient().header().SerializeAsString());
  const std::string payload = Field(2, message.gradient().payload());
  ExpectReadAsGenerated(unknown + Field(3, unknown + header + unknown + payload + unknown) +
                        unknown);
  ExpectReadAsGenerated(unknown);
}

TEST(Frame, LastMemberOfTheOneofWins) {
  const std::string gradient = GradientMessage(SomePayload(50)).SerializeAsString();
  v1::TrainRequest seal_message;
  seal_message.mutable_seal()->set_step(8);
  const std::string seal = seal_message.SerializeAsString();
  ExpectReadAsGenerated(gradient + seal);
  ExpectReadAsGenerated(seal + gradient);
  ExpectReadAsGenerated(gradient + seal + Field(3, Field(2, "after")));
  const absl::StatusOr<Frame<v1::TrainRequest>> frame =
      ParseTrainRequest(OneSlice(gradient + seal));
  ASSERT_TRUE(frame.ok());
  EXPECT_TRUE(frame->message.has_seal());
  EXPECT_EQ(frame->payload.size_bytes(), 0);
}

TEST(Frame, HostileBytesAreInvalid) {
  const std::vector<std::string> hostile = {
      std::string("\x1a\xff\xff\xff\xff\x0f", 6),          // A gradient of 4 GiB.
      std::string("\x1a\xff\xff\xff\xff\xff\x01", 7),      // A length of six bytes.
      std::string("\x1a\x06\x12\xff\xff\xff\xff\x07", 8),  // A payload of 2 GiB.
      std::string("\x1a\x02\x12\x05", 4) + "hello",        // A payload past its chunk.
      std::string("\x00\x01", 2),                          // Field number 0.
      std::string("\x02\x00", 2),
      std::string("\x1c", 1),                  // An end of a group that did not begin.
      std::string("\x1e\x00", 2),              // Wire type 6.
      std::string("\x1b\x24", 2),              // The end of another group.
      std::string("\x80\x80\x80\x80\x80", 5),  // A tag without end.
      std::string("\x1a\x03\x0a\x01\x08", 5),  // A header cut short.
      std::string("\x0a\x03\x0a\x01\xff", 5),  // A job name that is not UTF-8.
      std::string(1000, '\x0b'),               // Nested groups, too deep.
  };
  for (const std::string& bytes : hostile) {
    EXPECT_EQ(ParseTrainRequest(OneSlice(bytes)).status().code(),
              absl::StatusCode::kInvalidArgument)
        << testing::PrintToString(bytes);
    EXPECT_FALSE(Generated(bytes).has_value()) << testing::PrintToString(bytes);
  }
}

TEST(Frame, HeaderBeyondItsBoundIsInvalid) {
  const std::string bytes = Field(3, Field(1, Field(99, std::string(70 << 10, 'x'))));
  EXPECT_EQ(ParseTrainRequest(OneSlice(bytes)).status().code(), absl::StatusCode::kInvalidArgument);
}

// What two bytes say takes a hundred when it is parsed.
TEST(Frame, OfManyFieldsIsInvalidBeforeTheyAreParsed) {
  std::string unknown;
  while (unknown.size() < (size_t{256} << 10)) unknown += Field(15, "");
  std::string headers;
  while (headers.size() < (size_t{256} << 10))
    headers += Field(1, Field(15, std::string(1000, 'x')));
  std::string chunks;
  while (chunks.size() < (size_t{256} << 10)) chunks += Field(3, "");
  for (const std::string& bytes :
       {unknown, Field(2, unknown), Field(2, Field(4, unknown)), Field(3, headers), chunks}) {
    EXPECT_EQ(ParseTrainRequest(OneSlice(bytes)).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(ParseUploadWeightsRequest(OneSlice(unknown)).status().code(),
            absl::StatusCode::kInvalidArgument);
  // What comes from the service is as it says.
  EXPECT_TRUE(ParseTrainResponse(OneSlice(unknown)).ok());
}

TEST(Frame, OfManyBytesBesideItsPayloadIsInvalid) {
  v1::UploadWeightsRequest message;
  v1::FirstState& state = *message.mutable_open()->mutable_first_state();
  state.mutable_update_counts()->Resize(1 << 20, 1);
  EXPECT_TRUE(ParseUploadWeightsRequest(OneSlice(message.SerializeAsString())).ok());
  state.mutable_update_counts()->Resize(3 << 19, 1);
  EXPECT_TRUE(Refused(ParseUploadWeightsRequest(OneSlice(message.SerializeAsString())),
                      absl::StatusCode::kInvalidArgument, reason::kMalformedMessage));
}

TEST(Frame, OfNoBytesIsAnEmptyMessage) {
  const absl::StatusOr<Frame<v1::TrainRequest>> frame = ParseTrainRequest(OneSlice(""));
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->message.kind_case(), v1::TrainRequest::KIND_NOT_SET);
  EXPECT_EQ(ParseTrainRequest(grpc::ByteBuffer()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ControlMessage, RoundTripsAndRefusesOtherBytes) {
  v1::ReadWeightsRequest request;
  request.set_name("jobs/a");
  request.add_chunks(4);
  const absl::StatusOr<v1::ReadWeightsRequest> read =
      ParseControl<v1::ReadWeightsRequest>(SerializeControl(request));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(MessageDifferencer::Equals(*read, request));
  EXPECT_EQ(ParseControl<v1::ReadWeightsRequest>(OneSlice("\x0a\x7f")).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ControlMessage, OfAnyCallerIsBoundedAndHasOnlyTheFieldsThatThereAre) {
  v1::GetJobRequest request;
  request.set_name("jobs/a");
  const std::string bytes = request.SerializeAsString() + Field(15, "x");
  const absl::StatusOr<v1::GetJobRequest> read = ParseRequest<v1::GetJobRequest>(OneSlice(bytes));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->SerializeAsString(), request.SerializeAsString());
  const auto expect_refused = [](const std::string& refused, size_t most_bytes) {
    EXPECT_TRUE(Refused(ParseRequest<v1::GetJobRequest>(OneSlice(refused), most_bytes),
                        absl::StatusCode::kInvalidArgument, reason::kMalformedMessage));
  };
  const std::string large = Field(15, std::string(kMaxRequestBytes, 'x'));
  expect_refused(large, kMaxRequestBytes);
  std::string many;
  for (int i = 0; i < 70000; ++i) many += Field(15, "");
  expect_refused(many, size_t{1} << 20);
  expect_refused("\x0a\x7f", kMaxRequestBytes);
}

}  // namespace
}  // namespace ballast::proto
