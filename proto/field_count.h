// What a message takes once it is parsed, before it is parsed: two bytes are enough for a field
// that takes a hundred.
#ifndef BALLAST_PROTO_FIELD_COUNT_H_
#define BALLAST_PROTO_FIELD_COUNT_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/zero_copy_stream.h>

#include <cstdint>

namespace ballast::proto {

// The fields of a serialized message of `type` that take memory of their own: messages within it,
// strings that repeat, and all that `type` does not have, with what is in them. Stops at a number
// above `most`, and where the bytes are no message.
int64_t CountFields(const google::protobuf::Descriptor& type,
                    google::protobuf::io::ZeroCopyInputStream& bytes, int64_t most);

// More than a message to the service has, a description of a job aside: overrides of each group are
// two fields.
inline constexpr int64_t kMostFields = 64 << 10;

}  // namespace ballast::proto

#endif  // BALLAST_PROTO_FIELD_COUNT_H_
