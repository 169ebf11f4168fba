// The size of a parsed message, before it is parsed: a field of two bytes may take a hundred.
#ifndef BALLAST_PROTO_FIELD_COUNT_H_
#define BALLAST_PROTO_FIELD_COUNT_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/zero_copy_stream.h>

#include <cstdint>

namespace ballast::proto {

// The fields of a serialized message of `type` that take their own memory: nested messages,
// repeated strings, and unknown fields with their contents. Stops at a number above `most`, and at
// invalid bytes.
int64_t CountFields(const google::protobuf::Descriptor& type,
                    google::protobuf::io::ZeroCopyInputStream& bytes, int64_t most);

// More than a message to the service has, apart from a job's description: overrides of each group
// are two fields.
inline constexpr int64_t kMostFields = 64 << 10;

}  // namespace ballast::proto

#endif  // BALLAST_PROTO_FIELD_COUNT_H_
