#include "gpu_worker/base/fnv1a.h"

#include <gtest/gtest.h>

#include "absl/strings/string_view.h"

namespace ballast::worker {
namespace {

uint64_t HashOf(absl::string_view bytes) {
  Fnv1a hash;
  for (const char byte : bytes) hash.Add(static_cast<uint8_t>(byte));
  return hash.hash();
}

TEST(Fnv1a, HasTheValuesThatItsAuthorsPublished) {
  EXPECT_EQ(HashOf(""), 0xcbf29ce484222325);
  EXPECT_EQ(HashOf("a"), 0xaf63dc4c8601ec8c);
  EXPECT_EQ(HashOf("foobar"), 0x85944171f73967e8);
}

}  // namespace
}  // namespace ballast::worker
