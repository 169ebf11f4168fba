#include "proto/message_json.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/util/json_util.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/text/printable.h"

namespace ballast::proto {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

// An object that has not ended, and the field whose value comes next in it.
struct OpenObject {
  const Descriptor* type;
  const FieldDescriptor* field;
};

// The value of a field. That of a map has keys of its own; all its values are of one field.
OpenObject Begin(const FieldDescriptor& field) {
  const Descriptor* type = field.message_type();
  return {type, field.is_map() ? type->map_value() : nullptr};
}

bool Has64Bits(const FieldDescriptor& field) {
  return field.cpp_type() == FieldDescriptor::CPPTYPE_INT64 ||
         field.cpp_type() == FieldDescriptor::CPPTYPE_UINT64;
}

// Of what protobuf wrote of a message of this type.
std::string UnquoteIntegers(absl::string_view json, const Descriptor* type) {
  std::string unquoted;
  std::vector<OpenObject> open;
  while (!json.empty()) {
    size_t length = 1;
    if (json[0] == '{') {
      open.push_back(open.empty() ? OpenObject{type, nullptr} : Begin(*open.back().field));
    } else if (json[0] == '}') {
      open.pop_back();
    } else if (json[0] == '"') {
      while (json[length] != '"') length += json[length] == '\\' ? 2 : 1;
      const absl::string_view text = json.substr(1, length - 1);
      ++length;
      OpenObject& object = open.back();
      if (json.substr(length, 1) == ":") {
        if (!object.type->options().map_entry())
          object.field = object.type->FindFieldByName(std::string(text));
      } else if (Has64Bits(*object.field)) {
        absl::StrAppend(&unquoted, text);
        json.remove_prefix(length);
        continue;
      }
    }
    absl::StrAppend(&unquoted, json.substr(0, length));
    json.remove_prefix(length);
  }
  return unquoted;
}

absl::Status FromProtobuf(const google::protobuf::util::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const absl::string_view message(status.message().data(), status.message().size());
  return absl::InvalidArgumentError(absl::StrCat("no such message: ", OneLine(message, 512)));
}

}  // namespace

absl::StatusOr<std::string> ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  const absl::Status written =
      FromProtobuf(google::protobuf::util::MessageToJsonString(message, &json, options));
  if (!written.ok()) return written;
  return UnquoteIntegers(json, message.GetDescriptor());
}

absl::Status FromJson(absl::string_view json, google::protobuf::Message& message) {
  return FromProtobuf(
      google::protobuf::util::JsonStringToMessage({json.data(), json.size()}, &message));
}

}  // namespace ballast::proto
