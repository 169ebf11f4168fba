// The optimizer's arithmetic equals the scalar references of common/ bit for bit.
#include <gtest/gtest.h>

#include <optional>

#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/layout.h"
#include "gpu_worker/cuda/kernels/adam.h"
#include "tests/gpu_worker/cuda/kernel_test.h"

namespace ballast::worker::cuda {
namespace {

constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

struct Case {
  HyperParameters values;
  DType gradient_dtype = DType::kBFloat16;
  DType shard_dtype = DType::kBFloat16;
  size_t elements = 1027;
  size_t offset = 0;
  bool in_place = true;
  bool wants_shard = true;
};

// The planes of a run, on the host or on the device.
template <template <typename> typename Array>
struct Planes {
  Array<std::byte> gradient;
  Array<float> master;
  Array<float> exp_avg;
  Array<float> exp_avg_sq;
  Array<float> max_exp_avg_sq;
  Array<float> new_master;
  Array<float> new_exp_avg;
  Array<float> new_exp_avg_sq;
  Array<float> new_max_exp_avg_sq;
  Array<std::byte> shard;
};
template <typename T>
using HostArray = std::vector<T>;

template <template <typename> typename Array>
AdamRun RunOf(const Case& c, Planes<Array>& planes) {
  AdamRun run = {};
  run.elements = static_cast<int64_t>(c.elements);
  run.gradient = planes.gradient.data();
  run.gradient_dtype = c.gradient_dtype;
  run.master = planes.master.data();
  run.exp_avg = planes.exp_avg.data();
  run.exp_avg_sq = planes.exp_avg_sq.data();
  run.max_exp_avg_sq = c.values.amsgrad ? planes.max_exp_avg_sq.data() : nullptr;
  run.new_master = c.in_place ? planes.master.data() : planes.new_master.data();
  run.new_exp_avg = c.in_place ? planes.exp_avg.data() : planes.new_exp_avg.data();
  run.new_exp_avg_sq = c.in_place ? planes.exp_avg_sq.data() : planes.new_exp_avg_sq.data();
  if (c.values.amsgrad) {
    run.new_max_exp_avg_sq =
        c.in_place ? planes.max_exp_avg_sq.data() : planes.new_max_exp_avg_sq.data();
  }
  run.shard = c.wants_shard ? planes.shard.data() : nullptr;
  run.shard_dtype = c.shard_dtype;
  run.scalars = MakeAdamScalars(c.values, 3, 0.75f);
  return run;
}

class AdamKernels : public KernelTest {
 protected:
  Planes<DeviceArray> ToDevice(const Case& c, const Planes<HostArray>& host) {
    const auto up = [&](const std::vector<float>& plane) { return Upload(plane, c.offset); };
    return {.gradient = Upload(host.gradient, c.offset * SizeBytes(c.gradient_dtype)),
            .master = up(host.master),
            .exp_avg = up(host.exp_avg),
            .exp_avg_sq = up(host.exp_avg_sq),
            .max_exp_avg_sq = up(host.max_exp_avg_sq),
            .new_master = up(host.new_master),
            .new_exp_avg = up(host.new_exp_avg),
            .new_exp_avg_sq = up(host.new_exp_avg_sq),
            .new_max_exp_avg_sq = up(host.new_max_exp_avg_sq),
            .shard = Upload(host.shard, c.offset * SizeBytes(c.shard_dtype))};
  }

  // Every plane after the update, whether it takes part or not.
  void ExpectEqualsReference(const std::string& what, const Case& c) {
    const auto hard = [&](uint64_t seed) { return HardFloats(c.elements, seed); };
    const std::vector<float> poison(c.elements, NAN);
    Planes<HostArray> host = {.gradient = ToWire(hard(1), c.gradient_dtype),
                              .master = hard(2),
                              .exp_avg = hard(3),
                              .exp_avg_sq = hard(4),
                              .max_exp_avg_sq = hard(5),
                              .new_master = poison,
                              .new_exp_avg = poison,
                              .new_exp_avg_sq = poison,
                              .new_max_exp_avg_sq = poison,
                              .shard = ToWire(poison, c.shard_dtype)};
    for (std::vector<float>* squares : {&host.exp_avg_sq, &host.max_exp_avg_sq}) {
      for (float& square : *squares) square = std::fabs(square);
    }
    Planes<DeviceArray> on_device = ToDevice(c, host);
    Run(UpdateAdam(stream(), RunOf(c, on_device)));
    UpdateAdamReference(RunOf(c, host));

    ExpectSameBits(what + ": master", Download(on_device.master), host.master);
    ExpectSameBits(what + ": exp_avg", Download(on_device.exp_avg), host.exp_avg);
    ExpectSameBits(what + ": exp_avg_sq", Download(on_device.exp_avg_sq), host.exp_avg_sq);
    ExpectSameBits(what + ": max_exp_avg_sq", Download(on_device.max_exp_avg_sq),
                   host.max_exp_avg_sq);
    ExpectSameBits(what + ": new master", Download(on_device.new_master), host.new_master);
    ExpectSameBits(what + ": new exp_avg", Download(on_device.new_exp_avg), host.new_exp_avg);
    ExpectSameBits(what + ": new exp_avg_sq", Download(on_device.new_exp_avg_sq),
                   host.new_exp_avg_sq);
    ExpectSameBits(what + ": new max_exp_avg_sq", Download(on_device.new_max_exp_avg_sq),
                   host.new_max_exp_avg_sq);
    ExpectSameBits(what + ": shard", FromWire(Download(on_device.shard), c.shard_dtype),
                   FromWire(host.shard, c.shard_dtype));
  }
};

TEST_F(AdamKernels, UpdateEqualsTheReferenceWithEveryOption) {
  for (const bool amsgrad : {false, true}) {
    for (const double weight_decay : {0.0, 0.1}) {
      for (const bool decoupled : {false, true}) {
        for (const bool maximize : {false, true}) {
          HyperParameters values;
          values.amsgrad = amsgrad;
          values.weight_decay = weight_decay;
          values.decoupled_weight_decay = decoupled;
          values.maximize = maximize;
          ExpectEqualsReference(absl::StrCat("amsgrad ", amsgrad, ", weight decay ", weight_decay,
                                             ", decoupled ", decoupled, ", maximize ", maximize),
                                {.values = values});
        }
      }
    }
  }
}

TEST_F(AdamKernels, AProductThatIsTheLeastNormalNumberIsZero) {
  HyperParameters values;
  values.lr = 1;
  values.weight_decay = 0.5;  // Half of a weight is left.
  const Case c = {.values = values, .elements = 4};
  const std::vector<float> zeros(4);
  Planes<HostArray> host;
  host.gradient = host.shard = ToWire(zeros, DType::kBFloat16);
  host.master = {0x1p-125f, -0x1p-125f, 0x1p-124f, 0x1.8p-126f};
  host.exp_avg = host.exp_avg_sq = host.max_exp_avg_sq = zeros;
  host.new_master = host.new_exp_avg = host.new_exp_avg_sq = host.new_max_exp_avg_sq = zeros;
  Planes<DeviceArray> on_device = ToDevice(c, host);
  Run(UpdateAdam(stream(), RunOf(c, on_device)));
  EXPECT_EQ(Download(on_device.master), (std::vector<float>{0, 0, 0x1p-125f, 0}));
}

TEST_F(AdamKernels, UpdateReadsAndWritesEveryFormat) {
  for (const DType gradient : kDTypes) {
    for (const DType shard : kDTypes) {
      ExpectEqualsReference(absl::StrCat(Name(gradient), " to ", Name(shard)),
                            {.gradient_dtype = gradient, .shard_dtype = shard});
    }
  }
}

TEST_F(AdamKernels, UpdateTakesAnyLengthAndAlignment) {
  for (const size_t elements : {1, 3, 4, 5, 1024, 2049}) {
    for (const size_t offset : {0, 1, 2}) {
      ExpectEqualsReference(absl::StrCat(elements, " elements, offset ", offset),
                            {.elements = elements, .offset = offset});
    }
  }
}

TEST_F(AdamKernels, UpdateElsewhereLeavesItsSourcesAlone) {
  HyperParameters values;
  values.amsgrad = true;
  ExpectEqualsReference("elsewhere", {.values = values, .in_place = false});
}

TEST_F(AdamKernels, UpdateWithoutAShardWritesNone) {
  ExpectEqualsReference("no shard", {.wants_shard = false});
}

TEST_F(AdamKernels, TheShardMayLieWhereTheGradientWas) {
  const Case c = {.elements = 1030};
  const std::vector<std::byte> gradient = ToWire(RandomFloats(c.elements, 6), DType::kBFloat16);
  Planes<HostArray> host;
  host.gradient = host.shard = gradient;
  host.master = host.exp_avg = RandomFloats(c.elements, 7);
  host.exp_avg_sq = std::vector<float>(c.elements, 0.5f);
  host.max_exp_avg_sq = host.new_master = host.new_exp_avg = host.new_exp_avg_sq =
      host.new_max_exp_avg_sq = host.master;
  Planes<DeviceArray> on_device = ToDevice(c, host);
  AdamRun run = RunOf(c, on_device);
  run.shard = on_device.gradient.data();
  Run(UpdateAdam(stream(), run));
  UpdateAdamReference(RunOf(c, host));
  EXPECT_EQ(Download(on_device.gradient), host.shard);
}

TEST_F(AdamKernels, BlockSumsOfManyRunsAreAddedInTheWrittenOrder) {
  for (const DType dtype : kDTypes) {
    const size_t size = SizeBytes(dtype);
    std::vector<float> gradient = RandomFloats(400 * kBlockElements, 8, 1e3f);
    // In some blocks numbers of every kind, where finite.
    const std::vector<float> hard = HardFloats(gradient.size(), 9);
    for (size_t i = 0; i < gradient.size(); ++i) {
      if (i / kBlockElements % 3 == 1 && std::isfinite(hard[i])) gradient[i] = hard[i];
    }
    gradient[5 * kBlockElements + 17] = INFINITY;
    gradient[8 * kBlockElements + 255] = NAN;
    const std::vector<std::byte> wire = ToWire(gradient, dtype);
    const auto from = Upload(wire);
    // Short blocks at the end of a run, one alone, and runs that begin at no block's place.
    std::vector<BlockRun> runs;
    std::vector<double> expected;
    int64_t begin = 0;
    for (const int64_t elements : {256, 1, 15, 16, 17, 255, 257, 333 * 256 + 100, 5 * 256}) {
      runs.push_back({.gradient = from.data() + begin * size,
                      .elements = elements,
                      .first_block = static_cast<int64_t>(expected.size()),
                      .dtype = dtype});
      for (int64_t at = 0; at < elements; at += kBlockElements) {
        expected.push_back(BlockSumOfSquaresReference(wire.data() + (begin + at) * size, dtype,
                                                      std::min(kBlockElements, elements - at)));
      }
      begin += elements + 3;
    }
    const auto table = Upload(runs);
    const auto sums = Poisoned<double>(expected.size());
    Run(BlockSumsOfSquares(stream(), static_cast<int>(runs.size()), table.data(),
                           static_cast<int64_t>(expected.size()), sums.data()));
    ExpectSameBits("sum of block", Download(sums), expected);
  }
}

TEST_F(AdamKernels, WireGradientsAreAssignedThenAdded) {
  for (const DType dtype : kDTypes) {
    for (const size_t offset : {0, 1}) {
      const size_t elements = 1031;
      const std::vector<std::byte> first = ToWire(HardFloats(elements, 10), dtype);
      const std::vector<std::byte> second = ToWire(HardFloats(elements, 11), dtype);
      const auto sum = Poisoned<float>(elements, offset);
      const auto d_first = Upload(first, offset * SizeBytes(dtype));
      const auto d_second = Upload(second, offset * SizeBytes(dtype));
      Run(AddWireGradient(stream(), elements, d_first.data(), dtype, /*assign=*/true, sum.data()));
      std::vector<float> expected = FromWire(first, dtype);
      ExpectSameBits("assigned", Download(sum), expected);
      Run(AddWireGradient(stream(), elements, d_second.data(), dtype, /*assign=*/false,
                          sum.data()));
      const std::vector<float> added = FromWire(second, dtype);
      for (size_t i = 0; i < elements; ++i) expected[i] += added[i];
      ExpectSameBits("added", Download(sum), expected);
    }
  }
}

}  // namespace
}  // namespace ballast::worker::cuda
