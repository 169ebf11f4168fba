// JSON of the protocol's messages, for the tool's --json, the status page and the C interface.
#ifndef BALLAST_PROTO_MESSAGE_JSON_H_
#define BALLAST_PROTO_MESSAGE_JSON_H_

#include <google/protobuf/message.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast::proto {

// protobuf's JSON, indented, with the names of the .proto and with fields that are 0, false or
// empty. 64-bit integers are numbers, unlike protobuf's strings. NaN and infinities are strings,
// enumerators their names, bytes base64. Only for messages without google.protobuf.Any.
absl::StatusOr<std::string> ToJson(const google::protobuf::Message& message);

// Fills `message`. INVALID_ARGUMENT, in one line, if `json` is invalid or has an unknown field.
absl::Status FromJson(absl::string_view json, google::protobuf::Message& message);

}  // namespace ballast::proto

#endif  // BALLAST_PROTO_MESSAGE_JSON_H_
