#include "cpu_optimizer_service/gradients/gradient_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/host/kept_record.h"

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
  void Add(float value, RedoLane* lane = nullptr) {
    const std::vector<std::byte> bytes = Payload(value);
    const absl::Span<const std::byte> piece(bytes);
    store_->Add(0, {&piece, 1}, lane);
  }
  float At(int64_t element) const {
    const GradientView view = store_->view(0);
    return LoadElement(view.data, view.dtype, element);
  }

  double SumOf(int chunk) {
    store_->ComputeSums(chunk);
    return store_->CombineSums([](int64_t, absl::FunctionRef<void(int64_t)>) {})
        .groups[0]
        .Rounded();
  }
  static double ExpectedSum(const std::byte* gradient, DType dtype) {
    return BlockSumOfSquaresReference(gradient, dtype) +
           BlockSumOfSquaresReference(gradient + 256 * SizeBytes(dtype), dtype);
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

// The order of stores: a process that dies at any of them leaves what the next one finishes.
TEST_P(GradientStoreTest, ASumChangesBehindTheRecordOfItsTurn) {
  Add(0);
  Add(1);
  RedoLane lane = {.word = RedoWord{.chunk = 0}.Pack()};
  std::vector<float> old, sum;
  for (int i = 0; i < 512; ++i) {
    old.push_back(At(i));
    sum.push_back(old[i] + LoadElement(Payload(2).data(), GetParam(), i));
  }
  int64_t done = 0;
  std::function<void(const char*)> seam = [&](const char*) {
    const RedoWord word = RedoWord::Unpack(lane.word);
    ASSERT_GT(word.count, 0);
    ASSERT_EQ(word.done, done + word.count);
    for (int64_t i = 0; i < 512; ++i) {
      EXPECT_EQ(At(i), i < done ? sum[i] : old[i]);
      if (i < done || i >= word.done) continue;
      EXPECT_EQ(lane.turns[word.turn].values[i - done], sum[i]);
    }
    done = word.done;
  };
  store_seam = &seam;
  Add(2, &lane);
  store_seam = nullptr;
  EXPECT_EQ(done, 512);
}

TEST_P(GradientStoreTest, P3ClearForgetsEverything) {
  Add(1);
  Add(2);
  store_->ComputeSums(0);
  store_->Clear(0);
  EXPECT_EQ(store_->accumulators_in_use(), 0);
  Add(0);
  EXPECT_EQ(At(3), 3.0f);
  const GradientView view = store_->view(0);
  EXPECT_EQ(SumOf(0), ExpectedSum(static_cast<const std::byte*>(view.data), view.dtype));
}

TEST_P(GradientStoreTest, ZerosCountAsZerosInAnyOrder) {
  store_->AddZeros(0);
  EXPECT_TRUE(store_->is_zero(0));
  EXPECT_EQ(At(7), 0.0f);
  EXPECT_EQ(SumOf(0), 0.0);
  Add(0);
  EXPECT_FALSE(store_->is_zero(0));
  store_->AddZeros(0);
  EXPECT_EQ(At(7), 7.0f);
  EXPECT_EQ(store_->accumulators_in_use(), 0);
  EXPECT_GT(SumOf(0), 0.0);
}

TEST_P(GradientStoreTest, SumsFollowEveryAddition) {
  Add(0);
  const double first = SumOf(0);
  Add(0);
  EXPECT_EQ(SumOf(0), 4 * first);
}

TEST_P(GradientStoreTest, WhatIsBorrowedIsReadWhereItLiesUntilClear) {
  std::vector<std::byte> lent = Payload(0);
  store_->Borrow(0, lent.data());
  EXPECT_EQ(store_->view(0).data, lent.data());
  EXPECT_EQ(store_->view(0).dtype, GetParam());
  EXPECT_FALSE(store_->is_zero(0));
  EXPECT_EQ(SumOf(0), ExpectedSum(lent.data(), GetParam()));
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

// 1.5 blocks in chunks of one, so that a block is cut.
TEST(GradientStore, SaysWhetherAPieceHasAGradientAndWhichElementIsNotFinite) {
  JobSpec spec;
  spec.name = "job";
  spec.groups = {{.name = "g", .wire_dtype = DType::kFloat32}};
  spec.layout.parameters = {{.name = "first", .shape = {100}}, {.name = "p", .shape = {1000}}};
  spec.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 1280}};
  spec.layout.chunk_elements = 512;
  const Layout layout = Layout::Create(spec.layout).value();
  const auto arenas = MakeAnonymousArenaFactory();
  const auto store = GradientStore::Create(spec, layout, *arenas).value();
  std::vector<float> flat(1280, 0.0f);
  const auto set = [&](float value, int64_t element) {
    std::fill(flat.begin(), flat.end(), 0.0f);
    flat[100 + element] = value;
    for (int c = 0; c < 3; ++c) {
      const Chunk& chunk = layout.chunks()[c];
      const absl::Span<const std::byte> piece(
          reinterpret_cast<const std::byte*>(flat.data() + chunk.begin), chunk.elements * 4);
      store->Clear(c);
      store->Add(c, {&piece, 1});
    }
  };
  const auto compute = [&] {
    for (int c = 0; c < 3; ++c) store->ComputeSums(c);
    const PartSums sums =
        store->CombineSums([](int64_t count, absl::FunctionRef<void(int64_t)> body) {
          for (int64_t i = 0; i < count; ++i) body(i);
        });
    return sums.groups[0].Rounded();
  };
  const auto has_gradient = [&](int parameter, bool sums_current) {
    bool found = false;
    layout.VisitRange(parameter, 0, layout.place(parameter).elements, [&](const ChunkPiece& piece) {
      found = found || store->HasNonZero(piece, sums_current);
    });
    return found;
  };
  // In a whole block, on both sides of an edge, in the last, short block.
  for (const int64_t element : {0, 255, 300, 411, 412, 511, 767, 768, 923, 924, 999}) {
    set(0x1p-149f, element);
    EXPECT_TRUE(has_gradient(1, /*sums_current=*/false)) << element;
    EXPECT_EQ(compute(), 0x1p-298) << element;
    EXPECT_TRUE(has_gradient(1, /*sums_current=*/true)) << element;
    EXPECT_FALSE(has_gradient(0, /*sums_current=*/true)) << element;
    EXPECT_EQ(store->FirstNonFinite(), std::nullopt) << element;
    set(std::numeric_limits<float>::infinity(), element);
    compute();
    const std::optional<ChunkPiece> found = store->FirstNonFinite();
    ASSERT_TRUE(found.has_value()) << element;
    EXPECT_EQ(found->parameter, 1);
    EXPECT_EQ(found->parameter_offset, element);
    EXPECT_EQ(layout.chunks()[found->chunk].begin + found->chunk_offset, 100 + element);
  }
}

}  // namespace
}  // namespace ballast
