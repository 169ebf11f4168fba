#include "cpu_optimizer_service/common/packed/packed_state.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/packed/codes.h"
#include "cpu_optimizer_service/common/rounding.h"

namespace ballast {
namespace {

// By a plane of 8-bit codes.
Plane ScaleOf(Plane plane) {
  return plane == Plane::kExpAvg ? Plane::kExpAvgScale : Plane::kExpAvgSqScale;
}

float Largest(absl::Span<const float> values) {
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::fabs(value));
  return largest;
}

// A group of 8-bit codes, from `begin` on.
void WriteGroup(const Slot& slot, Plane plane, int64_t begin, absl::Span<const float> values,
                const Thresholds& thresholds) {
  const float scale = Largest(values);
  const float factor = FactorOf(scale);
  slot.As<float>(ScaleOf(plane))[begin / kPackedGroup] = scale;
  for (size_t i = 0; i < values.size(); ++i) {
    if (plane == Plane::kExpAvg) {
      slot.As<int8_t>(plane)[begin + i] = PackExpAvg(values[i], factor, thresholds[i]);
    } else {
      slot.As<uint8_t>(plane)[begin + i] = PackExpAvgSq(values[i], factor, thresholds[i]);
    }
  }
}

void WriteValues(const Slot& slot, Plane plane, int64_t begin, absl::Span<const float> values,
                 const Thresholds& thresholds) {
  const auto elements = static_cast<int64_t>(values.size());
  if (slot.format == StateFormat::kFloat32) {
    std::copy(values.begin(), values.end(), slot[plane] + begin);
  } else if (plane == Plane::kMaster) {
    std::ranges::transform(values, slot.As<uint16_t>(plane) + begin, PackWeight);
    std::ranges::transform(values, slot.As<uint16_t>(Plane::kMasterRemainder) + begin,
                           PackRemainder);
  } else if (slot.format == StateFormat::kBFloat16) {
    std::ranges::transform(values, slot.As<uint16_t>(plane) + begin, FloatToBFloat16);
  } else {
    for (int64_t i = 0; i < elements; i += kPackedGroup) {
      WriteGroup(slot, plane, begin + i, values.subspan(i, kPackedGroup), thresholds);
    }
  }
}

Thresholds ToNearest() {
  Thresholds all;
  all.fill(1 << (kCodeShift - 1));
  return all;
}

}  // namespace

PackedThresholds::PackedThresholds(int64_t update_count) {
  const auto value = [&](uint32_t number) {
    // Of its place and its update a hash without any pattern: C. Wellons, "lowbias32", 2018.
    uint32_t x = static_cast<uint32_t>(update_count) * (2 * kPackedGroup) + number;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    x ^= x >> 16;
    // Neither 0 nor all, so that a value that is that of a code gets that code in spite of roundings.
    return static_cast<int32_t>(x >> 23 << (kCodeShift - 9) | 1u << (kCodeShift - 10));
  };
  for (uint32_t i = 0; i < kPackedGroup; ++i) {
    exp_avg[i] = value(2 * i);
    exp_avg_sq[i] = value(2 * i + 1);
  }
}

std::optional<int64_t> FirstBadValue(Plane plane, StateFormat format,
                                     absl::Span<const float> values) {
  const bool squares = IsOfSquares(plane);
  const auto bad = std::ranges::find_if_not(
      values, [&](float value) { return Holds(format, plane, value) && (!squares || value >= 0); });
  return bad == values.end() ? std::nullopt : std::optional<int64_t>(bad - values.begin());
}

StateBounds BoundsStored(StateBounds bounds, StateFormat format) {
  if (format == StateFormat::kFloat32) return bounds;
  // A step of bf16, and more than the roundings of a code.
  constexpr double kRounding = 1 + 0x1p-7;
  for (size_t place = 1; place < bounds.planes.size(); ++place) {
    if (!(bounds.planes[place] <= kMostPackedMoment)) return {};
    bounds.planes[place] *= kRounding;
  }
  return bounds;
}

void ReadPlane(const Slot& slot, Plane plane, int64_t begin, absl::Span<float> out) {
  const auto elements = static_cast<int64_t>(out.size());
  if (slot.format == StateFormat::kFloat32) {
    std::copy_n(slot[plane] + begin, elements, out.begin());
  } else if (plane == Plane::kMaster) {
    std::transform(slot.As<uint16_t>(plane) + begin, slot.As<uint16_t>(plane) + begin + elements,
                   slot.As<uint16_t>(Plane::kMasterRemainder) + begin, out.begin(), UnpackMaster);
  } else if (slot.format == StateFormat::kBFloat16) {
    std::transform(slot.As<uint16_t>(plane) + begin, slot.As<uint16_t>(plane) + begin + elements,
                   out.begin(), BFloat16ToFloat);
  } else {
    const float* const scales = slot.As<float>(ScaleOf(plane));
    for (int64_t i = 0; i < elements; ++i) {
      const float scale = scales[(begin + i) / kPackedGroup];
      out[i] = plane == Plane::kExpAvg ? UnpackExpAvg(slot.As<int8_t>(plane)[begin + i], scale)
                                       : UnpackExpAvgSq(slot.As<uint8_t>(plane)[begin + i], scale);
    }
  }
}

void WritePlane(const Slot& slot, Plane plane, int64_t begin, absl::Span<const float> values) {
  static const Thresholds to_nearest = ToNearest();
  WriteValues(slot, plane, begin, values, to_nearest);
}

void CopyStored(const Slot& from, const Slot& to, int64_t begin, int64_t elements) {
  const auto each = [&](Plane plane, int64_t first_byte, int64_t bytes) {
    if (from.As<std::byte>(plane) == to.As<std::byte>(plane)) return;
    std::memcpy(to.As<std::byte>(plane) + first_byte, from.As<std::byte>(plane) + first_byte,
                static_cast<size_t>(bytes));
  };
  for (int kind = 0; kind < kStoredPlaneKinds; ++kind) {
    const auto plane = static_cast<Plane>(kind);
    if (from.planes[kind] == nullptr) continue;
    if (IsScale(plane)) {
      // The scale of a group that padding begins in is that of the parameter before it.
      const int64_t first = DivideUp(begin, kPackedGroup) * int64_t{sizeof(float)};
      const int64_t end = StoredBytes(from.format, plane, begin + elements);
      each(plane, first, std::max<int64_t>(end - first, 0));
    } else {
      each(plane, StoredBytes(from.format, plane, begin),
           StoredBytes(from.format, plane, elements));
    }
  }
}

void UpdatePackedReference(const PackedRun& run) {
  const PlaneList planes = PlanesOf(*run.rule.values);
  const PackedThresholds thresholds(run.rule.update_count);
  const uint32_t sum_threshold = SumThreshold(run.rule.update_count);
  float values[kMaxPlanes][kPackedGroup] = {};
  for (int64_t i = 0; i < run.rule.elements; i += kPackedGroup) {
    RuleRun group = run.rule;
    group.elements = std::min(kPackedGroup, run.rule.elements - i);
    group.gradient =
        static_cast<const std::byte*>(run.rule.gradient) + i * SizeBytes(run.rule.gradient_dtype);
    group.shard = nullptr;
    for (size_t place = 0; place < planes.size(); ++place) {
      group.from[place] = group.to[place] = values[place];
      ReadPlane(run.from, planes[place], run.from_begin + i,
                absl::MakeSpan(values[place], group.elements));
    }
    UpdateReference(group);
    for (size_t place = 0; place < planes.size(); ++place) {
      if (planes[place] == Plane::kSum) {
        for (float& sum : values[place]) sum = BFloat16ToFloat(PackSum(sum, sum_threshold));
      }
      WriteValues(run.to, planes[place], run.to_begin + i,
                  absl::MakeConstSpan(values[place], group.elements),
                  planes[place] == Plane::kExpAvg ? thresholds.exp_avg : thresholds.exp_avg_sq);
    }
    if (run.rule.shard == nullptr) continue;
    for (int64_t k = 0; k < group.elements; ++k) {
      if (run.rule.shard_dtype == DType::kBFloat16) {
        const uint16_t weight = PackWeight(values[0][k]);
        std::memcpy(static_cast<uint16_t*>(run.rule.shard) + i + k, &weight, sizeof(weight));
      } else {
        StoreElement(run.rule.shard, run.rule.shard_dtype, i + k, values[0][k]);
      }
    }
  }
}

}  // namespace ballast
