#include "proto/status.h"

#include <gtest/gtest.h>

#include <iterator>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ballast/v1/jobs.pb.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "google/rpc/status.pb.h"
#include "tests/support/messages.h"

namespace ballast::proto {
namespace {

TEST(Status, OfEveryCodeCrossesTheWireWithErrorInfo) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "what to do");
    const grpc::Status sent = ToGrpc(status);
    EXPECT_EQ(sent.error_code(), code);
    EXPECT_EQ(FromGrpc(sent), status);

    google::rpc::Status details;
    ASSERT_TRUE(details.ParseFromString(sent.error_details()));
    EXPECT_EQ(details.code(), code);
    EXPECT_EQ(details.message(), "what to do");
    ASSERT_EQ(details.details_size(), 1);
    EXPECT_EQ(details.details(0).type_url(), "type.googleapis.com/google.rpc.ErrorInfo");
    google::rpc::ErrorInfo info;
    ASSERT_TRUE(details.details(0).UnpackTo(&info));
    EXPECT_EQ(info.domain(), "ballast");
    EXPECT_EQ(info.reason(), absl::StatusCodeToString(status.code()));
  }
}

// Messages quote names, which a peer has chosen.
TEST(Status, MessageIsOneLineOfText) {
  EXPECT_EQ(ToGrpc(absl::NotFoundError(std::string("no job 'a\n\0\x1b[31m'", 16))).error_message(),
            "no job 'a\\x0a\\x00\\x1b[31m");
  EXPECT_EQ(ToGrpc(absl::NotFoundError("\xff is no UTF-8, \u00e4")).error_message(),
            "\\xff is no UTF-8, \u00e4");
  EXPECT_EQ(ToGrpc(absl::NotFoundError("it's \"\u00e4\"")).error_message(), "it's \"\u00e4\"");
}

TEST(Status, ItsReasonCrossesTheWire) {
  const grpc::Status sent =
      ToGrpc(Annotate(WithReason(absl::AbortedError("why"), reason::kOlderGeneration), "rank 1"));
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(details.ParseFromString(sent.error_details()));
  ASSERT_TRUE(details.details(0).UnpackTo(&info));
  EXPECT_EQ(info.reason(), "OLDER_GENERATION");
  EXPECT_EQ(ReasonOf(FromGrpc(sent)), "OLDER_GENERATION");
  EXPECT_EQ(FromGrpc(sent).message(), "rank 1: why");
  EXPECT_EQ(ReasonOf(FromGrpc(ToGrpc(absl::AbortedError("why")))), "");
}

TEST(Status, EveryReasonIsOneOfTheProtocolAndTheOtherWayRound) {
  std::set<std::string> of_protocol;
  const google::protobuf::EnumDescriptor& reasons = *v1::ErrorReason_descriptor();
  for (int i = 1; i < reasons.value_count(); ++i) of_protocol.insert(reasons.value(i)->name());
  EXPECT_EQ(of_protocol, std::set<std::string>(std::begin(reason::kAll), std::end(reason::kAll)));
}

// The texts are gRPC's of each case, in which they were seen.
TEST(Status, AServiceThatCannotBeReachedIsNamedWithWhatToDo) {
  const auto expect_unavailable = [](const std::string& text) {
    EXPECT_TRUE(Refused(FromGrpc(grpc::Status(grpc::StatusCode::UNAVAILABLE, text)),
                        absl::StatusCode::kUnavailable));
  };
  const std::string all = "failed to connect to all addresses";
  for (const char* last :
       {"UNKNOWN: ipv4:127.0.0.1:7070: Failed to connect to remote host: Connection refused",
        "UNKNOWN: ipv6:%5B::1%5D:1: Failed to connect to remote host: Connection refused",
        "UNKNOWN: unix:/run/b.sock: No such file or directory",
        "UNKNOWN: unix:/run/b.sock: Permission denied",
        "UNAVAILABLE: ipv4:127.0.0.1:80: Socket closed",
        "INTERNAL: ipv4:127.0.0.1:80: Trying to connect an http1.x server",
        "UNAVAILABLE: ipv4:127.0.0.1:22: Failed parsing HTTP/2",
        "UNKNOWN: ipv4:127.0.0.1:9: connection attempt timed out before receiving SETTINGS frame",
        "UNKNOWN: ipv4:10.0.0.1:9: Failed to connect to remote host: FD Shutdown",
        "UNKNOWN: ipv4:10.0.0.1:9: connect() timed out"}) {
    expect_unavailable(all + "; last error: " + last);
  }
  expect_unavailable(
      "DNS resolution failed for nowhere.invalid:7070: C-ares status is not ARES_SUCCESS "
      "qtype=A name=nowhere.invalid is_balancer=0: Domain name not found");
  expect_unavailable(all);
  expect_unavailable("Socket closed");
  EXPECT_TRUE(Refused(FromGrpc(grpc::Status(grpc::StatusCode::UNIMPLEMENTED,
                                            "Received http2 header with status: 404")),
                      absl::StatusCode::kUnimplemented));
  // What the service says stays as it says it.
  EXPECT_EQ(FromGrpc(ToGrpc(absl::UnavailableError("Connection refused, it timed out"))).message(),
            "Connection refused, it timed out");
}

TEST(Status, WhatGrpcSaysOfACallItselfIsSaidWithWhatToDo) {
  using Code = grpc::StatusCode;
  for (const auto& [code, said] :
       {std::pair{Code::DEADLINE_EXCEEDED, "Deadline Exceeded"},
        std::pair{Code::RESOURCE_EXHAUSTED,
                  "Received message larger than max (33603586 vs. 33554432)"},
        std::pair{Code::RESOURCE_EXHAUSTED, "Sent message larger than max (4 vs. 3)"},
        std::pair{Code::UNIMPLEMENTED, "Compression algorithm 'gzip' is disabled."}}) {
    EXPECT_TRUE(Refused(FromGrpc(grpc::Status(code, said)), static_cast<absl::StatusCode>(code)));
  }
  // Of the service itself.
  EXPECT_EQ(FromGrpc(ToGrpc(absl::DeadlineExceededError("Deadline Exceeded"))).message(),
            "Deadline Exceeded");
}

TEST(Status, OkHasNoDetails) {
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok());
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).error_details().empty());
  EXPECT_TRUE(FromGrpc(grpc::Status::OK).ok());
}

TEST(Status, LongMessageIsCutBetweenCharactersSoThatItFitsInTrailers) {
  std::string message;
  for (int i = 0; i < 5000; ++i) message += "\u00e4";
  for (const size_t shift : {0, 1}) {
    const grpc::Status sent = ToGrpc(absl::InvalidArgumentError(std::string(shift, 'x') + message));
    EXPECT_LT(sent.error_message().size(), 1100);
    EXPECT_LT(3 * sent.error_message().size() + sent.error_details().size() * 4 / 3, 8000);
    google::rpc::Status details;
    EXPECT_TRUE(
        details.ParseFromString(sent.error_details()));  // Fails for bytes that are not UTF-8.
  }
}

}  // namespace
}  // namespace ballast::proto
