#include "cpu_optimizer_service/gradient_store.h"

#include <gtest/gtest.h>

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

  void Add(float value) {
    std::vector<std::byte> bytes(512 * SizeBytes(GetParam()));
    for (int i = 0; i < 512; ++i)
      StoreElement(bytes.data(), GetParam(), i, value + static_cast<float>(i));
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
  store_->UpdateSums(0);
  store_->Clear(0);
  EXPECT_EQ(store_->accumulators_in_use(), 0);
  Add(0);
  EXPECT_EQ(At(3), 3.0f);
  store_->UpdateSums(0);
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
  store_->UpdateSums(0);
  EXPECT_EQ(store_->block_sums(0)[0], 0.0);
  Add(0);
  EXPECT_FALSE(store_->is_zero(0));
  store_->AddZeros(0);
  EXPECT_EQ(At(7), 7.0f);
  EXPECT_EQ(store_->accumulators_in_use(), 0);
  store_->UpdateSums(0);
  EXPECT_GT(store_->block_sums(0)[0], 0.0);
}

TEST_P(GradientStoreTest, SumsFollowEveryAddition) {
  Add(0);
  store_->UpdateSums(0);
  const double first = store_->block_sums(0)[0];
  Add(0);
  store_->UpdateSums(0);
  EXPECT_EQ(store_->block_sums(0)[0], 4 * first);
}

INSTANTIATE_TEST_SUITE_P(WireDtypes, GradientStoreTest,
                         testing::Values(DType::kBFloat16, DType::kFloat16, DType::kFloat32));

}  // namespace
}  // namespace ballast
