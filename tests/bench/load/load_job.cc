#include "tests/bench/load/load_job.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/rule.h"

namespace ballast::bench {
namespace {

uint64_t Mixed(uint64_t x) {  // splitmix64.
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A bf16 of either sign between 1/16 and 1/4 from 9 random bits.
uint16_t GradientElement(uint64_t random) {
  const auto sign = static_cast<uint16_t>((random & 0x100) << 7);
  return static_cast<uint16_t>(sign | (0x3d80 + (random & 0xff)));
}

// Root of the mean square of those: mantissas are even over [1, 2), exponents over -4 and -3.
const double kGradientRms = std::sqrt(7.0 / 3.0 * (1.0 / 256 + 1.0 / 64) / 2);

// As large as gradients are: with a small one Adam's update is the same whatever they are scaled
// by, and one that was counted twice in every step would not show in the weights.
constexpr double kEps = 0.1;

constexpr double kDivisors[] = {1, 1.5, 2.25};
constexpr double kMostDivisor = 2.25;

double MaxNormOf(const LoadOptions& options) {
  // Micro-steps add up, and nothing is divided.
  const double norm = kGradientRms * static_cast<double>(options.micro_steps) *
                      std::sqrt(static_cast<double>(options.parameters));
  // Steps' divisors make the norm smaller, by no more than kMostDivisor.
  switch (options.clipping) {
    case Clipping::kNone:
      return 0;
    case Clipping::kNotFiring:
      return 10 * norm;
    case Clipping::kFiring:
      return norm / kMostDivisor / 10;
  }
  return 0;
}

}  // namespace

StepVote LoadVote(const LoadOptions& options) {
  return {.clipping = {.max_norm = MaxNormOf(options)}};
}

JobSpec MakeLoadJob(const LoadOptions& options, const std::string& name) {
  JobSpec spec;
  spec.name = name;
  spec.max_micro_steps = static_cast<uint32_t>(options.micro_steps);
  spec.update_mode = options.update;
  if (options.rule == Rule::kMuon) spec.newton_schulz = Orthogonalizer::kWorkers;
  for (int64_t i = 0; i < options.groups; ++i) {
    spec.groups.push_back({.name = absl::StrCat("group", i)});
    spec.groups.back().hyper_parameters = DefaultsOf(options.rule);
    spec.groups.back().hyper_parameters.eps = kEps;
    // With the default state in bf16 is refused.
    if (options.state == StateFormat::kBFloat16) spec.groups.back().hyper_parameters.beta2 = 0.95;
  }
  const int64_t each = options.parameters / options.tensors;
  const int64_t rest = options.parameters % options.tensors;
  for (int64_t i = 0; i < options.tensors; ++i) {
    spec.layout.parameters.push_back({.name = absl::StrCat("tensor", i),
                                      // Vectors are in fp32, and not for Muon.
                                      .shape = {each + (i < rest ? 1 : 0), 1},
                                      .group = static_cast<int>(i % options.groups)});
  }
  if (options.state != StateFormat::kFloat32) {
    spec.layout.states.assign(spec.groups.size(), {.format = options.state});
  }
  const int ranks = static_cast<int>(options.ranks);
  spec.layout.world_size = ranks;
  spec.layout.group_count = static_cast<int>(options.groups);
  // A rank's shard of a bucket is a whole chunk.
  spec.layout.partitions =
      PartitionsOf(MakeBuckets(FlatElements(spec.layout), ranks, kMaxChunkElements * ranks), ranks);
  return spec;
}

GradientScale LoadScale(const JobSpec& spec, uint64_t step) {
  const double divisor = kDivisors[step % std::size(kDivisors)];
  return {.divisors = std::vector<double>(spec.groups.size(), divisor)};
}

template <class Set>
void LoadValues::ForEach(int index, uint64_t seed, const Set& set) const {
  const Chunk& chunk = layout_->chunks()[index];
  const uint64_t start =
      Mixed(Mixed(seed + static_cast<uint64_t>(chunk.group)) + static_cast<uint64_t>(chunk.begin));
  layout_->VisitPieces(index, [&](const ChunkPiece& piece) {
    for (int64_t i = piece.chunk_offset; i < piece.chunk_offset + piece.elements; ++i) {
      set(i, start + static_cast<uint64_t>(i));
    }
  });
}

void LoadValues::FillGradient(int index, absl::Span<std::byte> out) const {
  std::memset(out.data(), 0, out.size());
  ForEach(index, seed_, [&](int64_t i, uint64_t number) {
    // Four elements have one random number.
    const int fourth = static_cast<int>(i % 4);
    const uint16_t element = GradientElement(Mixed(number - fourth) >> (16 * fourth));
    std::memcpy(out.data() + sizeof(element) * i, &element, sizeof(element));
  });
}

void LoadValues::FillWeights(int index, absl::Span<float> out) const {
  absl::c_fill(out, 0.0f);
  ForEach(index, ~seed_, [&](int64_t i, uint64_t number) {
    out[i] = static_cast<float>(static_cast<int64_t>(Mixed(number)) >> 40) * 0x1p-27f;
  });
}

}  // namespace ballast::bench
