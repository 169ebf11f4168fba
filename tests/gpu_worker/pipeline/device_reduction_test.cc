#include "gpu_worker/pipeline/device_reduction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "tests/gpu_worker/pipeline/scripted_passes.h"

namespace ballast::worker {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kWorldSize = 2;
constexpr int kRank = 1;
constexpr float kOthers = 1000.0f;  // The other rank's part of each element.
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rank 1 of a world of two, whose other rank has kOthers everywhere.
class OneOfTwo final : public DeviceCollective {
 public:
  int rank() const override { return kRank; }
  int world_size() const override { return kWorldSize; }
  absl::Status ReduceScatterSum(DeviceStream& stream, const float* input, float* shard,
                                int64_t shard_elements, const Purpose& purpose) override {
    purposes.push_back(absl::StrCat("step ", purpose.step, " bucket ", purpose.bucket));
    return GiveToFakeStream(stream, "reduce-scatter", [=] {
      for (int64_t i = 0; i < shard_elements; ++i) {
        shard[i] = input[kRank * shard_elements + i] + kOthers;
      }
    });
  }
  absl::Status AllGather(DeviceStream&, const std::byte*, std::byte*, size_t,
                         const Purpose&) override {
    return absl::UnimplementedError("reductions gather nothing");
  }
  absl::Status Finish() override { return absl::OkStatus(); }

  std::vector<std::string> purposes;
};

// Gradients on the device, all NaN at first.
class Reduction {
 public:
  explicit Reduction(DType wire_dtype, bool check = false, FakeDeviceOptions options = {},
                     const std::vector<int>& backward_order = ScriptedBackwardOrder())
      : job_(ScriptedJob(kWorldSize, wire_dtype, 3)),
        order_(MakeBucketOrder(job_.layout, job_.buckets, backward_order)),
        device_(std::move(options)),
        stream_(device_.CreateStream("communicate").value()) {
    std::vector<float*> spaces;
    for (const int64_t elements : job_.group_elements) {
      gradients_.push_back(device_.Allocate(elements * sizeof(float), "gradients").value());
      spaces.push_back(gradients_.back()->as<float>());
      Write(spaces.back(), std::vector<float>(elements, kNan));
    }
    created_ =
        DeviceReduction::Create({device_, *stream_, collective_, job_, order_}, spaces, check);
  }

  DeviceReduction& operator*() { return **created_; }
  DeviceReduction* operator->() { return created_->get(); }
  const absl::Status created() const { return created_.status(); }

  float* gradient(int group) { return gradients_[group]->as<float>(); }
  const Bucket& bucket(int index) const { return job_.buckets[index]; }
  int64_t elements(int index) const { return bucket(index).shard_elements * kWorldSize; }
  const TrainingJob& job() const { return job_; }
  const BucketOrder& order() const { return order_; }
  const OneOfTwo& collective() const { return collective_; }

  void Fill(int bucket_index, float value) {
    Write(gradient(bucket(bucket_index).group) + bucket(bucket_index).begin,
          std::vector<float>(elements(bucket_index), value));
  }
  // All gradients, padding included.
  void FillAll(float value) {
    for (size_t b = 0; b < job_.buckets.size(); ++b) Fill(static_cast<int>(b), value);
  }
  void SetElement(int parameter, int64_t element, float value) {
    Write(gradient(job_.layout.spec().parameters[parameter].group) +
              job_.layout.place(parameter).offset + element,
          {value});
  }
  std::vector<float> Read(const float* from, int64_t elements) {
    std::vector<float> values(elements);
    EXPECT_TRUE(stream_->CopyToHost(BytesOf(values), from).ok());
    EXPECT_TRUE(stream_->Synchronize().ok());
    return values;
  }
  void Write(float* to, std::vector<float> values) {
    EXPECT_TRUE(stream_->CopyToDevice(to, BytesOf(values)).ok());
    EXPECT_TRUE(stream_->Synchronize().ok());
  }
  FakeDevice& device() { return device_; }

 private:
  static absl::Span<std::byte> BytesOf(std::vector<float>& values) {
    return {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(float)};
  }

  const TrainingJob job_;
  const BucketOrder order_;
  FakeDevice device_;
  std::unique_ptr<DeviceStream> stream_;
  OneOfTwo collective_;
  std::vector<std::unique_ptr<DeviceMemory>> gradients_;
  absl::StatusOr<std::unique_ptr<DeviceReduction>> created_ = nullptr;
};

TEST(DeviceReduction, ReducesTheGradientToThisRanksShardInItsPlace) {
  Reduction reduction(DType::kBFloat16);
  const Bucket& bucket = reduction.bucket(1);
  std::vector<float> values(reduction.elements(1));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  float* space = reduction.gradient(bucket.group);
  reduction.Write(space + bucket.begin, values);
  const float* shard = reduction->Reduce(1, /*step=*/7).value();
  EXPECT_EQ(shard, space + bucket.begin + kRank * bucket.shard_elements);
  for (int64_t i = 0; i < bucket.shard_elements; ++i) {
    values[kRank * bucket.shard_elements + i] += kOthers;
  }
  EXPECT_EQ(reduction.Read(space + bucket.begin, reduction.elements(1)), values);
  EXPECT_THAT(reduction.collective().purposes, ElementsAre("step 7 bucket 1"));
  EXPECT_FALSE(reduction->TakeNonFinite().has_value());
}

TEST(DeviceReduction, RoundsToTheFormatOfTheGroup) {
  const std::vector<float> values = {1.0f + 1.0f / 512, -0.0f, 65520.0f, 1e-6f};
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    Reduction reduction(dtype);
    const auto from = reduction.device().Allocate(sizeof(float) * values.size(), "from").value();
    const auto to = reduction.device().Allocate(sizeof(float) * values.size(), "to").value();
    reduction.Write(from->as<float>(), values);
    // One less than there are: nothing past them is written.
    ASSERT_TRUE(reduction->Round(1, values.size() - 1, from->as<float>(), to->data()).ok());
    const std::vector<float> bytes = reduction.Read(to->as<float>(), values.size());
    for (size_t i = 0; i + 1 < values.size(); ++i) {
      EXPECT_EQ(LoadElement(bytes.data(), dtype, i), Rounded(values[i], dtype))
          << Name(dtype) << " " << i;
    }
    EXPECT_EQ(LoadElement(bytes.data(), dtype, values.size() - 1), 0.0f);
  }
}

// ---------------------------------------------------------------- the search

void ReduceAll(Reduction& reduction) {
  for (const int bucket : reduction.order().reduction) {
    ASSERT_TRUE(reduction->Reduce(bucket, 1).ok());
  }
}

TEST(DeviceReduction, NamesTheFirstElementThatIsNotFiniteWhateverTheOrderOfBuckets) {
  const std::vector<int> onward = {0, 1, 2, 3, 4, 5}, backward = {5, 4, 3, 2, 1, 0};
  for (uint64_t seed = 0; seed < 4; ++seed) {
    for (const std::vector<int>& order : {onward, backward}) {
      Reduction reduction(DType::kFloat32, /*check=*/true, {.seed = seed}, order);
      ASSERT_TRUE(reduction.created().ok());
      reduction.FillAll(1.0f);
      ReduceAll(reduction);
      EXPECT_FALSE(reduction->TakeNonFinite().has_value());

      ASSERT_GE(reduction.order().buckets_of_parameter[2].size(), 2);
      reduction.FillAll(1.0f);
      reduction.SetElement(5, 0, kNan);
      reduction.SetElement(4, 0, kInfinity);
      reduction.SetElement(2, 619, kNan);
      reduction.SetElement(2, 17, -kInfinity);
      ReduceAll(reduction);
      const std::optional<NonFinite> found = reduction->TakeNonFinite();
      ASSERT_TRUE(found.has_value());
      EXPECT_EQ(found->parameter, 2);
      EXPECT_EQ(found->element, 17);
      EXPECT_EQ(found->value, -kInfinity);
      EXPECT_FALSE(reduction->TakeNonFinite().has_value());  // It was taken.
    }
  }
}

// Each parameter's every edge, so that the arithmetic of places is right at both ends.
TEST(DeviceReduction, FindsAnElementWhereverItIs) {
  Reduction reduction(DType::kBFloat16, /*check=*/true);
  const Layout& layout = reduction.job().layout;
  for (int p = 0; p < static_cast<int>(layout.spec().parameters.size()); ++p) {
    for (const int64_t element : {int64_t{0}, layout.place(p).elements - 1}) {
      reduction.FillAll(1.0f);
      reduction.SetElement(p, element, kNan);
      ReduceAll(reduction);
      const std::optional<NonFinite> found = reduction->TakeNonFinite();
      ASSERT_TRUE(found.has_value()) << "parameter " << p << " element " << element;
      EXPECT_EQ(found->parameter, p);
      EXPECT_EQ(found->element, element);
      EXPECT_TRUE(std::isnan(found->value));
    }
  }
}

TEST(DeviceReduction, AnElementThatOverflowsOnTheWireIsSaidAsItTravels) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Reduction reduction(dtype, /*check=*/true);
    reduction.FillAll(1.0f);
    reduction.SetElement(0, 3, -65520.0f);
    ReduceAll(reduction);
    const std::optional<NonFinite> found = reduction->TakeNonFinite();
    ASSERT_EQ(found.has_value(), dtype == DType::kFloat16);
    if (found.has_value()) EXPECT_EQ(found->value, -kInfinity);
  }
}

TEST(DeviceReduction, DoesNotSearchThePadding) {
  Reduction reduction(DType::kFloat32, /*check=*/true);
  // What lies between and after parameters stays NaN.
  for (const int index : reduction.order().reduction) {
    for (const int p : reduction.order().parameters_of_bucket[index]) {
      const ParameterPlace& place = reduction.job().layout.place(p);
      reduction.Write(reduction.gradient(reduction.bucket(index).group) + place.offset,
                      std::vector<float>(place.elements, 1.0f));
    }
  }
  ReduceAll(reduction);
  EXPECT_FALSE(reduction->TakeNonFinite().has_value());
}

// ---------------------------------------------------------------- errors

TEST(DeviceReduction, SaysWhatFailedAtEachOperationOfTheDevice) {
  int operations = 0;
  int failing = -1;
  const auto fail = [&](absl::string_view operation, absl::string_view) {
    return operations++ == failing ? absl::InternalError(absl::StrCat("it was ", operation))
                                   : absl::OkStatus();
  };
  const auto run = [&]() -> absl::Status {
    Reduction reduction(DType::kBFloat16, /*check=*/true, {.fail = fail});
    BALLAST_RETURN_IF_ERROR(reduction.created());
    const auto wire = reduction.device().Allocate(4, "wire").value();
    reduction.FillAll(1.0f);
    reduction.SetElement(0, 0, kNan);
    operations = 0;
    BALLAST_ASSIGN_OR_RETURN(const float* shard, reduction->Reduce(0, 1));
    const absl::Status rounded = reduction->Round(0, 2, shard, wire->data());
    failing = -1;
    return rounded;
  };
  ASSERT_TRUE(run().ok());
  const int all = operations;
  ASSERT_GT(all, 8);
  for (int i = 0; i < all; ++i) {
    operations = 1 << 20;  // Not before the calls that are tested.
    failing = i;
    const absl::Status status = run();
    EXPECT_THAT(status.message(), HasSubstr("it was ")) << "operation " << i << " of " << all;
    EXPECT_EQ(operations, i + 1) << "it went on after the error";
    failing = -1;
  }
}

TEST(DeviceReduction, SaysWhatTheSearchHasNoMemoryFor) {
  bool full = false;
  FakeDeviceOptions options{.fail = [&](absl::string_view operation, absl::string_view what) {
    full = full || what == "the search for infinities";
    return operation == "allocate host" ? absl::ResourceExhaustedError("no more")
                                        : absl::OkStatus();
  }};
  EXPECT_TRUE(Reduction(DType::kBFloat16, /*check=*/false, options).created().ok());
  EXPECT_FALSE(full) << "memory for a search that is not asked for";
  EXPECT_EQ(Reduction(DType::kBFloat16, /*check=*/true, options).created().code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace ballast::worker
