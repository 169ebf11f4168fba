#include "cpu_optimizer_service/common/system/heap_settings.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <cstring>
#include <memory>

namespace ballast {
namespace {

// Sanitizers bring heaps of their own.
#if !__has_feature(address_sanitizer) && !__has_feature(thread_sanitizer)
constexpr size_t kMessageBytes = size_t{31} << 20;

std::unique_ptr<char[]> Message() {
  auto message = std::unique_ptr<char[]>(new char[kMessageBytes]);
  std::memset(message.get(), 1, kMessageBytes);
  return message;
}

TEST(HeapSettings, AMessageIsNotMappedAndItsMemoryStaysWhenItIsFree) {
  KeepHeapWarm();
  const size_t mapped_bytes = mallinfo2().hblkhd;
  auto message = Message();
  EXPECT_EQ(mallinfo2().hblkhd, mapped_bytes);
  message.reset();
  EXPECT_GE(mallinfo2().fordblks, kMessageBytes);
}
#endif

}  // namespace
}  // namespace ballast
