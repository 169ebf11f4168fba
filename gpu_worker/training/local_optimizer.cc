#include "gpu_worker/training/local_optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/rules/adam.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/overflow.h"
#include "gpu_worker/base/stopwatch.h"

namespace ballast::worker {
namespace {

// That is 768 KiB in three planes of fp32.
constexpr int64_t kTrialElements = 1 << 16;  // Tried and looked at together.
// The moments before the weight, which is not finite wherever one of them is not.
constexpr std::array<absl::string_view, 3> kPlanes = {"exp_avg", "exp_avg_sq", "master"};

template <class T>
absl::Status Gather(Collective& collective, absl::Span<const T> mine, absl::Span<T> all) {
  return collective.AllGather(
      {reinterpret_cast<const std::byte*>(mine.data()), mine.size() * sizeof(T)},
      {reinterpret_cast<std::byte*>(all.data()), all.size() * sizeof(T)});
}

}  // namespace

// As doubles, so that ranks can give it to each other; all of it is exact in them.
struct LocalOptimizer::Trial {
  explicit Trial(int groups) : values(kLargest + kPlanes.size() * groups, 0.0) {
    values[kGroup] = -1;
  }
  bool overflows() const { return values[kGroup] >= 0; }
  // The order in which ranks and chunks agree on one.
  auto place() const { return std::tuple(values[kGroup], values[kParameter], values[kElement]); }
  double& largest(int group, size_t plane) {
    return values[kLargest + kPlanes.size() * group + plane];
  }

  // kGroup to kGradient describe the first overflow; kGroup is -1 where there is none. From
  // kLargest on: by group, the largest finite magnitude of each plane.
  enum Field : uint8_t { kGroup, kParameter, kElement, kPlane, kValue, kGradient, kLargest };
  std::vector<double> values;
};

LocalOptimizer::LocalOptimizer(const JobSpec& job, const Layout& layout, Collective& collective,
                               std::unique_ptr<LocalArithmetic> arithmetic)
    : layout_(layout),
      collective_(collective),
      arithmetic_(std::move(arithmetic)),
      unused_policy_(job.unused_policy),
      groups_(job.groups),
      ledger_(layout.chunks().size()),
      blocks_(layout),
      used_(layout.spec().parameters.size()),
      update_counts_(layout.spec().parameters.size(), 0) {
  for (const GroupSpec& group : groups_) {
    const HyperParameters& values = group.hyper_parameters;
    Check(values.rule == Rule::kAdam && !values.amsgrad, "the local optimizer has Adam alone");
  }
  // Some blocks lie whole with one rank: that rank sums them, and only the sums travel. The edges
  // of ranks' ranges cut the rest, whose gradient itself has to travel. Every rank makes the same
  // tables, so each knows what the others send.
  std::vector<bool> whole(blocks_.blocks(), false);
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    for (const WholeBlocks& run : FindWholeBlocks(rank)) {
      std::fill_n(whole.begin() + run.first_block, run.place.blocks(), true);
      if (rank == collective_.rank()) my_whole_blocks_.push_back(run.place);
    }
  }
  for (int64_t block = 0; block < blocks_.blocks(); ++block) {
    if (!whole[block]) other_blocks_.push_back(block);
  }
}

absl::Status LocalOptimizer::Join(const FillChunk& first_weights) {
  std::vector<float> values;
  std::vector<double> largest(groups_.size(), 0.0);
  for (const int index : my_chunks()) {
    values.resize(layout_.chunks()[index].elements);
    first_weights(index, absl::MakeSpan(values));
    double& of_group = largest[layout_.chunks()[index].group];
    for (const float value : values) of_group = std::max(of_group, std::fabs(double{value}));
    BALLAST_RETURN_IF_ERROR(arithmetic_->SetFirstWeights(index, values));
  }
  // The bounds are of all ranks' state, so that all ranks come to the same answer in CheckUpdate.
  std::vector<double> all(largest.size() * collective_.world_size());
  BALLAST_RETURN_IF_ERROR(Gather<double>(collective_, largest, absl::MakeSpan(all)));
  // Moments begin with zeros.
  bounds_.assign(groups_.size(), {.planes = {}});
  for (size_t i = 0; i < all.size(); ++i) {
    double& master = bounds_[i % groups_.size()].planes[0];
    master = std::max(master, all[i]);
  }
  return arithmetic_->Finish();
}

absl::Status LocalOptimizer::BeginStep(const StepSettings& settings) {
  scale_ = settings.scale;
  for (const auto& [group, overrides] : settings.overrides) {
    HyperParameters& values = groups_[group].hyper_parameters;
    BALLAST_RETURN_IF_ERROR(ValidateChanges(values, overrides));
    values = Apply(values, overrides);
  }
  std::fill(used_.begin(), used_.end(), 0.0);
  for (const int index : my_chunks()) ledger_[index] = {};
  arithmetic_->ForgetGradients();  // Of a step that was not finished.
  return absl::OkStatus();
}

absl::Status LocalOptimizer::Push(client::GradientPush push) {
  std::vector<client::GradientPush> pushes;
  pushes.push_back(std::move(push));
  return PushAll(std::move(pushes));
}

absl::Status LocalOptimizer::PushAll(std::vector<client::GradientPush> pushes) {
  std::vector<LocalArithmetic::Addition> additions;
  absl::Status status;
  for (client::GradientPush& push : pushes) {
    // After an error the rest is only released; what came before it is added all the same, and
    // released by the arithmetic.
    Entry& entry = ledger_[push.chunk];
    Check(layout_.chunks()[push.chunk].rank == collective_.rank(), "a rank pushes its own chunks");
    // The same order that the service's ledger requires.
    if (status.ok() && push.micro_step_begin != entry.next_micro_step) {
      status = absl::FailedPreconditionError(
          absl::StrCat("step ", committed_step_ + 1, ": chunk ", push.chunk, " expects micro-step ",
                       entry.next_micro_step, ", got ", push.micro_step_begin));
    }
    if (!status.ok() || push.empty) {
      if (push.released) push.released();
    } else {
      // An empty push leaves has_gradient false: the first payload is the first, whichever
      // micro-step it is of.
      additions.push_back({.chunk = push.chunk,
                           .first = !std::exchange(entry.has_gradient, true),
                           .payload = push.payload,
                           .released = std::move(push.released)});
    }
    // An empty push counts as well: the chunk had nothing to give, and nothing is missing.
    if (status.ok()) entry.next_micro_step = push.micro_step_end;
  }
  const absl::Status added = arithmetic_->AddGradients(std::move(additions));
  return status.ok() ? added : status;
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
    // This keeps the promise that no gradient is lost: a step is not decided with one of them
    // missing.
    if (ledger_[index].next_micro_step == micro_steps) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", committed_step_ + 1, ": rank ", collective_.rank(), " sent ",
        ledger_[index].next_micro_step, " of ", micro_steps, " micro-steps of chunk ", index));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int>> LocalOptimizer::FindUnused() {
  // One rank that used it is enough. The sums are the same on all ranks, so all of them refuse the
  // step or none does, and no rank is left alone in the collectives that follow.
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
  // Pieces are joined before they are cut into blocks: an edge between two chunks of one rank cuts
  // no block, since the elements on both sides of it are here.
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
      // Neighbours in the parameter and in the flat space. A rank's chunks are in order, but
      // between those of two buckets lie the chunks of other ranks.
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

absl::Status LocalOptimizer::AddWholeBlocks(std::vector<ExactSum>& sums) {
  int64_t blocks = 0;
  for (const BlocksInChunks& run : my_whole_blocks_) blocks += run.blocks();
  my_block_sums_.resize(blocks);
  BALLAST_RETURN_IF_ERROR(arithmetic_->BlockSums(my_whole_blocks_, absl::MakeSpan(my_block_sums_)));
  // The sums are on the host from here on.
  BALLAST_RETURN_IF_ERROR(arithmetic_->Finish());
  absl::Span<const double> next = my_block_sums_;
  for (const BlocksInChunks& run : my_whole_blocks_) {
    sums[layout_.chunks()[run.chunk].group].Add(next.first(run.blocks()));
    next.remove_prefix(run.blocks());
  }
  if (collective_.world_size() == 1) return absl::OkStatus();
  std::vector<ExactSum::Words> mine;
  for (const ExactSum& sum : sums) mine.push_back(sum.words());
  std::vector<ExactSum::Words> all(mine.size() * collective_.world_size());
  BALLAST_RETURN_IF_ERROR(Gather<ExactSum::Words>(collective_, mine, absl::MakeSpan(all)));
  std::fill(sums.begin(), sums.end(), ExactSum());
  for (size_t i = 0; i < all.size(); ++i) {
    sums[i % sums.size()].Add(ExactSum::FromWords(all[i]));
  }
  return absl::OkStatus();
}

absl::Status LocalOptimizer::AddOtherBlocks(std::vector<ExactSum>& sums) {
  // It visits the pieces of all cut blocks in one order on all ranks: each sends its own in this
  // order, and takes the others' in it.
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
  // ReadGradient promises the values only now.
  BALLAST_RETURN_IF_ERROR(arithmetic_->Finish());
  std::vector<float> all(most * world_size);
  BALLAST_RETURN_IF_ERROR(Gather<float>(collective_, mine, absl::MakeSpan(all)));
  std::vector<float> values;  // Of one block.
  // These are the elements taken from each rank so far.
  std::vector<int64_t> taken(world_size, 0);
  visit_pieces([&](int64_t block, const ChunkPiece& piece, int rank) {
    const NormBlocks::Place place = blocks_.PlaceOfBlock(block);
    if (piece.parameter_offset == place.begin) values.clear();
    const auto from = all.begin() + rank * most + taken[rank];
    values.insert(values.end(), from, from + piece.elements);
    taken[rank] += piece.elements;
    if (piece.parameter_offset + piece.elements < place.end) return;
    // The sum is made from the elements, and not from sums of parts: additions in another order
    // give other bits.
    sums[layout_.spec().parameters[place.parameter].group].Add(BlockSumOfSquaresReference(
        values.data(), DType::kFloat32, static_cast<int64_t>(values.size())));
  });
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> LocalOptimizer::GatherGroupSums() {
  for (const int index : my_chunks()) {
    // A chunk that had empty pushes alone may still have the gradient of an earlier step.
    if (!ledger_[index].has_gradient) BALLAST_RETURN_IF_ERROR(arithmetic_->ZeroGradient(index));
  }
  std::vector<ExactSum> sums(groups_.size());
  BALLAST_RETURN_IF_ERROR(AddWholeBlocks(sums));
  BALLAST_RETURN_IF_ERROR(AddOtherBlocks(sums));
  return Rounded(sums);
}

absl::StatusOr<client::StepDecision> LocalOptimizer::Seal(uint32_t micro_steps,
                                                          const StepVote& vote) {
  BALLAST_RETURN_IF_ERROR(Validate(vote.clipping, static_cast<int>(groups_.size())));
  if (!vote.overrides.empty()) {
    return absl::InvalidArgumentError("a vote with overrides; give them when the step begins");
  }
  BALLAST_RETURN_IF_ERROR(CheckComplete(micro_steps));
  BALLAST_ASSIGN_OR_RETURN(const std::vector<int> unused, FindUnused());
  BALLAST_ASSIGN_OR_RETURN(const std::vector<double> group_sums, GatherGroupSums());
  // Each rank decides for itself. All have the same sums, scale and vote, so they decide the same.
  decision_ = Decide(group_sums, scale_, vote.clipping);
  client::StepDecision result;
  // This comes after Decide, so an abandoned step has its norm in the report, too.
  if (!vote.apply) {
    decision_.apply = false;
    result.skip_reason = "the ranks voted to abandon it";
  } else if (!decision_.apply) {
    result.skip_reason = "the norm of the gradient is not finite";
  } else {
    BALLAST_ASSIGN_OR_RETURN(result.skip_reason, CheckUpdate(group_sums));
    decision_.apply = result.skip_reason.empty();
  }
  result.step = committed_step_ + 1;
  result.applied = decision_.apply;
  result.norm = decision_.norm;
  result.clip_coefficient = decision_.clip_coefficient;
  for (const int p : unused) {
    result.unused_parameters.push_back(layout_.spec().parameters[p].name);
  }
  return result;
}

absl::StatusOr<std::string> LocalOptimizer::CheckUpdate(absl::Span<const double> group_sums) {
  std::vector<StateBounds> bounds;
  for (size_t group = 0; group < groups_.size(); ++group) {
    // The new bounds follow from the old ones and the norm alone, without a look at the state.
    bounds.push_back(BoundsAfter(bounds_[group], groups_[group].hyper_parameters, group_sums[group],
                                 decision_.multipliers[group]));
  }
  const auto is_finite = [](const StateBounds& of_group) { return of_group.finite(); };
  if (!std::all_of(bounds.begin(), bounds.end(), is_finite)) {
    // TryUpdate has a collective. All ranks get here or none: they have the same bounds.
    BALLAST_ASSIGN_OR_RETURN(const std::string overflow, TryUpdate(absl::MakeSpan(bounds)));
    if (!overflow.empty()) return overflow;
  }
  // They are taken only now: a skipped step leaves the state, and so its bounds, as they were.
  bounds_ = std::move(bounds);
  return std::string();
}

absl::StatusOr<std::string> LocalOptimizer::TryUpdate(absl::Span<StateBounds> bounds) {
  const auto groups = static_cast<int>(groups_.size());
  Trial mine(groups);
  for (const int index : my_chunks()) {
    if (bounds[layout_.chunks()[index].group].finite()) continue;
    Trial of_chunk(groups);
    of_chunk.values = mine.values;  // The largest so far.
    of_chunk.values[Trial::kGroup] = -1;
    BALLAST_RETURN_IF_ERROR(TryChunk(index, of_chunk));
    // The first overflow by group, parameter and element is kept, so that the reason does not
    // depend on how chunks and ranks cut the parameters.
    const bool first =
        of_chunk.overflows() && (!mine.overflows() || of_chunk.place() < mine.place());
    // Once there is an overflow the largest values are not kept up: the step is a skip.
    if (first || !mine.overflows()) mine = std::move(of_chunk);
  }
  const size_t fields = mine.values.size();
  std::vector<double> all(fields * collective_.world_size());
  BALLAST_RETURN_IF_ERROR(Gather<double>(collective_, mine.values, absl::MakeSpan(all)));
  for (StateBounds& of_group : bounds) {
    // These bounds are measured and not estimated: each becomes the largest value that the update
    // leaves.
    if (!of_group.finite()) of_group = {.planes = {}};
  }
  Trial first(groups);
  int first_rank = 0;
  for (int rank = 0; rank < collective_.world_size(); ++rank) {
    Trial trial(groups);
    trial.values.assign(all.begin() + rank * fields, all.begin() + (rank + 1) * fields);
    if (trial.overflows() && (!first.overflows() || trial.place() < first.place())) {
      first.values = trial.values;
      first_rank = rank;
    }
    for (int group = 0; group < groups; ++group) {  // 0 where none was tried.
      std::array<double, kMaxPlanes>& of_group = bounds[group].planes;
      of_group[0] = std::max(of_group[0], trial.largest(group, 2));
      of_group[1] = std::max(of_group[1], trial.largest(group, 0));
      of_group[2] = std::max(of_group[2], trial.largest(group, 1));
    }
  }
  if (!first.overflows()) return std::string();
  const auto value = [&](Trial::Field field) { return first.values[field]; };
  return ToString(Overflow{
      .plane = kPlanes[static_cast<size_t>(value(Trial::kPlane))],
      .parameter = layout_.spec().parameters[static_cast<size_t>(value(Trial::kParameter))].name,
      .element = static_cast<int64_t>(value(Trial::kElement)),
      .value = static_cast<float>(value(Trial::kValue)),
      .rank = first_rank,
      .gradient = static_cast<float>(value(Trial::kGradient)),
      .multiplier = decision_.multipliers[static_cast<size_t>(value(Trial::kGroup))]});
}

// Up to the first element of which something is not finite.
absl::Status LocalOptimizer::TryChunk(int index, Trial& trial) {
  const int group = layout_.chunks()[index].group;
  LocalArithmetic::State state;
  const std::array<const std::vector<float>*, kPlanes.size()> planes = {
      &state.exp_avg, &state.exp_avg_sq, &state.master};
  for (const ChunkPiece& piece : layout_.Pieces(index)) {
    // The count is that of the update that is tried; ReceiveWeights raises it when it is made.
    const std::optional<AdamScalars> scalars =
        ScalarsOf(group, piece.parameter, update_counts_[piece.parameter] + 1);
    for (int64_t done = 0; done < piece.elements; done += kTrialElements) {
      const int64_t elements = std::min(kTrialElements, piece.elements - done);
      const int64_t begin = piece.chunk_offset + done;
      BALLAST_RETURN_IF_ERROR(arithmetic_->TryUpdate(
          index, begin, elements, scalars.has_value() ? &*scalars : nullptr, state));
      for (int64_t i = 0; i < elements; ++i) {
        for (size_t plane = 0; plane < planes.size(); ++plane) {
          const float value = (*planes[plane])[i];
          double& largest = trial.largest(group, plane);
          // What the update leaves as it is counts, too: the bound is of the whole state of the
          // group.
          if (std::isfinite(value)) {
            largest = std::max(largest, std::fabs(double{value}));
            continue;
          }
          // Only the message needs it, so it is read when there is one to be made.
          float gradient = 0;
          BALLAST_RETURN_IF_ERROR(arithmetic_->ReadGradient(index, begin + i, {&gradient, 1}));
          BALLAST_RETURN_IF_ERROR(arithmetic_->Finish());
          trial.values[Trial::kGroup] = group;
          trial.values[Trial::kParameter] = piece.parameter;
          trial.values[Trial::kElement] = static_cast<double>(piece.parameter_offset + done + i);
          trial.values[Trial::kPlane] = static_cast<double>(plane);
          trial.values[Trial::kValue] = value;
          trial.values[Trial::kGradient] = gradient;
          return absl::OkStatus();
        }
      }
    }
  }
  return absl::OkStatus();
}

std::optional<AdamScalars> LocalOptimizer::ScalarsOf(int group, int parameter,
                                                     int64_t count) const {
  // used_ holds the sums of all ranks since FindUnused.
  if (unused_policy_ == UnusedPolicy::kSkip && used_[parameter] == 0) return std::nullopt;
  return MakeAdamScalars(groups_[group].hyper_parameters, count, decision_.multipliers[group]);
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
  // Nothing here can be refused any more: all ranks have decided. An error is one of the device,
  // and ends the run.
  ++committed_step_;  // A skipped step uses up its number, too.
  if (decision_.apply) {
    for (size_t p = 0; p < used_.size(); ++p) {
      if (unused_policy_ != UnusedPolicy::kSkip || used_[p] > 0) ++update_counts_[p];
    }
    // This comes after the counts were raised: the bias corrections (Kingma and Ba 2015) count
    // updates from 1.
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
