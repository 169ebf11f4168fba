// Random layouts: of parameters in two groups, some without elements, cut into random partitions of
// flat spaces or over a random mesh. Some have packed state, and parameters that are large enough for it.
#ifndef BALLAST_TESTS_SUPPORT_RANDOM_LAYOUT_H_
#define BALLAST_TESTS_SUPPORT_RANDOM_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/layout.h"

namespace ballast {

inline constexpr int kRandomParameters = 6;

inline void AddRandomParameters(std::mt19937& random, LayoutSpec& spec) {
  const bool packed = random() % 3 == 0;
  if (packed) {
    spec.states = {{.format = StateFormat::k8Bit, .fallback = true},
                   {.format = static_cast<StateFormat>(random() % 3), .fallback = true}};
  }
  for (int p = 0; p < kRandomParameters; ++p) {
    ParameterSpec& parameter = spec.parameters.emplace_back();
    parameter.name = std::to_string(p);
    parameter.group = static_cast<int>(random() % 2);
    const size_t dimensions = random() % 4;
    for (size_t d = 0; d < dimensions; ++d) parameter.shape.push_back(random() % 20);
    if (!packed || p % 3 != 0) continue;
    parameter.shape = {64 + static_cast<int64_t>(random() % 9),
                       64 + 16 * static_cast<int64_t>(random() % 5)};
  }
}

inline LayoutSpec RandomMesh(std::mt19937& random) {
  LayoutSpec spec{.group_count = 2, .parameters = {}, .chunk_elements = 256};
  AddRandomParameters(random, spec);
  const size_t dimensions = 1 + random() % 2;
  for (size_t m = 0; m < dimensions; ++m) {
    spec.mesh.push_back({std::to_string(m), static_cast<int>(1 + random() % 3)});
    spec.world_size *= spec.mesh.back().size;
  }
  for (ParameterSpec& parameter : spec.parameters) {
    for (size_t m = 0; m < dimensions; ++m) {
      const int dims = static_cast<int>(parameter.shape.size());
      parameter.placements.push_back({.shard_dim = static_cast<int>(random() % (dims + 1)) - 1});
    }
  }
  return spec;
}

inline LayoutSpec RandomFlat(std::mt19937& random) {
  LayoutSpec spec{.world_size = static_cast<int>(1 + random() % 5),
                  .group_count = 2,
                  .parameters = {},
                  .chunk_elements = 512};
  AddRandomParameters(random, spec);
  const std::vector<int64_t> flat = FlatElements(spec);
  for (int group = 0; group < 2; ++group) {
    for (int64_t begin = 0; begin < flat[group];) {
      const int64_t blocks = 1 + static_cast<int64_t>(random() % 5);
      const int64_t end = std::min(begin + blocks * kBlockElements, flat[group]);
      const int rank = static_cast<int>(random() % spec.world_size);
      spec.partitions.push_back({.rank = rank, .group = group, .begin = begin, .end = end});
      begin = end;
    }
  }
  std::shuffle(spec.partitions.begin(), spec.partitions.end(), random);
  return spec;
}

inline LayoutSpec RandomLayout(std::mt19937& random, bool has_mesh) {
  return has_mesh ? RandomMesh(random) : RandomFlat(random);
}

}  // namespace ballast

#endif  // BALLAST_TESTS_SUPPORT_RANDOM_LAYOUT_H_
