#include "cpu_optimizer_service/job/step/speculation.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace ballast {

std::shared_ptr<const StepUpdate> MakeProvisionalUpdate(const JobSpec& spec, const StepTerms& terms,
                                                        const std::vector<int64_t>& update_counts) {
  auto update = std::make_shared<StepUpdate>();
  update->step = terms.step;
  update->hyper_parameters = terms.hyper_parameters;
  for (int group = 0; group < static_cast<int>(spec.groups.size()); ++group) {
    update->multipliers.push_back(
        MultiplierWithinNorm(terms.settings.scale, terms.settings.expected_clipping, group));
    // The decision skips a step whose multiplier is no normal number.
    if (!std::isnormal(update->multipliers.back())) return nullptr;
  }
  update->update_counts.reserve(update_counts.size());
  for (size_t p = 0; p < update_counts.size(); ++p) {
    // As if every parameter were used. A chunk with one that is not is computed again.
    update->update_counts.push_back(spec.layout.parameters[p].trainable ? update_counts[p] + 1 : 0);
  }
  return update;
}

std::vector<bool> ChunksAsSpeculated(const Layout& layout, const StepOutcome& outcome,
                                     const StepUpdate* provisional, const StepUpdate& decided) {
  std::vector<bool> groups;
  for (int group = 0; group < layout.group_count(); ++group) {
    // Compared exactly: equal inputs give equal bits, and nothing else may be published.
    groups.push_back(outcome.decision.apply && provisional != nullptr &&
                     decided.multipliers[group] == provisional->multipliers[group] &&
                     decided.hyper_parameters[group] == provisional->hyper_parameters[group]);
  }
  std::vector<bool> chunks;
  chunks.reserve(layout.chunks().size());
  for (int index = 0; index < static_cast<int>(layout.chunks().size()); ++index) {
    chunks.push_back(groups[layout.chunks()[index].group]);
    // Only unused parameters can be left out, so the pieces need not be looked at where there are
    // none.
    if (!chunks.back() || outcome.unused_parameters.empty()) continue;
    layout.VisitParts(index, [&](const ChunkPart& part) {
      chunks.back() = decided.update_counts[part.parameter] > 0;
      return static_cast<bool>(chunks.back());
    });
  }
  return chunks;
}

Speculation::Speculation(const Layout& layout) : layout_(layout), chunks_(layout.chunks().size()) {}

void Speculation::Begin(std::shared_ptr<const StepUpdate> update, double max_norm) {
  begun_with_ = std::move(update);
  update_ = begun_with_;
  max_norm_ = max_norm;
  squared_norm_ = 0;
}

void Speculation::AddSquaredNorm(int chunk, double squared_norm) {
  chunks_[chunk].squared_norm = squared_norm;
  squared_norm_ += squared_norm;
  const bool clips = max_norm_ > 0 && std::sqrt(squared_norm_) > max_norm_;
  // The sum is in order of arrival, and so only about the norm. Where that misjudges, a chunk is
  // updated once more or not ahead of time: the decision alone says what becomes the state.
  if (clips || !std::isfinite(squared_norm_)) update_ = nullptr;
}

bool Speculation::Queue(int index) {
  Chunk& chunk = chunks_[index];
  if (update_ == nullptr || chunk.state != State::kNone || chunk.sending ||
      chunk.history.paused()) {
    return false;
  }
  chunk.state = State::kQueued;
  chunk.update = update_;
  return true;
}

Speculation::Task Speculation::MakeTask(int chunk, WeightBuffer weights) {
  return {.chunk = chunk, .update = chunks_[chunk].update, .weights = std::move(weights)};
}

std::optional<int> Speculation::first_parked() const {
  if (parked_.empty()) return std::nullopt;
  return parked_.front();
}

bool Speculation::Run(const Task& task) {
  Chunk& chunk = chunks_[task.chunk];
  // The same chunk may be queued again by now, with the update of a later attempt.
  if (chunk.state != State::kQueued || chunk.update != task.update) return false;
  chunk.state = State::kRunning;
  return true;
}

void Speculation::Finish(const ChunkStore::Write& write) {
  Chunk& chunk = chunks_[write.chunk];
  chunk.state = State::kReady;
  chunk.update = nullptr;
  ready_.push_back(write);
}

void Speculation::StartSending(int index, uint64_t stream) {
  Chunk& chunk = chunks_[index];
  chunk.sending = true;
  chunk.sent_stream = stream;
  chunk.void_stream = 0;
}

bool Speculation::Drop(int index, ChunkStore& store) {
  Chunk& chunk = chunks_[index];
  // Its gradient is not whole after all, and is added again when it is.
  squared_norm_ -= std::exchange(chunk.squared_norm, 0);
  const State state = std::exchange(chunk.state, State::kNone);
  chunk.update = nullptr;
  if (state == State::kQueued) std::erase(parked_, index);
  if (state != State::kReady) return false;
  // Those weights cannot be called back. The decision names them to the rank, which ignores them.
  if (chunk.sent_stream != 0) chunk.void_stream = std::exchange(chunk.sent_stream, 0);
  std::erase_if(ready_, [&](const ChunkStore::Write& write) {
    if (write.chunk != index) return false;
    store.Drop(write);
    return true;
  });
  return true;
}

bool Speculation::Supersede(int index) {
  Chunk& chunk = chunks_[index];
  if (chunk.state == State::kQueued) {
    std::erase(parked_, index);
    // Its task finds that in Run, as in Stop.
    chunk.state = State::kNone;
  }
  if (chunk.state != State::kRunning) return false;
  chunk.state = State::kSuperseded;
  return true;
}

void Speculation::Stop() {
  update_ = nullptr;
  parked_.clear();
  for (Chunk& chunk : chunks_) {
    // Its task finds that in Run, and does nothing.
    if (chunk.state == State::kQueued) chunk.state = State::kNone;
  }
}

void Speculation::Cancel(int rank) {
  std::erase_if(parked_, [&](int chunk) { return layout_.chunks()[chunk].rank == rank; });
  for (const int chunk : layout_.chunks_of_rank(rank)) {
    if (chunks_[chunk].state == State::kQueued) chunks_[chunk].state = State::kNone;
  }
}

void Speculation::DropOfRank(int rank, ChunkStore& store) {
  std::erase_if(ready_, [&](const ChunkStore::Write& write) {
    if (layout_.chunks()[write.chunk].rank != rank) return false;
    store.Drop(write);
    return true;
  });
  for (const int chunk : layout_.chunks_of_rank(rank)) chunks_[chunk].Reset();
}

void Speculation::DropAll(ChunkStore& store) {
  for (const ChunkStore::Write& write : ready_) store.Drop(write);
  ready_.clear();
  for (Chunk& chunk : chunks_) chunk.Reset();
}

// All ranks wait meanwhile, so a chunk whose provisional update becomes the state, as nearly all
// do, costs no more than a few bytes here.
Speculation::Settled Speculation::Settle(
    ChunkStore& store, const std::vector<bool>& as_speculated, bool apply,
    absl::FunctionRef<bool(int rank, uint64_t stream)> is_current, int world_size) {
  Settled settled;
  settled.left.assign(chunks_.size(), Settled::Left::kUpdate);
  settled.dropped.resize(world_size);
  settled.chunks_left = static_cast<int64_t>(chunks_.size());
  for (int index = 0; index < static_cast<int>(chunks_.size()); ++index) {
    Chunk& chunk = chunks_[index];
    const bool published = as_speculated[index];
    const int owner = layout_.chunks()[index].rank;
    chunk.history.Record(published);
    if (chunk.state == State::kReady) {
      // A stream that was opened since has no weights of its predecessor, so they are sent to it
      // again.
      const bool sent = chunk.sent_stream != 0 && is_current(owner, chunk.sent_stream);
      ++settled.counts.speculated;
      if (published) {
        ++settled.counts.published;
        settled.left[index] = sent ? Settled::Left::kNothing : Settled::Left::kSend;
        if (sent) --settled.chunks_left;
      } else {
        if (apply) ++settled.counts.redone;
        if (sent && apply) settled.dropped[owner].push_back(index);
      }
    }
    // A rank may still have weights of a version that was dropped, also where none was made after
    // it.
    const bool has_void = chunk.void_stream != 0 && is_current(owner, chunk.void_stream);
    if (has_void && apply) settled.dropped[owner].push_back(index);
    chunk.Reset();
  }
  for (const ChunkStore::Write& write : ready_) {
    if (!as_speculated[write.chunk]) store.Drop(write);
  }
  std::erase_if(ready_,
                [&](const ChunkStore::Write& write) { return !as_speculated[write.chunk]; });
  settled.published.swap(ready_);
  return settled;
}

void Speculation::Recycle(std::vector<ChunkStore::Write> published) {
  published.clear();
  ready_.swap(published);
}

int64_t Speculation::paused() const {
  return std::count_if(chunks_.begin(), chunks_.end(),
                       [](const Chunk& chunk) { return chunk.history.paused(); });
}

}  // namespace ballast
