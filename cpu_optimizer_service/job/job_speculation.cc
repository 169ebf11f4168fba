// Updates ahead of the decision: guessing, and what the decision makes of the guesses.
//
// A guess goes none -> queued -> running -> ready under the job's mutex; the arithmetic happens
// outside it, into a version that nobody else sees. A decision and a clearing of the step cancel
// what is queued, wait for what is running, and take or drop what is ready.
//
// A guess whose weights need a shard buffer is parked, queued without a task, until there is one.
// Computed without it, its weights could go only after the decision: where the wire is slower than
// the update that would be most of a large model, while a guess that waits goes as fast as the wire
// does. A rank that does not read stops the guessing of its job's chunks by that, and nothing else:
// the decision cancels what is parked.
#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu_optimizer_service/job/chunk_update.h"
#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {

bool JobImpl::CanSpeculate() const { return need_.speculation_bytes > 0; }

std::shared_ptr<const JobImpl::Update> JobImpl::MakeGuess(const StepTerms& terms) const {
  auto guess = std::make_shared<Update>();
  guess->step = terms.step;
  guess->hyper_parameters = terms.hyper_parameters;
  for (int group = 0; group < layout_.group_count(); ++group) {
    guess->multipliers.push_back(UnclippedMultiplier(terms.settings.scale, group));
    if (!std::isnormal(guess->multipliers.back())) return nullptr;
  }
  guess->update_counts.reserve(update_counts_.size());
  for (size_t p = 0; p < update_counts_.size(); ++p) {
    guess->update_counts.push_back(spec_.layout.parameters[p].trainable ? update_counts_[p] + 1
                                                                        : 0);
  }
  return guess;
}

double JobImpl::SquaredNormOf(int index, const Update& guess) const {
  const Chunk& chunk = layout_.chunks()[index];
  const double unscale = guess.multipliers[chunk.group];
  double sum = 0;
  for (const double block :
       gradients_->block_sums(chunk.group)
           .subspan(chunk.begin / kBlockElements, chunk.elements / kBlockElements)) {
    sum += block;
  }
  return unscale * unscale * sum;
}

std::optional<JobImpl::GuessTask> JobImpl::GuessIfWorthwhile(int index, double squared_norm) {
  if (guess_ == nullptr) return std::nullopt;
  // What has come so far decides already that no guess of this step can hold.
  guessed_squared_norm_ += squared_norm;
  const bool clips = spec_.max_norm > 0 && std::sqrt(guessed_squared_norm_) > spec_.max_norm;
  if (!std::isfinite(guessed_squared_norm_) || clips) {
    guess_ = nullptr;
    return std::nullopt;
  }
  // A chunk of zeros alone is most likely unused, and will be skipped.
  if (spec_.unused_policy == UnusedPolicy::kSkip && gradients_->is_zero(index)) {
    return std::nullopt;
  }
  const Rank& rank = ranks_[layout_.chunks()[index].rank];
  if (rank.update_mode != UpdateMode::kSpeculate) return std::nullopt;
  Guess& guess = guesses_[index];
  if (guess.state != Guess::State::kNone || guess.history.paused()) return std::nullopt;
  guess.state = Guess::State::kQueued;
  guess.update = guess_;
  if (rank.weights_in_place && rank.memory != nullptr) {
    return GuessTask{
        .chunk = index, .update = guess_, .shard = WeightBuffer::InPlace(rank.memory, index)};
  }
  parked_guesses_.push_back(index);
  return NextParkedGuess();
}

std::optional<JobImpl::GuessTask> JobImpl::NextParkedGuess() {
  if (parked_guesses_.empty()) return std::nullopt;
  const int index = parked_guesses_.front();
  WeightBuffer shard = weight_buffers_->TryTakeOrTell(ShardBytes(index));
  if (!shard) return std::nullopt;
  parked_guesses_.pop_front();
  return GuessTask{.chunk = index, .update = guesses_[index].update, .shard = std::move(shard)};
}

// Until the pool is empty again, so that whoever is parked then is told of by the next buffer.
void JobImpl::StartParkedGuesses() {
  for (;;) {
    std::optional<GuessTask> guess;
    {
      MutexLock lock(mutex_);
      guess = NextParkedGuess();
    }
    if (!guess.has_value()) return;
    StartGuess(*std::move(guess));
  }
}

void JobImpl::StartGuess(GuessTask task) {
  const int chunk = task.chunk;
  auto self = std::static_pointer_cast<JobImpl>(shared_from_this());
  // Shared, since std::function wants to be able to copy it.
  auto shared = std::make_shared<GuessTask>(std::move(task));
  StartOfChunk(chunk, [self = std::move(self), shared = std::move(shared)] {
    self->RunGuess(std::move(*shared));
  });
}

bool JobImpl::TakesProvisional(const Rank& rank, const WeightBuffer& shard) const {
  if (!shard || rank.listener == nullptr || rank.update_mode != UpdateMode::kSpeculate) {
    return false;
  }
  // The stream may be another than when the guess began, and take its weights elsewhere.
  return shard.in_place() == (rank.weights_in_place && rank.memory != nullptr);
}

void JobImpl::RunGuess(GuessTask task) {
  const int index = task.chunk;
  const std::shared_ptr<const Update>& update = task.update;
  const Chunk& chunk = layout_.chunks()[index];
  {
    MutexLock lock(mutex_);
    Guess& guess = guesses_[index];
    // Cancelled; the same chunk may have been queued again, by a later step, for another task.
    if (guess.state != Guess::State::kQueued || guess.update != update) return;
    guess.state = Guess::State::kRunning;
    ++guesses_running_;
  }
  absl::StatusOr<ChunkStore::Write> write = store_->BeginWrite(index, Destination::kFresh);
  if (write.ok()) {
    const TraceSpan span(trace_, TraceEventKind::kGuessed, update->step, index);
    UpdateTo(*update, index, *write, task.shard);
  }
  std::shared_ptr<RankListener> listener;
  {
    MutexLock lock(mutex_);
    const Rank& rank = ranks_[chunk.rank];
    if (write.ok() && TakesProvisional(rank, task.shard)) {
      listener = rank.listener;
      guesses_[index].told_stream = rank.stream;
    }
  }
  if (listener != nullptr) {
    listener->OnProvisionalWeights(update->step, index, std::move(task.shard));
  }
  MutexLock lock(mutex_);
  Guess& guess = guesses_[index];
  if (write.ok()) {
    guess.state = Guess::State::kReady;
    guess.update = nullptr;
    guess_writes_.push_back(*write);
    ++speculation_.speculated;
  } else {
    guess.state = Guess::State::kNone;  // Its spare version is being read: the chunk waits.
  }
  --guesses_running_;
  changed_.NotifyAll();
}

void JobImpl::FinishGuesses() {
  guess_ = nullptr;
  parked_guesses_.clear();
  for (Guess& guess : guesses_) {
    if (guess.state == Guess::State::kQueued) guess.state = Guess::State::kNone;
  }
  while (guesses_running_ > 0) changed_.Wait(mutex_);
}

void JobImpl::DropGuesses() {
  for (const ChunkStore::Write& write : guess_writes_) store_->Drop(write);
  guess_writes_.clear();
  for (Guess& guess : guesses_) guess.Reset();
}

std::vector<bool> JobImpl::WouldHold(const UpdatePlan& plan) const {
  const Decision& decision = plan.outcome.decision;
  std::vector<bool> group_holds;
  for (int group = 0; group < layout_.group_count(); ++group) {
    group_holds.push_back(decision.apply &&
                          decision.multipliers[group] ==
                              UnclippedMultiplier(plan.terms.settings.scale, group));
  }
  const auto is_updated = [&](const ChunkPiece& piece) {
    return plan.update.update_counts[piece.parameter] > 0;
  };
  std::vector<bool> holds;
  holds.reserve(layout_.chunks().size());
  for (int index = 0; index < static_cast<int>(layout_.chunks().size()); ++index) {
    holds.push_back(group_holds[layout_.chunks()[index].group]);
    if (!holds.back() || plan.outcome.unused_parameters.empty()) continue;
    const std::vector<ChunkPiece> pieces = layout_.Pieces(index);
    holds.back() = std::all_of(pieces.begin(), pieces.end(), is_updated);
  }
  return holds;
}

// All ranks wait meanwhile, so a chunk whose guess holds, as nearly all do, costs no more than a
// few bytes here.
void JobImpl::SettleGuesses(UpdatePlan& plan) {
  plan.chunks_left = static_cast<int64_t>(layout_.chunks().size());
  if (!CanSpeculate()) return;
  const std::vector<bool> would_hold = WouldHold(plan);
  plan.left.assign(guesses_.size(), UpdatePlan::Left::kUpdate);
  plan.dropped.resize(ranks_.size());
  for (int index = 0; index < static_cast<int>(guesses_.size()); ++index) {
    Guess& guess = guesses_[index];
    const bool holds = would_hold[index];
    guess.history.Record(holds);
    if (guess.state == Guess::State::kReady) {
      const int owner = layout_.chunks()[index].rank;
      const bool told = guess.told_stream != 0 && guess.told_stream == ranks_[owner].stream;
      ++plan.speculation.speculated;
      if (holds) {
        ++plan.speculation.published;
        plan.left[index] = told ? UpdatePlan::Left::kNothing : UpdatePlan::Left::kTell;
        if (told) --plan.chunks_left;
      } else {
        if (plan.outcome.decision.apply) ++plan.speculation.redone;
        if (told && plan.outcome.decision.apply) plan.dropped[owner].push_back(index);
      }
    }
    guess.Reset();
  }
  for (const ChunkStore::Write& write : guess_writes_) {
    if (!would_hold[write.chunk]) store_->Drop(write);
  }
  std::erase_if(guess_writes_,
                [&](const ChunkStore::Write& write) { return !would_hold[write.chunk]; });
  plan.holds.swap(guess_writes_);
  speculation_.published += plan.speculation.published;
  speculation_.redone += plan.speculation.redone;
}

}  // namespace ballast
