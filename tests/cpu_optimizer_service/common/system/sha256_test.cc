#include "cpu_optimizer_service/common/system/sha256.h"

#include <gtest/gtest.h>

namespace ballast {
namespace {

TEST(Sha256, OfAKnownTextInPieces) {
  Sha256 sha256;
  for (const char* piece : {"a", "", "bc"}) sha256.Add(piece);
  EXPECT_EQ(sha256.Hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

}  // namespace
}  // namespace ballast
