#include "proto/field_count.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format.h>
#include <google/protobuf/wire_format_lite.h>

namespace ballast::proto {
namespace {

using ::google::protobuf::Descriptor;
using ::google::protobuf::FieldDescriptor;
using ::google::protobuf::internal::WireFormat;
using ::google::protobuf::internal::WireFormatLite;
using ::google::protobuf::io::CodedInputStream;

// Walks through the wire format as the generated parser does, and makes nothing of it.
class Counter {
 public:
  Counter(CodedInputStream& in, int64_t most) : in_(in), most_(most) {}

  // Up to the end of the message, or of the group that `group` begins; 0: it is none. `type` is
  // null in a group, which no message of ours has. False: there is no more to count.
  bool Count(const Descriptor* type, int group) {
    while (const uint32_t tag = in_.ReadTag()) {
      const int number = WireFormatLite::GetTagFieldNumber(tag);
      const WireFormatLite::WireType wire = WireFormatLite::GetTagWireType(tag);
      if (wire == WireFormatLite::WIRETYPE_END_GROUP) return number == group;
      const FieldDescriptor* const field = FieldOf(type, number, wire);
      if (TakesMemory(field) && ++count_ > most_) return false;
      if (!CountIn(field, number, wire, tag)) return false;
    }
    // Tag 0 is the end of the bytes, or what is no tag: ConsumedEntireMessage tells them apart.
    return group == 0 && in_.ConsumedEntireMessage();
  }

  int64_t count() const { return count_; }

 private:
  // Null: the parser keeps it as one that it does not know.
  static const FieldDescriptor* FieldOf(const Descriptor* type, int number,
                                        WireFormatLite::WireType wire) {
    const FieldDescriptor* const field =
        type == nullptr ? nullptr : type->FindFieldByNumber(number);
    if (field == nullptr) return nullptr;
    // Numbers that repeat may come packed or one by one. With any other wire type than its own the
    // parser keeps a field as an unknown one.
    const bool packed = field->is_packable() && wire == WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
    return packed || wire == WireFormat::WireTypeForFieldType(field->type()) ? field : nullptr;
  }

  static bool TakesMemory(const FieldDescriptor* field) {
    if (field == nullptr || field->message_type() != nullptr) return true;
    // Numbers take a few bytes each, and a single string takes the place of the one before it.
    return field->is_repeated() && field->cpp_type() == FieldDescriptor::CPPTYPE_STRING;
  }

  bool CountIn(const FieldDescriptor* field, int number, WireFormatLite::WireType wire,
               uint32_t tag) {
    if (wire == WireFormatLite::WIRETYPE_START_GROUP) {
      // The depth is bounded by the stream, at 100 levels, as for the generated parser.
      if (!in_.IncrementRecursionDepth() || !Count(nullptr, number)) return false;
      in_.DecrementRecursionDepth();
      return true;
    }
    if (field == nullptr || field->message_type() == nullptr) {
      return WireFormatLite::SkipField(&in_, tag);
    }
    int bytes = 0;
    if (!in_.ReadVarintSizeAsInt(&bytes) || !in_.IncrementRecursionDepth()) return false;
    const CodedInputStream::Limit outer = in_.PushLimit(bytes);
    if (!Count(field->message_type(), 0)) return false;
    in_.PopLimit(outer);
    in_.DecrementRecursionDepth();
    return true;
  }

  CodedInputStream& in_;
  const int64_t most_;
  int64_t count_ = 0;
};

}  // namespace

int64_t CountFields(const Descriptor& type, google::protobuf::io::ZeroCopyInputStream& bytes,
                    int64_t most) {
  CodedInputStream in(&bytes);
  Counter counter(in, most);
  // Whether these bytes are a message at all is for the parser to say, which comes next.
  counter.Count(&type, 0);
  return counter.count();
}

}  // namespace ballast::proto
