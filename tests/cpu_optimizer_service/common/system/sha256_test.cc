#include "cpu_optimizer_service/common/system/sha256.h"

#include <gtest/gtest.h>
#include <openssl/crypto.h>

#include <cstdlib>
#include <new>
#include <string>

namespace ballast {
namespace {

constexpr char kSha256OfAbc[] = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

std::string Sha256OfAbc() {
  Sha256 sha256;
  for (const char* piece : {"a", "", "bc"}) sha256.Add(piece);
  return sha256.Hex();
}

// OpenSSL takes its memory from here, if it has taken none before.
struct CryptoMemory {
  static void* Allocate(size_t bytes, const char*, int) {
    return Fails() ? nullptr : std::malloc(bytes);
  }
  static void* Reallocate(void* memory, size_t bytes, const char*, int) {
    return Fails() ? nullptr : std::realloc(memory, bytes);
  }
  static void Free(void* memory, const char*, int) { std::free(memory); }
  static bool Fails() {
    if (left_until_failure > 0) --left_until_failure;
    return left_until_failure == 0;
  }

  static inline int left_until_failure = -1;  // Allocations until all fail; below 0: none does.
  static inline const bool set = CRYPTO_set_mem_functions(Allocate, Reallocate, Free) == 1;
};

TEST(Sha256, OfAKnownTextInPieces) { EXPECT_EQ(Sha256OfAbc(), kSha256OfAbc); }

TEST(Sha256, ThrowsWithoutMemory) {
  ASSERT_TRUE(CryptoMemory::set);
  // OpenSSL sets itself up in its first use, which is not of interest here.
  EXPECT_EQ(Sha256OfAbc(), kSha256OfAbc);
  std::string hex;
  int thrown = 0;
  while (hex.empty() && thrown < 100) {
    CryptoMemory::left_until_failure = thrown + 1;
    try {
      hex = Sha256OfAbc();
    } catch (const std::bad_alloc&) {
      ++thrown;
    }
  }
  CryptoMemory::left_until_failure = -1;
  EXPECT_EQ(hex, kSha256OfAbc);
  EXPECT_GE(thrown, 2) << "the context, and what its start takes";
}

}  // namespace
}  // namespace ballast
