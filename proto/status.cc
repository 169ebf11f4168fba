#include "proto/status.h"

#include <array>
#include <atomic>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/text/printable.h"
#include "google/rpc/status.pb.h"

namespace ballast::proto {
namespace {

constexpr char kDomain[] = "ballast";
// Messages and details are sent in trailers, of which peers accept 8 KiB in all by default, and a
// byte that is not printable ASCII takes three there. A shortened message arrives; one that is too
// long would lose the code too.
constexpr size_t kMaxMessageBytes = 1024;

// What gRPC, or the system through it, says of a service that cannot be reached, and what it means.
struct Cause {
  absl::string_view said;
  absl::string_view means;
};
constexpr absl::string_view kClosed =
    "the server there closed the connection: it is not ballastd, or it requires TLS or another "
    "certificate (--tls-ca, --tls-cert)";
// The first one whose words are in the message counts. The last two say least, so they come last.
constexpr Cause kCauses[] = {
    {"Connection refused", "nothing listens there"},
    {"No such file or directory", "there is no such socket"},
    {"Permission denied", "this user has no permission to connect"},
    {"DNS resolution failed", "its name cannot be resolved"},
    {"No route to host", "there is no route to it"},
    {"Network is unreachable", "there is no route to it"},
    {"before receiving SETTINGS",
     "the server there does not answer: it is not ballastd, or it hangs"},
    {"http1.x", "the server there is not ballastd"},
    {"Failed parsing HTTP/2", "the server there is not ballastd"},
    {"Received http2 header with status", "the server there is not ballastd"},
    {"timed out", "connecting took too long"},
    {"certificate verify failed",
     "its certificate is not signed by the authority in --tls-ca, or has expired"},
    {"Hostname Verification", "its certificate is for another host name"},
    {"wrong version number", "the server there does not use TLS: leave out --tls-ca"},
    {"alert certificate required", "it requires a certificate: give --tls-cert and --tls-key"},
    {"alert certificate expired", "this client's certificate has expired"},
    {"alert unknown ca", "it does not trust the authority of this client's certificate"},
    {"alert bad certificate", "it rejects this client's certificate"},
    {"Socket closed", kClosed},
    {"Connection reset", kClosed},
};

// What gRPC says of a call by itself, without the service, and what its caller can do.
constexpr Cause kOfCalls[] = {
    {"Deadline Exceeded",
     "the service did not answer before the call's deadline; it is busy or stopped, see its log"},
    {"Received message larger than max",
     "a message exceeds its receiver's limit, here 32 MiB; send less at once, or raise the "
     "client's limit (grpc.max_receive_message_length)"},
    {"Sent message larger than max", "a message exceeds the sender's limit, 32 MiB; ask for less"},
    {"Compression algorithm", "the service takes no compressed messages; send them uncompressed"},
};

constexpr absl::string_view kNotConnected = "failed to connect to all addresses";
constexpr absl::string_view kNoName = "DNS resolution failed for ";

// Of "...; last error: UNKNOWN: ADDRESS: WHY" and "DNS resolution failed for ADDRESS: WHY". Empty:
// the message names none.
std::string AddressIn(absl::string_view message) {
  constexpr absl::string_view kLast = "last error: ";
  constexpr absl::string_view kEnd = ": ";
  if (!absl::ConsumePrefix(&message, kNoName)) {
    const size_t last = message.find(kLast);
    if (last == absl::string_view::npos) return "";
    message.remove_prefix(last + kLast.size());
    const size_t code = message.find(kEnd);
    if (code == absl::string_view::npos) return "";
    message.remove_prefix(code + kEnd.size());
  }
  const size_t end = message.find(kEnd);
  if (end == absl::string_view::npos) return "";
  absl::string_view address = message.substr(0, end);
  // gRPC writes addresses as URIs, with the brackets of IPv6 escaped.
  if (!absl::ConsumePrefix(&address, "ipv4:")) absl::ConsumePrefix(&address, "ipv6:");
  return absl::StrReplaceAll(address, {{"%5B", "["}, {"%5D", "]"}});
}

std::array<std::atomic<uint64_t>, 17> error_counts = {};

// An error that gRPC itself made, in words of ours.
std::string ExplainOwn(const grpc::Status& status) {
  const std::string& message = status.error_message();
  const std::string cause = CauseOfUnreachable(status);
  if (cause.empty()) {
    if (!status.error_details().empty()) return message;
    for (const Cause& of_call : kOfCalls) {
      if (absl::StartsWith(message, of_call.said)) return std::string(of_call.means);
    }
    return message;
  }
  // A call on a connection that there was.
  if (!absl::StartsWith(message, kNotConnected) && !absl::StartsWith(message, kNoName)) {
    // A status of HTTP comes from a web server or proxy, so the address is wrong. Anything else
    // broke.
    return absl::StartsWith(message, "Received http2 header")
               ? absl::StrCat(cause, "; correct the address")
               : std::string("the connection to the service broke");
  }
  const std::string address = AddressIn(message);
  return absl::StrCat("no service answers", address.empty() ? "" : " at ", address, ": ", cause,
                      "; start ballastd there, or correct the address");
}

}  // namespace

std::array<uint64_t, 17> ErrorCounts() {
  std::array<uint64_t, 17> counts = {};
  for (size_t code = 0; code < counts.size(); ++code) counts[code] = error_counts[code];
  return counts;
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  if (const auto code = static_cast<size_t>(status.code()); code < error_counts.size()) {
    ++error_counts[code];
  }
  // Names that it quotes may have any bytes; protobuf takes only UTF-8.
  const std::string message = OneLine(status.message(), kMaxMessageBytes);
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

std::string CauseOfUnreachable(const grpc::Status& status) {
  // Ours have details.
  if (!status.error_details().empty()) return "";
  for (const Cause& cause : kCauses) {
    if (absl::StrContains(status.error_message(), cause.said)) return std::string(cause.means);
  }
  return status.error_code() == grpc::StatusCode::UNAVAILABLE ? "the connection failed" : "";
}

std::string AddressTried(const grpc::Status& status) { return AddressIn(status.error_message()); }

absl::Status FromGrpc(const grpc::Status& status) {
  // The codes of the two are the same numbers.
  absl::Status converted(static_cast<absl::StatusCode>(status.error_code()), ExplainOwn(status));
  google::rpc::Status details;
  // Details that are no google.rpc.Status are not from a service of ours.
  if (converted.ok() || !details.ParseFromString(status.error_details())) return converted;
  for (const google::protobuf::Any& detail : details.details()) {
    google::rpc::ErrorInfo info;
    // ToGrpc gives the code's name where there is no reason, so that name is none.
    const bool has_reason = detail.Is<google::rpc::ErrorInfo>() && detail.UnpackTo(&info) &&
                            info.domain() == kDomain &&
                            info.reason() != absl::StatusCodeToString(converted.code());
    if (has_reason) converted = WithReason(std::move(converted), info.reason());
  }
  return converted;
}

}  // namespace ballast::proto
