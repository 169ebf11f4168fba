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
  std::vector<bool> whole(blocks_.blocks(), false);
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    int64_t count = 0;
    for (const WholeBlocks& run : whole_blocks_.emplace_back(FindWholeBlocks(rank))) {
      std::fill_n(whole.begin() + run.first_block, run.place.blocks(), true);
      if (rank == collective_.rank()) my_whole_blocks_.push_back(run.place);
      count += run.place.blocks();
    }
    most_whole_blocks_ = std::max(most_whole_blocks_, count);
  }
  for (int64_t block = 0; block < blocks_.blocks(); ++block) {
    if (!whole[block]) other_blocks_.push_back(block);
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
  arithmetic_->ForgetGradients();  // Of a step that was not finished.
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

// A parameter's elements that lie one after the other in chunks that do are one piece, however many
// chunks it is cut into.
std::vector<LocalOptimizer::WholeBlocks> LocalOptimizer::FindWholeBlocks(int rank) const {
  std::vector<WholeBlocks> found;
  ChunkPiece joined;
  const auto end_piece = [&] {
    if (joined.elements == 0) return;
    const NormBlocks::WholeBlocks whole = blocks_.WholeIn(joined);
    // Where blocks begin in the piece, and in which of its chunks that is.
    BlocksInChunks place{
        .chunk = joined.chunk, .begin = whole.chunk_offset, .elements = whole.elements};
    if (whole.elements > 0) {
      for (; place.begin >= layout_.chunks()[place.chunk].elements; ++place.chunk) {
        place.begin -= layout_.chunks()[place.chunk].elements;
      }
      found.push_back({.place = place, .first_block = whole.blocks.begin});
    }
    joined.elements = 0;
  };
  int64_t end = -1;  // Of `joined` in the flat space.
  for (const int index : layout_.chunks_of_rank(rank)) {
    const Chunk& chunk = layout_.chunks()[index];
    layout_.VisitPieces(index, [&](const ChunkPiece& piece) {
      const bool goes_on = joined.elements > 0 && joined.parameter == piece.parameter &&
                           joined.parameter_offset + joined.elements == piece.parameter_offset &&
                           end == chunk.begin + piece.chunk_offset;
      if (goes_on) {
        joined.elements += piece.elements;
      } else {
        end_piece();
        joined = piece;
      }
      end = chunk.begin + piece.chunk_offset + piece.elements;
    });
  }
  end_piece();
  return found;
}

absl::Status LocalOptimizer::GatherWholeBlocks() {
  if (most_whole_blocks_ == 0) return absl::OkStatus();
  const int world_size = collective_.world_size();
  // An all-gather takes pieces of one size: that of the rank with the most.
  sums_of_rank_.resize(most_whole_blocks_);
  int64_t mine = 0;
  for (const BlocksInChunks& run : my_whole_blocks_) mine += run.blocks();
  BALLAST_RETURN_IF_ERROR(
      arithmetic_->BlockSums(my_whole_blocks_, absl::MakeSpan(sums_of_rank_).first(mine)));
  BALLAST_RETURN_IF_ERROR(arithmetic_->Finish());
  if (world_size > 1) {
    sums_of_ranks_.resize(most_whole_blocks_ * world_size);
    BALLAST_RETURN_IF_ERROR(
        collective_.AllGather({reinterpret_cast<const std::byte*>(sums_of_rank_.data()),
                               sums_of_rank_.size() * sizeof(double)},
                              {reinterpret_cast<std::byte*>(sums_of_ranks_.data()),
                               sums_of_ranks_.size() * sizeof(double)}));
  }
  const std::vector<double>& all = world_size > 1 ? sums_of_ranks_ : sums_of_rank_;
  for (int rank = 0; rank < world_size; ++rank) {
    auto from = all.begin() + rank * most_whole_blocks_;
    for (const WholeBlocks& run : whole_blocks_[rank]) {
      std::copy_n(from, run.place.blocks(), block_sums_.begin() + run.first_block);
      from += run.place.blocks();
    }
  }
  return absl::OkStatus();
}

absl::Status LocalOptimizer::GatherOtherBlocks() {
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
    block_sums_[block] = BlockSumOfSquaresReference(values.data(), DType::kFloat32,
                                                    static_cast<int64_t>(values.size()));
  });
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> LocalOptimizer::GatherGroupSums() {
  for (const int index : my_chunks()) {
    if (!ledger_[index].has_gradient) BALLAST_RETURN_IF_ERROR(arithmetic_->ZeroGradient(index));
  }
  block_sums_.resize(blocks_.blocks());
  BALLAST_RETURN_IF_ERROR(GatherWholeBlocks());
  BALLAST_RETURN_IF_ERROR(GatherOtherBlocks());
  std::vector<double> span_sums(blocks_.spans());
  for (int64_t span = 0; span < blocks_.spans(); ++span) {
    const NormBlocks::Range blocks = blocks_.BlocksOfSpan(span);
    span_sums[span] = SumInOrder(
        absl::MakeConstSpan(block_sums_).subspan(blocks.begin, blocks.end - blocks.begin));
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

// As one run as far as neighbours of a group have one update count: each parameter has its own. The
// padding after the last one stays zero.
absl::Status LocalOptimizer::Update() {
  struct Run {
    int chunk = 0;
    int64_t begin = 0;  // In the chunk.
    int64_t elements = 0;
    int group = 0;
    int64_t end = 0;  // In the group's flat space.
    int64_t update_count = 0;
  } run;
  absl::Status status;
  const auto end_run = [&] {
    if (run.elements == 0 || !status.ok()) return;
    status =
        arithmetic_->Update(run.chunk, run.begin, run.elements,
                            MakeAdamScalars(groups_[run.group].hyper_parameters, run.update_count,
                                            decision_.multipliers[run.group]));
    run.elements = 0;
  };
  for (const int index : my_chunks()) {
    const Chunk& chunk = layout_.chunks()[index];
    layout_.VisitPieces(index, [&](const ChunkPiece& piece) {
      if (unused_policy_ == UnusedPolicy::kSkip && used_[piece.parameter] == 0) return;
      const int64_t begin = chunk.begin + piece.chunk_offset;
      const int64_t update_count = update_counts_[piece.parameter];
      const bool goes_on = run.elements > 0 && run.group == chunk.group && run.end == begin &&
                           run.update_count == update_count;
      if (!goes_on) {
        end_run();
        run = {.chunk = index,
               .begin = piece.chunk_offset,
               .group = chunk.group,
               .update_count = update_count};
      }
      run.elements += piece.elements;
      run.end = begin + piece.elements;
    });
  }
  end_run();
  return status;
}

absl::Status LocalOptimizer::ReceiveWeights() {
  Stopwatch stopwatch;
  ++committed_step_;  // A skipped step uses up its number, too.
  if (decision_.apply) {
    for (size_t p = 0; p < used_.size(); ++p) {
      if (unused_policy_ != UnusedPolicy::kSkip || used_[p] > 0) ++update_counts_[p];
    }
    BALLAST_RETURN_IF_ERROR(Update());
    BALLAST_RETURN_IF_ERROR(arithmetic_->Finish());
  }
  arithmetic_->ForgetGradients();
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
