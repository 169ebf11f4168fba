#include "cpu_optimizer_service/gradients/square_sums.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/norm/exact_sum.h"
#include "cpu_optimizer_service/host/task_pool.h"
#include "tests/support/block_sums.h"

namespace ballast {
namespace {

using Values = std::vector<std::vector<float>>;  // By parameter.

struct Cut {
  int world_size = 1;
  int64_t bucket_elements = 1 << 20;
  int64_t chunk_elements = kMaxChunkElements;
};

LayoutSpec Spec(const Values& values, const Cut& cut) {
  LayoutSpec spec;
  spec.world_size = cut.world_size;
  spec.chunk_elements = cut.chunk_elements;
  for (const std::vector<float>& parameter : values) {
    spec.parameters.push_back({.name = std::to_string(spec.parameters.size()),
                               .shape = {static_cast<int64_t>(parameter.size())}});
  }
  spec.partitions = PartitionsOf(
      MakeBuckets(FlatElements(spec), cut.world_size, cut.bucket_elements), cut.world_size);
  return spec;
}

// Of whole parameters, the last one first.
double Expected(const Values& values) {
  ExactSum sum;
  for (auto parameter = values.rbegin(); parameter != values.rend(); ++parameter) {
    AddBlocks(*parameter, sum);
  }
  return sum.Rounded();
}

// Gradients as chunks hold them, and their sums, computed in any order by any number of threads.
class Cutting {
 public:
  // `dtype_of(chunk)`; the values must be such as it can hold.
  template <class DTypeOf>
  Cutting(const Values& values, const Cut& cut, DTypeOf dtype_of)
      : layout_(Layout::Create(Spec(values, cut)).value()), sums_(layout_) {
    for (int chunk = 0; chunk < static_cast<int>(layout_.chunks().size()); ++chunk) {
      const DType dtype = dtype_of(chunk);
      dtypes_.push_back(dtype);
      // What lies between parameters, if anything does, is in no sum.
      std::vector<float>& held = chunks_.emplace_back(layout_.chunks()[chunk].elements, kNan);
      layout_.VisitPieces(chunk, [&](const ChunkPiece& piece) {
        for (int64_t i = 0; i < piece.elements; ++i) {
          StoreElement(held.data(), dtype, piece.chunk_offset + i,
                       values[piece.parameter][piece.parameter_offset + i]);
        }
      });
    }
  }
  Cutting(const Values& values, const Cut& cut)
      : Cutting(values, cut, [](int) { return DType::kFloat32; }) {}

  double Sum(uint32_t seed = 0) {
    std::mt19937 random(seed);
    std::vector<int> order(chunks_.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (const int chunk : order) sums_.SumChunk(chunk, View(chunk));
    const auto shuffled = [&](int64_t count, absl::FunctionRef<void(int64_t)> body) {
      std::vector<int64_t> tasks(count);
      std::iota(tasks.begin(), tasks.end(), 0);
      std::shuffle(tasks.begin(), tasks.end(), random);
      for (const int64_t task : tasks) body(task);
    };
    return sums_.Combine([this](int chunk) { return View(chunk); }, shuffled).groups[0].Rounded();
  }
  double SumBy(TaskPool& pool) {
    pool.ForEach(static_cast<int64_t>(chunks_.size()), [&](int64_t chunk) {
      sums_.SumChunk(static_cast<int>(chunk), View(static_cast<int>(chunk)));
    });
    return sums_
        .Combine([this](int chunk) { return View(chunk); },
                 [&](int64_t count, absl::FunctionRef<void(int64_t)> body) {
                   pool.ForEach(count, body);
                 })
        .groups[0]
        .Rounded();
  }
  const NormBlocks& blocks() const { return sums_.blocks(); }
  SquareSums& sums() { return sums_; }
  int chunks() const { return static_cast<int>(chunks_.size()); }

 private:
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  GradientView View(int chunk) const { return {chunks_[chunk].data(), dtypes_[chunk]}; }

  const Layout layout_;
  SquareSums sums_;
  std::vector<DType> dtypes_;
  std::vector<std::vector<float>> chunks_;
};

template <class Make>
Values MakeValues(const std::vector<int64_t>& sizes, Make make) {
  std::mt19937 random(7);
  Values values;
  for (const int64_t size : sizes) {
    std::vector<float>& parameter = values.emplace_back(size);
    for (float& value : parameter) value = make(random);
  }
  return values;
}

float Normal(std::mt19937& random) { return std::normal_distribution<float>()(random); }
// So different that an order of addition shows.
float Mixed(std::mt19937& random) {
  return std::ldexp(Normal(random), static_cast<int>(random() % 60) - 30);
}

const std::vector<int64_t>& Sizes() {
  static const auto& sizes = *new std::vector<int64_t>{81997, 1, 0, 300, 256, 16384, 3, 32768};
  return sizes;
}

TEST(SquareSums, AreTheSameForChunksOfAnySizeOnAnyRanksInAnyOrder) {
  const Values values = MakeValues(Sizes(), Mixed);
  const double expected = Expected(values);
  for (const int world_size : {1, 2, 3, 4}) {
    for (const int64_t bucket_elements : {int64_t{1024}, int64_t{40000}, int64_t{1} << 20}) {
      for (const int64_t chunk_elements : {int64_t{256}, int64_t{1280}, int64_t{1} << 15}) {
        Cutting cutting(values, {world_size, bucket_elements, chunk_elements});
        EXPECT_EQ(cutting.Sum(world_size), expected)
            << world_size << " ranks, buckets of " << bucket_elements << ", chunks of "
            << chunk_elements;
      }
    }
  }
}

TEST(SquareSums, AreTheSameForAnyNumberOfThreads) {
  const Values values = MakeValues({1, 655360}, Mixed);
  Cutting cutting(values, {.world_size = 2, .bucket_elements = 1024, .chunk_elements = 256});
  ASSERT_GT(cutting.blocks().cut_blocks().size(), 256u) << "more than one task's share";
  for (const int threads : {1, 2, 8}) {
    TaskPool pool(threads);
    EXPECT_EQ(cutting.SumBy(pool), Expected(values)) << threads << " threads";
  }
}

TEST(SquareSums, AreTheSameWhereverABlockIsCut) {
  for (int64_t before = 0; before < kBlockElements; ++before) {
    const Values values = MakeValues({before, 3 * kBlockElements + 100, 20}, Mixed);
    for (const int64_t chunk_elements : {int64_t{256}, int64_t{512}}) {
      Cutting cutting(values, {.chunk_elements = chunk_elements});
      ASSERT_EQ(cutting.Sum(), Expected(values))
          << "edges " << kBlockElements - before << " elements into the blocks";
    }
  }
}

TEST(SquareSums, AreTheSameWhereTheChunksOfABlockCameInDifferentFormats) {
  // A sum of micro-steps is fp32, a single contribution as it came.
  const Values values = MakeValues({77, 2000, 600}, [](std::mt19937& random) {
    return BFloat16ToFloat(FloatToBFloat16(Normal(random)));
  });
  Cutting cutting(values, {.chunk_elements = 256},
                  [](int chunk) { return chunk % 2 == 0 ? DType::kBFloat16 : DType::kFloat32; });
  ASSERT_FALSE(cutting.blocks().cut_blocks().empty());
  EXPECT_EQ(cutting.Sum(), Expected(values));
}

TEST(SquareSums, ForgetWhatAChunkHeldBefore) {
  const Values values = MakeValues({100, 5000}, Normal);
  Cutting cutting(values, {.chunk_elements = 512});
  for (int turn = 0; turn < 2; ++turn) {
    ASSERT_EQ(cutting.Sum(), Expected(values));
    for (int chunk = 0; chunk < cutting.chunks(); ++chunk) cutting.sums().ZeroChunk(chunk);
    const std::vector<float> zeros(512);
    const auto view = [&](int) { return GradientView{zeros.data(), DType::kFloat32}; };
    const auto for_each = [](int64_t count, absl::FunctionRef<void(int64_t)> body) {
      for (int64_t i = 0; i < count; ++i) body(i);
    };
    EXPECT_EQ(cutting.sums().Combine(view, for_each).groups[0].Rounded(), 0);
  }
}

// Against a sum without any rounding.
TEST(SquareSums, AreWithinTwoToTheMinus48OfTheSumOfTheSquares) {
  const auto sign = [](std::mt19937& random) { return random() % 2 == 0 ? 1.0f : -1.0f; };
  const std::vector<std::pair<std::string, Values>> all = {
      {"random", MakeValues(Sizes(), Normal)},
      {"denormal", MakeValues(Sizes(),
                              [&](std::mt19937& random) {
                                return sign(random) *
                                       std::ldexp(static_cast<float>(random() % (1 << 23)), -149);
                              })},
      {"huge", MakeValues(Sizes(),
                          [&](std::mt19937& random) {
                            return sign(random) *
                                   std::ldexp(1 + static_cast<float>(random() % 1000) / 1001, 127);
                          })},
      {"mixed", MakeValues(Sizes(), Mixed)},
      {"one large", MakeValues(Sizes(), [](std::mt19937& random) {
         return random() % 50000 == 0 ? 0x1p60f : Normal(random);
       })}};
  for (const auto& [name, values] : all) {
    ExactSum exact;  // A square of fp32 has at most 48 bits.
    for (const std::vector<float>& parameter : values) {
      for (const float value : parameter) {
        exact.Add(double{value} * double{value});
      }
    }
    const double expected = exact.Rounded();
    const double sum = Cutting(values, {.chunk_elements = 1280}).Sum();
    EXPECT_LE(std::abs(sum - expected), expected * 0x1p-48) << name;
  }
}

TEST(SquareSums, AreFiniteExactlyWhenAllElementsAre) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  // In a whole block, in one that is cut, in a short one.
  for (const int64_t at : {int64_t{400}, int64_t{150}, int64_t{999}}) {
    Values values(2);
    values[0].assign(50, 1.0f);
    values[1].assign(1000, std::numeric_limits<float>::max());
    EXPECT_TRUE(std::isfinite(Cutting(values, {.chunk_elements = 256}).Sum()));
    values[1][at] = -kInfinity;
    EXPECT_EQ(Cutting(values, {.chunk_elements = 256}).Sum(), kInfinity) << at;
    values[1][at] = kNan;
    EXPECT_TRUE(std::isnan(Cutting(values, {.chunk_elements = 256}).Sum())) << at;
  }
}

}  // namespace
}  // namespace ballast
