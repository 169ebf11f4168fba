#include "gpu_worker/training/local_optimizer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/adam.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/base/stopwatch.h"

namespace ballast::worker {

LocalOptimizer::LocalOptimizer(const JobSpec& job, const Layout& layout, Collective& collective,
                               std::unique_ptr<LocalArithmetic> arithmetic)
    : layout_(layout),
      collective_(collective),
      arithmetic_(std::move(arithmetic)),
      max_norm_(job.max_norm),
      unused_policy_(job.unused_policy),
      groups_(job.groups),
      ledger_(layout.chunks().size()),
      used_(layout.spec().parameters.size()),
      update_counts_(layout.spec().parameters.size(), 0) {
  for (const GroupSpec& group : groups_) {
    Check(!group.hyper_parameters.amsgrad, "the local optimizer has no amsgrad");
  }
}

absl::Status LocalOptimizer::Join(const FillChunk& first_weights) {
  std::vector<float> values;
  for (const int index : my_chunks()) {
    values.resize(layout_.chunks()[index].elements);
    first_weights(index, absl::MakeSpan(values));
    BALLAST_RETURN_IF_ERROR(arithmetic_->SetFirstWeights(index, values));
  }
  return arithmetic_->Finish();
}

absl::Status LocalOptimizer::BeginStep(const StepSettings& settings) {
  scale_ = settings.scale;
  for (const auto& [group, overrides] : settings.overrides) {
    groups_[group].hyper_parameters = Apply(groups_[group].hyper_parameters, overrides);
    BALLAST_RETURN_IF_ERROR(Validate(groups_[group].hyper_parameters));
  }
  std::fill(used_.begin(), used_.end(), 0.0);
  for (const int index : my_chunks()) ledger_[index] = {};
  return absl::OkStatus();
}

absl::Status LocalOptimizer::Push(client::GradientPush push) {
  Entry& entry = ledger_[push.chunk];
  Check(layout_.chunks()[push.chunk].rank == collective_.rank(), "a rank pushes its own chunks");
  // The same order that the service's ledger requires.
  if (push.micro_step_begin != entry.next_micro_step) {
    if (push.released) push.released();
    return absl::FailedPreconditionError(
        absl::StrCat("step ", committed_step_ + 1, ": chunk ", push.chunk, " expects micro-step ",
                     entry.next_micro_step, ", got ", push.micro_step_begin));
  }
  if (!push.empty) {
    BALLAST_RETURN_IF_ERROR(arithmetic_->AddGradient(push.chunk, /*first=*/!entry.has_gradient,
                                                     push.payload, std::move(push.released)));
    entry.has_gradient = true;
  } else if (push.released) {
    push.released();
  }
  entry.next_micro_step = push.micro_step_end;
  return absl::OkStatus();
}

absl::Status LocalOptimizer::EndMicroStep(uint32_t micro_step, const UsedParameters& used) {
  // Counts as doubles, so that FindUnused can add up the ranks with one all-reduce.
  if (used.all) {
    for (double& count : used_) ++count;
  } else {
    for (const int parameter : used.parameters) ++used_[parameter];
  }
  return absl::OkStatus();
}

absl::Status LocalOptimizer::CheckComplete(uint32_t micro_steps) const {
  for (const int index : my_chunks()) {
    if (ledger_[index].next_micro_step == micro_steps) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", committed_step_ + 1, ": rank ", collective_.rank(), " sent ",
        ledger_[index].next_micro_step, " of ", micro_steps, " micro-steps of chunk ", index));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int>> LocalOptimizer::FindUnused() {
  BALLAST_RETURN_IF_ERROR(collective_.AllReduceSum(absl::MakeSpan(used_)));
  std::vector<int> unused;
  for (size_t p = 0; p < used_.size(); ++p) {
    if (used_[p] > 0 || layout_.place(p).offset < 0) continue;
    if (unused_policy_ == UnusedPolicy::kError) {
      return absl::FailedPreconditionError(
          absl::StrCat("step ", committed_step_ + 1, ": no rank gave parameter ",
                       layout_.spec().parameters[p].name, " a gradient"));
    }
    unused.push_back(p);
  }
  return unused;
}

absl::StatusOr<std::vector<std::vector<double>>> LocalOptimizer::GatherBlockSums() {
  const int world_size = collective_.world_size();
  int64_t most_blocks = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    most_blocks = std::max(most_blocks, layout_.partition_elements(rank) / kBlockElements);
  }
  // An all-gather takes pieces of one size: that of the longest partition.
  std::vector<double> mine(most_blocks);
  absl::Span<double> next = absl::MakeSpan(mine);
  for (const int index : my_chunks()) {
    const int64_t blocks = layout_.chunks()[index].elements / kBlockElements;
    if (!ledger_[index].has_gradient) BALLAST_RETURN_IF_ERROR(arithmetic_->ZeroGradient(index));
    BALLAST_RETURN_IF_ERROR(arithmetic_->BlockSums(index, next.first(blocks)));
    next.remove_prefix(blocks);
  }
  BALLAST_RETURN_IF_ERROR(arithmetic_->Finish());
  std::vector<double> all(most_blocks * world_size);
  BALLAST_RETURN_IF_ERROR(collective_.AllGather(
      {reinterpret_cast<const std::byte*>(mine.data()), mine.size() * sizeof(double)},
      {reinterpret_cast<std::byte*>(all.data()), all.size() * sizeof(double)}));

  // Back in flat-space order, in which the service adds them: the same bits.
  std::vector<std::vector<double>> sums;
  for (int group = 0; group < layout_.group_count(); ++group) {
    sums.emplace_back(layout_.flat_blocks(group));
  }
  for (int rank = 0; rank < world_size; ++rank) {
    auto from = all.begin() + rank * most_blocks;
    for (const int index : layout_.chunks_of_rank(rank)) {
      const Chunk& chunk = layout_.chunks()[index];
      const int64_t blocks = chunk.elements / kBlockElements;
      std::copy(from, from + blocks, sums[chunk.group].begin() + chunk.begin / kBlockElements);
      from += blocks;
    }
  }
  return sums;
}

absl::StatusOr<client::StepDecision> LocalOptimizer::Seal(uint32_t micro_steps) {
  BALLAST_RETURN_IF_ERROR(CheckComplete(micro_steps));
  BALLAST_ASSIGN_OR_RETURN(const std::vector<int> unused, FindUnused());
  BALLAST_ASSIGN_OR_RETURN(const std::vector<std::vector<double>> sums, GatherBlockSums());
  std::vector<double> group_sums;
  for (const std::vector<double>& block_sums : sums) group_sums.push_back(GroupSum(block_sums));
  decision_ = Decide(group_sums, scale_, max_norm_);
  client::StepDecision result;
  result.step = committed_step_ + 1;
  result.applied = decision_.apply;
  result.norm = decision_.norm;
  result.clip_coefficient = decision_.clip_coefficient;
  for (const int p : unused) {
    result.unused_parameters.push_back(layout_.spec().parameters[p].name);
  }
  if (!decision_.apply) result.skip_reason = "the norm of the gradient is not finite";
  return result;
}

// Parameter by parameter, because each has an update count of its own. The padding after the last
// one stays zero.
absl::Status LocalOptimizer::Update(int index) {
  const int group = layout_.chunks()[index].group;
  for (const ChunkPiece& piece : layout_.Pieces(index)) {
    if (unused_policy_ == UnusedPolicy::kSkip && used_[piece.parameter] == 0) continue;
    BALLAST_RETURN_IF_ERROR(arithmetic_->Update(
        index, piece.chunk_offset, piece.elements,
        MakeAdamScalars(groups_[group].hyper_parameters, update_counts_[piece.parameter],
                        decision_.multipliers[group])));
  }
  return absl::OkStatus();
}

absl::Status LocalOptimizer::ReceiveWeights() {
  Stopwatch stopwatch;
  ++committed_step_;  // A skipped step uses up its number, too.
  if (decision_.apply) {
    for (size_t p = 0; p < used_.size(); ++p) {
      if (unused_policy_ != UnusedPolicy::kSkip || used_[p] > 0) ++update_counts_[p];
    }
    for (const int index : my_chunks()) BALLAST_RETURN_IF_ERROR(Update(index));
    BALLAST_RETURN_IF_ERROR(arithmetic_->Finish());
  }
  update_seconds_ = stopwatch.Lap();
  return absl::OkStatus();
}

absl::StatusOr<client::JobCounts> LocalOptimizer::ReadCounts() {
  return absl::UnimplementedError("only the service counts");
}

absl::Status LocalOptimizer::SaveCheckpoint(const std::string& directory) {
  return absl::UnimplementedError(
      "only the service saves checkpoints; use --optimizer=service with --save");
}

}  // namespace ballast::worker
