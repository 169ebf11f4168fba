#include "cpu_optimizer_service/gradients/gradient_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/gradient_norm.h"

namespace ballast {
namespace {

class GradientStoreTest : public testing::TestWithParam<DType> {
 protected:
  GradientStoreTest() {
    spec_.name = "job";
    spec_.groups = {{.name = "g", .wire_dtype = GetParam()}};
    spec_.layout.parameters = {{.name = "p", .shape = {512}}};
    spec_.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 512}};
    layout_ = std::make_unique<Layout>(Layout::Create(spec_.layout).value());
    store_ = GradientStore::Create(spec_, *layout_, *arenas_).value();
  }

  static std::vector<std::byte> Payload(float value) {
    std::vector<std::byte> bytes(512 * SizeBytes(GetParam()));
    for (int i = 0; i < 512; ++i)
      StoreElement(bytes.data(), GetParam(), i, value + static_cast<float>(i));
    return bytes;
  }
  void Add(float value) {
    const std::vector<std::byte> bytes = Payload(value);
    const absl::Span<const std::byte> piece(bytes);
    store_->Add(0, {&piece, 1});
  }
  float At(int64_t element) const {
    const GradientView view = store_->view(0);
    return LoadElement(view.data, view.dtype, element);
  }

  JobSpec spec_;
  std::unique_ptr<ArenaFactory> arenas_ = MakeAnonymousArenaFactory();
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<GradientStore> store_;
};

TEST_P(GradientStoreTest, TheFirstIsKeptAsItCameAndLaterOnesAreAddedInFp32) {
  Add(0);
  EXPECT_EQ(store_->view(0).dtype, GetParam());
  EXPECT_EQ(store_->accumulators_in_use(), 0);
  Add(0);
  EXPECT_EQ(store_->view(0).dtype, DType::kFloat32);
  EXPECT_EQ(store_->accumulators_in_use(), 1);
  Add(0);
  EXPECT_EQ(At(255), 3 * 255.0f);
  EXPECT_EQ(At(1), 3.0f);
}

TEST_P(GradientStoreTest, P3ClearForgetsEverything) {
  Add(1);
  Add(2);
  store_->ComputeSums(0);
  store_->Clear(0);
  EXPECT_EQ(store_->accumulators_in_use(), 0);
  Add(0);
  EXPECT_EQ(At(3), 3.0f);
  store_->ComputeSums(0);
  const GradientView view = store_->view(0);
  EXPECT_EQ(
      store_->block_sums(0)[1],
      BlockSumOfSquaresReference(
          static_cast<const std::byte*>(view.data) + 256 * SizeBytes(view.dtype), view.dtype));
}

TEST_P(GradientStoreTest, ZerosCountAsZerosInAnyOrder) {
  store_->AddZeros(0);
  EXPECT_TRUE(store_->is_zero(0));
  EXPECT_EQ(At(7), 0.0f);
  store_->ComputeSums(0);
  EXPECT_EQ(store_->block_sums(0)[0], 0.0);
  Add(0);
  EXPECT_FALSE(store_->is_zero(0));
  store_->AddZeros(0);
  EXPECT_EQ(At(7), 7.0f);
  EXPECT_EQ(store_->accumulators_in_use(), 0);
  store_->ComputeSums(0);
  EXPECT_GT(store_->block_sums(0)[0], 0.0);
}

TEST_P(GradientStoreTest, SumsFollowEveryAddition) {
  Add(0);
  store_->ComputeSums(0);
  const double first = store_->block_sums(0)[0];
  Add(0);
  store_->ComputeSums(0);
  EXPECT_EQ(store_->block_sums(0)[0], 4 * first);
}

TEST_P(GradientStoreTest, WhatIsBorrowedIsReadWhereItLiesUntilClear) {
  std::vector<std::byte> lent = Payload(0);
  store_->Borrow(0, lent.data());
  EXPECT_EQ(store_->view(0).data, lent.data());
  EXPECT_EQ(store_->view(0).dtype, GetParam());
  EXPECT_FALSE(store_->is_zero(0));
  store_->ComputeSums(0);
  EXPECT_EQ(store_->block_sums(0)[1],
            BlockSumOfSquaresReference(lent.data() + 256 * SizeBytes(GetParam()), GetParam()));
  store_->Clear(0);
  EXPECT_EQ(At(7), 0.0f);
  Add(0);
  lent.assign(lent.size(), std::byte{0xff});
  EXPECT_EQ(At(7), 7.0f);
}

TEST_P(GradientStoreTest, ALentPlaceKeepsItsBytesWhileTheNextGradientIsKeptElsewhere) {
  const auto bytes = static_cast<int64_t>(512 * SizeBytes(GetParam()));
  Add(0);
  WeightBuffer weights = store_->LendPlace(0, bytes);
  ASSERT_TRUE(weights);
  EXPECT_EQ(weights.data(), store_->view(0).data);
  std::memset(weights.data(), 0x5a, bytes);
  EXPECT_FALSE(store_->LendPlace(0, bytes));
  store_->Clear(0);
  Add(1);
  EXPECT_EQ(At(7), 8.0f);
  EXPECT_EQ(std::count(weights.bytes().begin(), weights.bytes().end(), std::byte{0x5a}), bytes);
  weights = {};
  EXPECT_EQ(At(7), 8.0f);  // Where it is, until the next.
  store_->Clear(0);
  Add(2);
  EXPECT_EQ(At(7), 9.0f);
  EXPECT_TRUE(store_->LendPlace(0, bytes));
}

TEST_P(GradientStoreTest, APlaceThatIsReadIsLentForItsOwnSizeOnly) {
  const auto bytes = static_cast<int64_t>(512 * SizeBytes(GetParam()));
  Add(0);
  EXPECT_FALSE(store_->LendPlace(0, bytes / 2));
  Add(0);  // Now the sum is read.
  EXPECT_FALSE(store_->LendPlace(0, bytes + 1));
  EXPECT_TRUE(store_->LendPlace(0, bytes / 2));
}

TEST_P(GradientStoreTest, ALentPlaceOutlivesTheStore) {
  const auto bytes = static_cast<int64_t>(512 * SizeBytes(GetParam()));
  Add(0);
  WeightBuffer weights = store_->LendPlace(0, bytes);
  store_ = nullptr;
  std::memset(weights.data(), 0, bytes);
  EXPECT_EQ(weights.bytes().back(), std::byte{0});
}

INSTANTIATE_TEST_SUITE_P(WireDtypes, GradientStoreTest,
                         testing::Values(DType::kBFloat16, DType::kFloat16, DType::kFloat32));

// P7: how the flat space is cut shows in no bit.
TEST(GradientStore, CombinesTheSumsOfAnyChunksToTheGroups) {
  constexpr int64_t kBlocks = 5 * kSpanBlocks + 7;
  const auto arenas = MakeAnonymousArenaFactory();
  for (const int64_t chunk_blocks : {1, 5, 63, 64, 65, 128, 1024}) {
    for (const int64_t edge : {1, 64, 100, 256}) {  // Of a partition, in blocks.
      JobSpec spec;
      spec.name = "job";
      spec.groups = {{.name = "g", .wire_dtype = DType::kFloat32}};
      spec.layout.world_size = 2;
      spec.layout.parameters = {{.name = "p", .shape = {kBlocks * kBlockElements}}};
      spec.layout.partitions = {
          {.rank = 0, .group = 0, .begin = 0, .end = edge * kBlockElements},
          {.rank = 1, .begin = edge * kBlockElements, .end = kBlocks * kBlockElements}};
      spec.layout.chunk_elements = chunk_blocks * kBlockElements;
      const Layout layout = Layout::Create(spec.layout).value();
      const auto store = GradientStore::Create(spec, layout, *arenas).value();
      for (int turn = 1; turn <= 2; ++turn) {
        for (int c = 0; c < static_cast<int>(layout.chunks().size()); ++c) {
          const Chunk& chunk = layout.chunks()[c];
          std::vector<float> values(chunk.elements);
          for (int64_t i = 0; i < chunk.elements; ++i) {
            values[i] = 1 / static_cast<float>(1 + (chunk.begin + i) * turn);
          }
          const absl::Span<const std::byte> piece(reinterpret_cast<const std::byte*>(values.data()),
                                                  values.size() * sizeof(float));
          store->Clear(c);
          store->Add(c, {&piece, 1});
          store->ComputeSums(c);
        }
        EXPECT_EQ(store->CombineSums(0), GroupSum(store->block_sums(0)))
            << chunk_blocks << " blocks, edge at " << edge;
        EXPECT_GT(store->CombineSums(0), 1.0);
      }
    }
  }
}

}  // namespace
}  // namespace ballast
