#include "cpu_optimizer_service/shard_buffer.h"

#include <gtest/gtest.h>

#include <utility>

namespace ballast {
namespace {

TEST(ShardBuffer, AnEmptyPoolGivesNullAndABufferGivenBackIsGivenOutAgain) {
  const auto pool = ShardBufferPool::Create(64, 2);
  ShardBuffer first = pool->TryTake(64);
  ShardBuffer second = pool->TryTake(32);
  EXPECT_TRUE(first);
  EXPECT_EQ(second.size_bytes(), 32);
  EXPECT_NE(first.data(), second.data());
  EXPECT_FALSE(pool->TryTake(1));
  std::byte* const released = first.data();
  first = ShardBuffer();
  EXPECT_EQ(pool->TryTake(1).data(), released);
}

TEST(ShardBuffer, LargerThanThePoolsIsNull) {
  EXPECT_FALSE(ShardBufferPool::Create(64, 2)->TryTake(65));
}

TEST(ShardBuffer, KeepsItsPoolAlive) {
  ShardBuffer buffer = ShardBufferPool::Create(64, 1)->TryTake(64);
  buffer.bytes()[63] = std::byte{1};
  ShardBuffer moved = std::move(buffer);
  EXPECT_FALSE(buffer);
  EXPECT_EQ(moved.bytes()[63], std::byte{1});
}

}  // namespace
}  // namespace ballast
