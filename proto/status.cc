#include "proto/status.h"

#include <google/protobuf/stubs/common.h>

#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/reason.h"
#include "google/rpc/status.pb.h"

namespace ballast::proto {
namespace {

constexpr char kDomain[] = "ballast";
// Messages and details are sent in trailers, of which peers accept 8 KiB in all by default, and a
// byte that is not printable ASCII takes three there. A shortened message arrives; one that is too
// long would lose the code too.
constexpr size_t kMaxMessageBytes = 1024;

std::string Shortened(absl::string_view message) {
  if (message.size() <= kMaxMessageBytes) return std::string(message);
  size_t end = kMaxMessageBytes;
  while (end > 0 && (static_cast<uint8_t>(message[end]) & 0xc0) == 0x80)
    --end;  // Does not cut a UTF-8 character.
  return std::string(message.substr(0, end)) + "...";
}

// Without line ends, terminal sequences and the like, which names that are quoted may have; and as
// UTF-8, as protobuf wants it.
std::string OneLine(absl::string_view message) {
  const bool is_utf8 = google::protobuf::internal::IsStructurallyValidUTF8(
      message.data(), static_cast<int>(message.size()));
  std::string line;
  line.reserve(message.size());
  for (const unsigned char c : message) {
    if (c < 0x20 || c == 0x7f || (c >= 0x80 && !is_utf8)) {
      absl::StrAppend(&line, "\\x", absl::Hex(c, absl::kZeroPad2));
    } else {
      line.push_back(static_cast<char>(c));
    }
  }
  return line;
}

// gRPC's "failed to connect to all addresses; last error: UNKNOWN: ADDRESS: Failed to connect to
// remote host: WHY", as one line that says what to do; any other text as it is.
std::string ExplainUnreachable(const std::string& message) {
  constexpr absl::string_view kLast = "last error: ";
  constexpr absl::string_view kBetween = ": Failed to connect to remote host: ";
  if (!absl::StartsWith(message, "failed to connect to all addresses")) return message;
  absl::string_view rest = message;
  const size_t last = rest.find(kLast);
  if (last != absl::string_view::npos) rest.remove_prefix(last + kLast.size());
  if (!absl::ConsumePrefix(&rest, "UNKNOWN: ")) absl::ConsumePrefix(&rest, "UNAVAILABLE: ");
  const size_t between = rest.find(kBetween);
  if (between == absl::string_view::npos) {
    return absl::StrCat("no service answers (", rest, "); start ballastd, or correct its address");
  }
  absl::string_view address = rest.substr(0, between);
  if (!absl::ConsumePrefix(&address, "ipv4:")) absl::ConsumePrefix(&address, "ipv6:");
  return absl::StrCat("no service answers at ", address, " (",
                      rest.substr(between + kBetween.size()),
                      "); start ballastd there, or correct the address");
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::string message = Shortened(OneLine(status.message()));
  google::rpc::ErrorInfo info;
  const std::string reason = ReasonOf(status);
  info.set_reason(reason.empty() ? absl::StatusCodeToString(status.code()) : reason);
  info.set_domain(kDomain);
  google::rpc::Status details;
  details.set_code(status.raw_code());
  details.set_message(message);
  details.add_details()->PackFrom(info);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message,
                      details.SerializeAsString());
}

absl::Status FromGrpc(const grpc::Status& status) {
  // The codes of the two are the same numbers.
  absl::Status converted(static_cast<absl::StatusCode>(status.error_code()),
                         ExplainUnreachable(status.error_message()));
  google::rpc::Status details;
  if (converted.ok() || !details.ParseFromString(status.error_details())) return converted;
  for (const google::protobuf::Any& detail : details.details()) {
    google::rpc::ErrorInfo info;
    const bool has_reason = detail.Is<google::rpc::ErrorInfo>() && detail.UnpackTo(&info) &&
                            info.domain() == kDomain &&
                            info.reason() != absl::StatusCodeToString(converted.code());
    if (has_reason) converted = WithReason(std::move(converted), info.reason());
  }
  return converted;
}

}  // namespace ballast::proto
