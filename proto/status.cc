#include "proto/status.h"

#include <string>

#include "absl/strings/cord.h"
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

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::string message = Shortened(status.message());
  google::rpc::ErrorInfo info;
  info.set_reason(absl::StatusCodeToString(status.code()));
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
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace ballast::proto
