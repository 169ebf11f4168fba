#include "tests/histories/history.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "tests/histories/random.h"

namespace ballast::histories {
namespace {

// In [-1, 1), and not 0.
float UnitValue(uint64_t bits) {
  return (static_cast<float>(static_cast<int64_t>(bits >> 40) - (1 << 23)) + 0.5f) / (1 << 23);
}

void ShardOverMesh(const JobPlan& job, LayoutSpec& layout) {
  const int two = job.world_size % 2 == 0 ? 2 : 1;
  constexpr Placement kReplicate;
  constexpr Placement kRows = {.shard_dim = 0};
  constexpr Placement kColumns = {.shard_dim = 1};
  std::vector<Placement> placements;
  switch (job.sharding) {
    case ShardingPlan::kBuckets:
      return;
    case ShardingPlan::kRows:
      placements = {kRows};
      break;
    case ShardingPlan::kColumns:
      placements = {kColumns};
      break;
    case ShardingPlan::kReplicas:
      placements = {kReplicate, kRows};
      break;
    case ShardingPlan::kRowsAndColumns:
      placements = {kRows, kColumns};
      break;
  }
  layout.mesh = {{"all", job.world_size}};
  if (placements.size() == 2) layout.mesh = {{"outer", two}, {"inner", job.world_size / two}};
  for (ParameterSpec& parameter : layout.parameters) {
    if (parameter.trainable) parameter.placements = placements;
  }
}

void NameMembers(const JobPlan& job, JobSpec& spec) {
  if (job.members == 0) return;
  std::map<int, int> number;  // By the plan's.
  for (int rank = 0; rank < job.world_size; ++rank) number[job.homes[rank] % job.members] = 0;
  for (auto& [planned, member] : number) {
    member = static_cast<int>(spec.members.size());
    spec.members.push_back({absl::StrCat("host", planned)});
  }
  for (int rank = 0; rank < job.world_size; ++rank) {
    spec.homes.push_back(number[job.homes[rank] % job.members]);
  }
}

}  // namespace

std::string NameOf(const ParameterPlan& parameter) {
  return absl::StrFormat("p%03d", parameter.id);
}

std::vector<int64_t> ShapeOf(const JobPlan& job, const ParameterPlan& parameter) {
  const bool needs_matrices = HasTwoRounds(job.groups[parameter.group].hyper_parameters.rule) ||
                              job.sharding != ShardingPlan::kBuckets ||
                              parameter.elements >= kLeastPackedElements;
  if (!needs_matrices) return {parameter.elements};
  // Of large ones rows are often whole groups of packed state.
  int64_t columns = parameter.elements >= kLeastPackedElements ? 128 : 16;
  while (parameter.elements % columns != 0) --columns;
  const int64_t rows = parameter.elements / columns;
  if (parameter.id % 2 == 0) return {rows, columns};
  return {columns, rows};
}

bool HasDeath(const History& history) {
  return std::any_of(history.attempts.begin(), history.attempts.end(), [](const Attempt& attempt) {
    return std::any_of(attempt.events.begin(), attempt.events.end(),
                       [](const Event& event) { return event.kind == EventKind::kDeath; });
  });
}

JobSpec SpecOf(const JobPlan& job, const std::string& name) {
  JobSpec spec;
  spec.name = name;
  spec.on_abort = job.on_abort;
  spec.newton_schulz = job.newton_schulz;
  spec.keep_previous = job.keep_previous;
  spec.unused_policy = job.unused_policy;
  spec.max_micro_steps = job.max_micro_steps;
  spec.update_mode = job.update_mode;
  for (size_t group = 0; group < job.groups.size(); ++group) {
    const GroupPlan& plan = job.groups[group];
    spec.groups.push_back({.name = absl::StrCat("group", group),
                           .hyper_parameters = plan.hyper_parameters,
                           .wire_dtype = plan.wire_dtype,
                           .return_dtype = plan.return_dtype});
  }
  NameMembers(job, spec);
  LayoutSpec& layout = spec.layout;
  const bool any = std::ranges::any_of(
      job.groups, [](const GroupPlan& plan) { return plan.state != StateSpec(); });
  for (const GroupPlan& plan : job.groups) {
    if (any) layout.states.push_back(plan.state);
  }
  layout.world_size = job.world_size;
  layout.group_count = static_cast<int>(job.groups.size());
  layout.chunk_elements = job.chunk_elements;
  for (const ParameterPlan& parameter : job.parameters) {
    layout.parameters.push_back({.name = NameOf(parameter),
                                 .shape = ShapeOf(job, parameter),
                                 .group = parameter.group,
                                 .trainable = parameter.trainable});
  }
  if (job.sharding != ShardingPlan::kBuckets) {
    ShardOverMesh(job, layout);
    return spec;
  }
  const std::vector<int64_t> flat = FlatElements(layout);
  layout.partitions =
      PartitionsOf(MakeBuckets(flat, job.world_size, job.bucket_elements), job.world_size);
  return spec;
}

Attempt TryOf(const Attempt& attempt, uint32_t number) {
  Attempt of = attempt;
  if (number == 0) return of;
  of.gradient_seed = Mix(attempt.gradient_seed + number);
  if (number % 2 == 0) return of;
  of.scale.loss_scale *= 2;
  of.overrides.clear();
  of.overrides[0].lr = 1e-3 * number;
  if (attempt.spoil != Spoil::kNone) return of;  // It may need what is used.
  // Each parameter is used as its neighbour was.
  std::vector<uint32_t> last;
  for (auto& [id, used] : of.used) std::swap(used, last);
  if (!of.used.empty()) of.used.begin()->second = last;
  return of;
}

std::string TrainerState(const Attempt& attempt) {
  return absl::StrCat("state ", attempt.gradient_seed);
}

float FirstWeight(const ParameterPlan& parameter, int64_t element) {
  return UnitValue(Mix(Mix(parameter.id) + static_cast<uint64_t>(element)));
}

StateWrite WriteOf(const JobPlan& job, const Attempt& attempt, uint64_t step) {
  StateWrite write = {.step = step};
  const uint64_t bits = Mix(attempt.write_seed);
  const auto planes_of = [&](const ParameterPlan& parameter) {
    return PlanesOf(job.groups[parameter.group].hyper_parameters);
  };
  // Those of one parameter. Others take part if they have them all.
  const PlaneList planes = planes_of(job.parameters[bits % job.parameters.size()]);
  for (size_t place = 0; place < std::min<size_t>(3, planes.size()); ++place) {
    if ((bits >> place & 1) != 0) write.planes.push_back(planes[place]);
  }
  bool counts = (bits >> 3 & 1) != 0 || write.planes.empty();
  if (step == 0 && HoldsFirstUpdate(write)) counts = true;
  for (size_t p = 0; p < job.parameters.size() && attempt.write_seed != 0; ++p) {
    const ParameterPlan& parameter = job.parameters[p];
    if (!parameter.trainable || (bits >> (8 + parameter.id) & 1) == 0) continue;
    if (!std::ranges::includes(planes_of(parameter), write.planes)) continue;
    write.parameters.push_back(static_cast<int>(p));
    if (counts)
      write.update_counts.push_back(static_cast<int64_t>((bits >> parameter.id) % (step + 1)));
  }
  return write;
}

float WrittenValue(const Attempt& attempt, Plane plane, const ParameterPlan& parameter,
                   int64_t element) {
  const float value =
      UnitValue(Mix(attempt.write_seed + 4 * Mix(parameter.id) + static_cast<uint64_t>(plane)) +
                static_cast<uint64_t>(element));
  return IsOfSquares(plane) ? value * value : value;
}

std::vector<int> LeftOutOf(const JobPlan& job, const Attempt& attempt) {
  std::vector<int> left_out;
  std::set<int> groups;  // Of which one parameter stays.
  const uint64_t bits = Mix(attempt.derive_seed);
  for (size_t p = 0; p < job.parameters.size() && attempt.derive_seed != 0; ++p) {
    const ParameterPlan& parameter = job.parameters[p];
    if (!parameter.trainable || groups.insert(parameter.group).second) continue;
    if ((bits >> (parameter.id % 64) & 1) != 0) left_out.push_back(static_cast<int>(p));
  }
  return left_out;
}

float WeightAfterwards(const Attempt& attempt, const ParameterPlan& parameter, int64_t element) {
  return UnitValue(Mix(attempt.derive_seed + Mix(parameter.id)) + static_cast<uint64_t>(element));
}

bool IsUsed(const JobPlan& job, const Attempt& attempt, int id, uint32_t begin, uint32_t end) {
  const auto found = attempt.used.find(id);
  if (found == attempt.used.end()) return false;
  const uint32_t ranks = (1u << job.world_size) - 1;
  for (uint32_t m = begin; m < std::min<uint32_t>(end, found->second.size()); ++m) {
    if ((found->second[m] & ranks) != 0) return true;
  }
  return false;
}

void VaryOrthogonal(int variant, std::vector<uint16_t>& orthogonal) {
  for (uint16_t& bits : orthogonal) {
    if (variant % 3 == 1) bits ^= 0x8000;
    if (variant % 3 == 2) bits = 0;
  }
}

std::vector<float> GradientOf(const JobPlan& job, const Attempt& attempt,
                              const ParameterPlan& parameter, int segment) {
  const std::vector<uint32_t>& ends = attempt.segments[parameter.group];
  const uint32_t begin = segment == 0 ? 0 : ends[segment - 1];
  std::vector<float> gradient(parameter.elements, 0.0f);
  if (!IsUsed(job, attempt, parameter.id, begin, ends[segment])) return gradient;
  const uint64_t seed = Mix(Mix(attempt.gradient_seed + parameter.id) + segment);
  const DType dtype = job.groups[parameter.group].wire_dtype;
  const auto round = [&](float value) {
    float wire = 0;
    StoreElement(&wire, dtype, 0, value);
    return LoadElement(&wire, dtype, 0);
  };
  for (int64_t i = 0; i < parameter.elements; ++i) {
    gradient[i] = round(UnitValue(Mix(seed + i)) * attempt.gradient_size);
  }
  for (const Poison& poison : attempt.poisons) {
    if (poison.parameter != parameter.id || poison.segment != segment) continue;
    if (poison.element < parameter.elements) gradient[poison.element] = round(poison.value);
  }
  return gradient;
}

int SpoiledParameter(const JobPlan& job, const Attempt& attempt) {
  for (int p = 0; p < static_cast<int>(job.parameters.size()); ++p) {
    const ParameterPlan& parameter = job.parameters[p];
    if (!parameter.trainable || parameter.elements == 0) continue;
    if (IsUsed(job, attempt, parameter.id)) return p;
  }
  return -1;
}

}  // namespace ballast::histories
