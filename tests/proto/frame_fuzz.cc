// Any bytes, cut into slices anywhere: the frame parser and the generated one must agree on whether
// they are a message and on its contents, except for the bounds that frame.cc sets itself.
//
// The first byte of an input selects the message type, the second the cuts between slices.
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "proto/frame.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace ballast::proto {
namespace {

std::string Bytes(const google::protobuf::MessageLite& message) {
  std::string out;
  google::protobuf::io::StringOutputStream stream(&out);
  google::protobuf::io::CodedOutputStream coded(&stream);
  coded.SetSerializationDeterministic(true);
  message.SerializeToCodedStream(&coded);
  coded.Trim();
  return out;
}

grpc::ByteBuffer Cut(const std::string& bytes, uint8_t seed) {
  std::vector<grpc::Slice> slices;
  uint32_t state = seed;
  for (size_t begin = 0; begin < bytes.size();) {
    state = state * 1664525 + 1013904223;
    const size_t end = std::min(bytes.size(), begin + 1 + (state >> 24) % (1 + seed));
    slices.emplace_back(bytes.data() + begin, end - begin);
    begin = end;
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

void Demand(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

v1::GradientChunk* Bulk(v1::TrainRequest& message) {
  return message.has_gradient() ? message.mutable_gradient() : nullptr;
}
template <typename Message>
v1::WeightChunk* Bulk(Message& message) {
  return message.has_weights() ? message.mutable_weights() : nullptr;
}

template <typename Message>
void CheckAgreement(absl::StatusOr<Frame<Message>> frame, const std::string& bytes) {
  Message expected;
  const bool valid = expected.ParseFromString(bytes);
  if (!frame.ok()) {
    Demand(frame.status().code() == absl::StatusCode::kInvalidArgument, "another code");
    Demand(!valid, "a message was refused");
    return;
  }
  Demand(valid, "what is no message was read as one");
  auto* bulk = Bulk(frame->message);
  Demand(bulk != nullptr || frame->payload.size_bytes() == 0, "payload without bulk");
  if (bulk != nullptr) {
    std::string& payload = *bulk->mutable_payload();
    Demand(payload.empty(), "payload in the message");
    payload.resize(frame->payload.size_bytes());
    frame->payload.CopyTo(reinterpret_cast<std::byte*>(payload.data()));
  }
  expected.DiscardUnknownFields();
  frame->message.DiscardUnknownFields();
  Demand(Bytes(frame->message) == Bytes(expected), "the message says something else");
}

std::string SeedInput() {
  v1::TrainRequest message;
  v1::GradientHeader& header = *message.mutable_gradient()->mutable_header();
  header.set_step(3);
  header.set_chunk(200);
  header.set_micro_step_end(2);
  header.set_final(true);
  header.set_may_guess(true);
  message.mutable_gradient()->set_payload("payload");
  v1::TrainRequest seal;
  seal.mutable_seal()->set_step(3);
  v1::Vote& vote = *seal.mutable_seal()->mutable_vote();
  vote.set_abandon(true);
  vote.mutable_clipping()->add_multipliers(0.5);
  (*vote.mutable_overrides())[1].set_lr(2);
  vote.set_trainer_state("state");
  v1::TrainRequest cast;
  cast.mutable_vote()->set_step(3);
  *cast.mutable_vote()->mutable_vote() = vote;
  v1::TrainResponse norm;
  norm.mutable_norm()->add_group_norms(1.5);
  norm.mutable_norm()->add_unused_parameters("w");
  v1::TrainResponse refused;
  refused.mutable_vote_refused()->set_reason(v1::VOTE_AGAIN);
  return std::string("\0\7", 2) + message.SerializeAsString() + seal.SerializeAsString() +
         cast.SerializeAsString() + norm.SerializeAsString() + refused.SerializeAsString();
}

void CheckInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  const grpc::ByteBuffer buffer = Cut(bytes, data[1]);
  switch (data[0] % 4) {
    case 0:
      return CheckAgreement(ParseTrainRequest(buffer), bytes);
    case 1:
      return CheckAgreement(ParseTrainResponse(buffer), bytes);
    case 2:
      return CheckAgreement(ParseUploadWeightsRequest(buffer), bytes);
    default:
      return CheckAgreement(ParseReadWeightsResponse(buffer), bytes);
  }
}

}  // namespace
}  // namespace ballast::proto

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Otherwise protobuf writes a line for each string that is not UTF-8.
  static const auto kPreviousLogHandler = google::protobuf::SetLogHandler(nullptr);
  static_cast<void>(kPreviousLogHandler);
  if (size >= 2) ballast::proto::CheckInput(data, size);
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int /*seed*/) {
  if (size < 3) {
    static const std::string& kSeed = *new std::string(ballast::proto::SeedInput());
    size = std::min(kSeed.size(), max_size);
    std::copy_n(kSeed.begin(), size, data);
  }
  return LLVMFuzzerMutate(data, size, max_size);
}
