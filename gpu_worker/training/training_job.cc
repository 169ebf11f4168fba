#include "gpu_worker/training/training_job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {
namespace {

GroupSpec MakeGroup(std::string name, Rule rule, double weight_decay,
                    const TrainingJobOptions& options) {
  GroupSpec group;
  group.name = std::move(name);
  group.hyper_parameters = DefaultsOf(rule);
  // This rate is in force until the first step begins: each step says that of its schedule
  // (Trainer::Settings).
  group.hyper_parameters.lr = options.lr;
  // As in GPT-3; short runs forget first gradients sooner.
  if (rule == Rule::kAdam) group.hyper_parameters.beta2 = 0.95;
  if (rule == Rule::kSgd) group.hyper_parameters.momentum = 0.9;
  // So that one lr does for all groups.
  group.hyper_parameters.match_rms_adamw = rule == Rule::kMuon;
  group.hyper_parameters.weight_decay = weight_decay;
  group.wire_dtype = options.wire_dtype;
  group.return_dtype = options.weights_dtype;
  return group;
}

}  // namespace

absl::StatusOr<TrainingJob> MakeTrainingJob(absl::Span<const ModelParameter> parameters,
                                            const TrainingJobOptions& options) {
  if (options.bucket_elements < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--bucket-elements=", options.bucket_elements, " must be positive"));
  }
  JobSpec spec;
  spec.name = options.name;
  // Their order is that of kDecayGroup, kNoDecayGroup and kMatrixGroup.
  const bool has_matrices = options.rule == Rule::kMuon;
  const Rule of_others = has_matrices ? Rule::kAdam : options.rule;
  spec.groups = {MakeGroup("decay", of_others, options.weight_decay, options),
                 MakeGroup("no_decay", of_others, 0.0, options)};
  if (has_matrices) {
    spec.groups.push_back(MakeGroup("matrices", options.rule, options.weight_decay, options));
  }
  spec.unused_policy = options.unused_policy;
  spec.max_micro_steps = options.micro_steps;
  spec.update_mode = options.update_mode;
  spec.keep_previous = options.keep_previous;
  spec.newton_schulz = options.newton_schulz;
  spec.layout.world_size = options.world_size;
  spec.layout.group_count = static_cast<int>(spec.groups.size());
  if (options.state != StateFormat::kFloat32) {
    spec.layout.states.resize(spec.groups.size());
    spec.layout.states[kDecayGroup].format = options.state;
  }
  spec.layout.chunk_elements = options.chunk_elements;
  for (const ModelParameter& parameter : parameters) {
    int group = parameter.decay ? kDecayGroup : kNoDecayGroup;
    if (has_matrices && parameter.shape.size() == 2 && !parameter.embedding) group = kMatrixGroup;
    spec.layout.parameters.push_back(
        {.name = parameter.name, .shape = parameter.shape, .group = group, .trainable = true});
  }
  // Partitions follow the buckets, so that a rank's part of each reduce-scatter is whole chunks of
  // its own.
  std::vector<Bucket> buckets =
      MakeBuckets(FlatElements(spec.layout), options.world_size, options.bucket_elements);
  spec.layout.partitions = PartitionsOf(buckets, options.world_size);
  BALLAST_RETURN_IF_ERROR(Validate(spec));

  BALLAST_ASSIGN_OR_RETURN(Layout layout, Layout::Create(spec.layout));
  std::vector<int64_t> group_elements(spec.groups.size(), 0);
  for (const Bucket& bucket : buckets) {
    // Shards of a bucket have one size, in whole blocks, so the last may reach past the end.
    group_elements[bucket.group] = std::max(
        group_elements[bucket.group], bucket.begin + bucket.shard_elements * options.world_size);
  }
  return TrainingJob{std::move(spec), std::move(layout), std::move(buckets),
                     std::move(group_elements)};
}

void FillInitialValues(const InitialValues& initial_values, const Layout& layout, int chunk,
                       absl::Span<float> values) {
  // Pieces leave out the padding.
  std::fill(values.begin(), values.end(), 0.0f);
  for (const ChunkPiece& piece : layout.Pieces(chunk)) {
    initial_values(piece.parameter, piece.parameter_offset,
                   values.subspan(piece.chunk_offset, piece.elements));
  }
}

}  // namespace ballast::worker
