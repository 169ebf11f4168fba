#include "cpu_optimizer_service/gradients/weight_buffer.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

namespace ballast {
namespace {

TEST(WeightBuffer, AnEmptyPoolGivesNullAndABufferGivenBackIsGivenOutAgain) {
  const auto pool = WeightBufferPool::Create(64, 2);
  WeightBuffer first = pool->TryTake(64);
  WeightBuffer second = pool->TryTake(32);
  EXPECT_TRUE(first);
  EXPECT_EQ(second.size_bytes(), 32);
  EXPECT_NE(first.data(), second.data());
  EXPECT_FALSE(pool->TryTake(1));
  std::byte* const released = first.data();
  first = WeightBuffer();
  EXPECT_EQ(pool->TryTake(1).data(), released);
}

TEST(WeightBuffer, LargerThanThePoolsIsNull) {
  EXPECT_FALSE(WeightBufferPool::Create(64, 2)->TryTake(65));
}

TEST(WeightBuffer, WhoeverIsTurnedAwayIsToldOnceWhenOneComesBack) {
  int told = 0;
  std::shared_ptr<WeightBufferPool> pool;
  pool = WeightBufferPool::Create(64, 2, [&] {
    ++told;
    EXPECT_TRUE(pool->TryTake(1));  // No lock is held, and the buffer is there.
  });
  WeightBuffer first = pool->TryTakeOrTell(64);
  WeightBuffer second = pool->TryTakeOrTell(64);
  first = WeightBuffer();
  EXPECT_EQ(told, 0);  // Nobody was turned away.
  first = pool->TryTakeOrTell(64);
  EXPECT_FALSE(pool->TryTake(64));  // Does not want to be told.
  second = WeightBuffer();
  EXPECT_EQ(told, 0);
  second = pool->TryTake(64);
  EXPECT_FALSE(pool->TryTakeOrTell(64));
  EXPECT_FALSE(pool->TryTakeOrTell(64));
  first = WeightBuffer();
  second = WeightBuffer();
  EXPECT_EQ(told, 1);
}

TEST(WeightBuffer, InPlaceIsTheChunksPlaceAndKeepsTheMemoryAlive) {
  struct OnePlace final : RankMemory {
    absl::Span<const std::byte> gradient(int chunk) const override { return {}; }
    absl::Span<std::byte> weights(int chunk) const override {
      return absl::MakeSpan(bytes).subspan(chunk * 8, 8);
    }
    mutable std::vector<std::byte> bytes = std::vector<std::byte>(32);
  };
  auto memory = std::make_shared<const OnePlace>();
  const std::weak_ptr<const OnePlace> alive = memory;
  WeightBuffer buffer = WeightBuffer::InPlace(memory, 2);
  EXPECT_TRUE(buffer.in_place());
  EXPECT_EQ(buffer.data(), memory->bytes.data() + 16);
  EXPECT_EQ(buffer.size_bytes(), 8);
  memory = nullptr;
  WeightBuffer moved = std::move(buffer);
  EXPECT_FALSE(buffer);
  EXPECT_FALSE(buffer.in_place());
  EXPECT_TRUE(moved.in_place());
  EXPECT_FALSE(alive.expired());
  moved = WeightBuffer();
  EXPECT_TRUE(alive.expired());
}

TEST(WeightBuffer, KeepsItsPoolAlive) {
  WeightBuffer buffer = WeightBufferPool::Create(64, 1)->TryTake(64);
  buffer.bytes()[63] = std::byte{1};
  WeightBuffer moved = std::move(buffer);
  EXPECT_FALSE(buffer);
  EXPECT_EQ(moved.bytes()[63], std::byte{1});
}

}  // namespace
}  // namespace ballast
