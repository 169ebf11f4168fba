#include "client/tensors/stream_copy.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <vector>

namespace ballast::client {
namespace {

// Of small and large copies, wherever in a line of the cache they begin and end.
TEST(StreamCopy, CopiesTheseBytesAndNoOthers) {
  constexpr size_t kGuard = 128;
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{4096}, size_t{65535},
                             size_t{65536}, size_t{65537}, size_t{65599}, size_t{300000}}) {
    std::vector<unsigned char> from(bytes + kGuard);
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 7 + i / 251);
    for (const size_t to_offset : {0, 1, 4, 16, 63, 64}) {
      for (const size_t from_offset : {0, 2, 17}) {
        std::vector<unsigned char> to(bytes + 2 * kGuard, 0xAB), expected = to;
        std::memcpy(expected.data() + to_offset, from.data() + from_offset, bytes);
        StreamCopy(to.data() + to_offset, from.data() + from_offset, bytes);
        ASSERT_EQ(to, expected) << bytes << " bytes from " << from_offset << " to " << to_offset;
      }
    }
  }
}

}  // namespace
}  // namespace ballast::client
