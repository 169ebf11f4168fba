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
      blocks_(layout),
      used_(layout.spec().parameters.size()),
      update_counts_(layout.spec().parameters.size(), 0) {
  for (const GroupSpec& group : groups_) {
    Check(!group.hyper_parameters.amsgrad, "the local optimizer has no amsgrad");
  }
  std::vector<bool> full(blocks_.blocks(), false);
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    VisitFullBlocks(rank, [&](int, int64_t, int64_t first_block, int64_t number) {
      std::fill_n(full.begin() + first_block, number, true);
    });
  }
  for (int64_t block = 0; block < blocks_.blocks(); ++block) {
    if (!full[block]) other_blocks_.push_back(block);
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

template <class Visit>
void LocalOptimizer::VisitFullBlocks(int rank, Visit&& visit) const {
  for (const int index : layout_.chunks_of_rank(rank)) {
    layout_.VisitPieces(index, [&](const ChunkPiece& piece) {
      const NormBlocks::WholeBlocks whole = blocks_.WholeIn(piece);
      const int64_t full = whole.elements / kBlockElements;
      if (full > 0) visit(index, whole.chunk_offset, whole.blocks.begin, full);
    });
  }
}

absl::Status LocalOptimizer::GatherFullBlocks(absl::Span<double> block_sums) {
  const int world_size = collective_.world_size();
  int64_t most = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    int64_t count = 0;
    VisitFullBlocks(rank, [&](int, int64_t, int64_t, int64_t number) { count += number; });
    most = std::max(most, count);
  }
  if (most == 0) return absl::OkStatus();
  // An all-gather takes pieces of one size: that of the rank with the most.
  std::vector<double> mine(most);
  absl::Span<double> next = absl::MakeSpan(mine);
  absl::Status status;
  VisitFullBlocks(collective_.rank(), [&](int chunk, int64_t begin, int64_t, int64_t number) {
    status.Update(arithmetic_->BlockSums(chunk, begin, next.first(number)));
    next.remove_prefix(number);
  });
  BALLAST_RETURN_IF_ERROR(status);
  BALLAST_RETURN_IF_ERROR(arithmetic_->Finish());
  std::vector<double> all(most * world_size);
  BALLAST_RETURN_IF_ERROR(collective_.AllGather(
      {reinterpret_cast<const std::byte*>(mine.data()), mine.size() * sizeof(double)},
      {reinterpret_cast<std::byte*>(all.data()), all.size() * sizeof(double)}));
  for (int rank = 0; rank < world_size; ++rank) {
    auto from = all.begin() + rank * most;
    VisitFullBlocks(rank, [&](int, int64_t, int64_t first_block, int64_t number) {
      std::copy_n(from, number, block_sums.begin() + first_block);
      from += number;
    });
  }
  return absl::OkStatus();
}

absl::Status LocalOptimizer::GatherOtherBlocks(absl::Span<double> block_sums) {
  const auto visit_pieces = [&](auto&& visit) {
    for (const int64_t block : other_blocks_) {
      const NormBlocks::Place place = blocks_.PlaceOfBlock(block);
      layout_.VisitRange(place.parameter, place.begin, place.end, [&](const ChunkPiece& piece) {
        visit(block, piece, layout_.chunks()[piece.chunk].rank);
      });
    }
  };
  const int world_size = collective_.world_size();
  std::vector<int64_t> elements(world_size, 0);
  visit_pieces(
      [&](int64_t, const ChunkPiece& piece, int rank) { elements[rank] += piece.elements; });
  const int64_t most = *std::max_element(elements.begin(), elements.end());
  if (most == 0) return absl::OkStatus();
  std::vector<float> mine(most);
  absl::Span<float> next = absl::MakeSpan(mine);
  absl::Status status;
  visit_pieces([&](int64_t, const ChunkPiece& piece, int rank) {
    if (rank != collective_.rank()) return;
    status.Update(
        arithmetic_->ReadGradient(piece.chunk, piece.chunk_offset, next.first(piece.elements)));
    next.remove_prefix(piece.elements);
  });
  BALLAST_RETURN_IF_ERROR(status);
  BALLAST_RETURN_IF_ERROR(arithmetic_->Finish());
  std::vector<float> all(most * world_size);
  BALLAST_RETURN_IF_ERROR(collective_.AllGather(
      {reinterpret_cast<const std::byte*>(mine.data()), mine.size() * sizeof(float)},
      {reinterpret_cast<std::byte*>(all.data()), all.size() * sizeof(float)}));
  std::vector<float> values;  // Of one block.
  std::vector<int64_t> taken(world_size, 0);
  visit_pieces([&](int64_t block, const ChunkPiece& piece, int rank) {
    const NormBlocks::Place place = blocks_.PlaceOfBlock(block);
    if (piece.parameter_offset == place.begin) values.clear();
    const auto from = all.begin() + rank * most + taken[rank];
    values.insert(values.end(), from, from + piece.elements);
    taken[rank] += piece.elements;
    block_sums[block] = BlockSumOfSquaresReference(values.data(), DType::kFloat32,
                                                   static_cast<int64_t>(values.size()));
  });
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> LocalOptimizer::GatherGroupSums() {
  for (const int index : my_chunks()) {
    if (!ledger_[index].has_gradient) BALLAST_RETURN_IF_ERROR(arithmetic_->ZeroGradient(index));
  }
  std::vector<double> block_sums(blocks_.blocks());
  BALLAST_RETURN_IF_ERROR(GatherFullBlocks(absl::MakeSpan(block_sums)));
  BALLAST_RETURN_IF_ERROR(GatherOtherBlocks(absl::MakeSpan(block_sums)));
  std::vector<double> span_sums(blocks_.spans());
  for (int64_t span = 0; span < blocks_.spans(); ++span) {
    const NormBlocks::Range blocks = blocks_.BlocksOfSpan(span);
    span_sums[span] = SumInOrder(
        absl::MakeConstSpan(block_sums).subspan(blocks.begin, blocks.end - blocks.begin));
  }
  return blocks_.GroupSums(span_sums);
}

absl::StatusOr<client::StepDecision> LocalOptimizer::Seal(uint32_t micro_steps) {
  BALLAST_RETURN_IF_ERROR(CheckComplete(micro_steps));
  BALLAST_ASSIGN_OR_RETURN(const std::vector<int> unused, FindUnused());
  BALLAST_ASSIGN_OR_RETURN(const std::vector<double> group_sums, GatherGroupSums());
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
