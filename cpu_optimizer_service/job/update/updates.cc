// The updates that a decision makes, and the weights that go back.
#include <algorithm>
#include <utility>

#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/system/checked_word.h"
#include "cpu_optimizer_service/host/kept_record.h"
#include "cpu_optimizer_service/job/update/executor.h"
#include "cpu_optimizer_service/job/update/second_round.h"
#include "cpu_optimizer_service/kernels/packed_turn.h"

namespace ballast {

// Whose weights do not go back yet.
static const std::shared_ptr<RankListener> kNoListener;

UpdatePlan Executor::MakePlan(Draft decided) {
  UpdatePlan plan = {.outcome = std::move(decided.outcome),
                     .update = std::move(decided.update),
                     .listeners = ranks_.ByRank(),
                     .weights_in_place = ranks_.WeightsMemories(),
                     .speculation = {}};
  plan.update.has_second_round =
      plan.outcome.decision.apply && !MatricesOf(core_.layout, plan.update).empty();
  if (!CanSpeculate()) {
    plan.speculation.chunks_left = static_cast<int64_t>(core_.layout.chunks().size());
    return plan;
  }
  plan.speculation = speculation_.Settle(
      *memory_.store,
      ChunksAsSpeculated(core_.layout, plan.outcome, speculation_.begun_with(), plan.update),
      plan.outcome.decision.apply,
      [&](int rank, uint64_t stream) { return ranks_.IsCurrent({.rank = rank, .stream = stream}); },
      ranks_.size());
  return plan;
}

void Executor::CarryOut(std::shared_ptr<UpdatePlan> plan, std::function<void()> then) {
  for (size_t rank = 0; rank < plan->listeners.size(); ++rank) {
    if (plan->listeners[rank] == nullptr) continue;
    plan->listeners[rank]->OnDecision(plan->outcome, plan->speculation.dropped.empty()
                                                         ? absl::Span<const int>()
                                                         : plan->speculation.dropped[rank]);
  }
  if (!plan->outcome.decision.apply) return then();
  // Only now, with the decision's record stored: with its word in the table a version is the state.
  memory_.store->Publish(plan->speculation.published, plan->update.step);
  if (plan->speculation.chunks_left == 0) return then();
  // Ascending: backward ends with the first layers, so the first chunks' gradients are those that
  // caches may still have; and a chunk's index is what leads it to its NUMA node.
  core_.environment.tasks->ForEach(
      static_cast<int64_t>(core_.layout.chunks().size()),
      [this, keep = core_.KeepAlive(), plan](int64_t chunk) {
        CarryOutChunk(*plan, static_cast<int>(chunk));
      },
      std::move(then));
}

int64_t Executor::WeightBytes(int index) const {
  const Chunk& chunk = core_.layout.chunks()[index];
  return chunk.elements * SizeBytes(core_.spec().groups[chunk.group].return_dtype);
}

bool Executor::HasTwoRounds(int chunk) const {
  return ballast::HasTwoRounds(
      core_.spec().groups[core_.layout.chunks()[chunk].group].hyper_parameters.rule);
}

uint64_t Executor::LaneTag(uint64_t step, Round round) {
  return CheckedWord(2 * step + (round == Round::kSecond ? 1 : 0));
}

bool Executor::IsHalf(const StepUpdate& update, int chunk, Round round) const {
  return round == Round::kFirst && update.has_second_round && HasTwoRounds(chunk);
}

void Executor::Publish(const ChunkStore::Write& write, const StepUpdate& update, Round round) {
  if (IsHalf(update, write.chunk, round)) {
    memory_.store->PublishHalf(write, update.step);
  } else {
    memory_.store->Publish(write, update.step);
  }
}

ChunkUpdate Executor::UpdateOf(const StepUpdate& update, int index, const Slot& from,
                               Round round) const {
  const int group = core_.layout.chunks()[index].group;
  return {.layout = &core_.layout,
          .chunk = index,
          .gradient = round == Round::kFirst
                          ? memory_.gradients->view(index)
                          : GradientView{.data = memory_.directions->orthogonal(index).data(),
                                         .dtype = DType::kBFloat16},
          .from = from,
          .to = {},
          .hyper_parameters = &update.hyper_parameters[group],
          .multiplier = update.multipliers[group],
          .round = round,
          .shard = nullptr,
          .shard_dtype = core_.spec().groups[group].return_dtype};
}

void Executor::UpdateTo(const StepUpdate& update, int index, const ChunkStore::Write& write,
                        const WeightBuffer& weights, RedoLane* redo, Round round) {
  ChunkUpdate chunk = UpdateOf(update, index, write.from, round);
  chunk.to = write.to;
  chunk.shard = weights.data();
  chunk.redo = redo;
  UpdateChunk(chunk, [&](int parameter) { return update.update_counts[parameter]; });
}

WeightBuffer Executor::BufferFor(const UpdatePlan& plan, int index, bool gradient_may_go) {
  const auto& memory = plan.weights_in_place[core_.layout.chunks()[index].rank];
  if (memory != nullptr) return WeightBuffer::InPlace(memory, index);
  // The decision is made, so nothing but this update reads the gradient any more.
  WeightBuffer place = memory_.gradients->LendPlace(index, WeightBytes(index), gradient_may_go);
  return place ? std::move(place) : memory_.weight_buffers->TryTake(WeightBytes(index));
}

void Executor::CarryOutChunk(const UpdatePlan& plan, int chunk) {
  using Left = Speculation::Settled::Left;
  switch (plan.speculation.left.empty() ? Left::kUpdate : plan.speculation.left[chunk]) {
    case Left::kUpdate:
      return ApplyToChunk(plan, chunk, Round::kFirst);
    case Left::kSend:
      return SendPublishedWeights(plan, chunk);
    case Left::kNothing:
      return;
  }
}

void Executor::SendPublishedWeights(const UpdatePlan& plan, int index) {
  const Chunk& chunk = core_.layout.chunks()[index];
  const std::shared_ptr<RankListener>& listener = plan.listeners[chunk.rank];
  if (listener == nullptr) return;
  // Null: the listener reads the weights again. Another stream has been sent them, which is rare.
  WeightBuffer weights;
  if (plan.weights_in_place[chunk.rank] != nullptr) {
    weights = WeightBuffer::InPlace(plan.weights_in_place[chunk.rank], index);
    view_.ReadWeights(index, weights.data());
  }
  CountWeights(index, weights);
  listener->OnWeights(plan.update.step, index, std::move(weights));
}

void Executor::ApplyToChunk(const UpdatePlan& plan, int index, Round round) {
  const Chunk& chunk = core_.layout.chunks()[index];
  const std::shared_ptr<RankListener>& listener =
      IsHalf(plan.update, index, round) ? kNoListener : plan.listeners[chunk.rank];
  auto write = memory_.store->BeginWrite(
      index, round == Round::kSecond ? Destination::kInPlace : Destination::kInPlaceIfFree);
  // A pinned chunk has a slot reserved, so there is always a place.
  Check(write.ok(), "a decided chunk has a place to be written to");
  RedoLane* const lane = journal_.kept() != nullptr && write->in_place
                             ? journal_.kept()->update_lanes().Take(
                                   index, LaneTag(plan.update.step, round), /*may_wait=*/true)
                             : nullptr;
  // What is written elsewhere has no lane: a later process computes it from the gradient again.
  const bool gradient_may_go = journal_.kept() == nullptr || lane != nullptr;
  WeightBuffer weights;
  if (listener != nullptr) weights = BufferFor(plan, index, gradient_may_go);
  {
    const TraceSpan span(core_.trace, TraceEventKind::kUpdated, plan.update.step, index);
    UpdateTo(plan.update, index, *write, weights, lane, round);
  }
  if (!write->in_place) Stored("a new version of a chunk");
  Publish(*write, plan.update, round);
  // After the chunk's word: up to that a later process needs the lane to go on with the update.
  if (lane != nullptr) journal_.kept()->update_lanes().Give(lane);
  // While the gradient is in the cache.
  if (IsHalf(plan.update, index, round)) MakeDirections(plan.update, index);
  if (listener == nullptr) return;
  CountWeights(index, weights);
  listener->OnWeights(plan.update.step, index, std::move(weights));
}

// May itself be cut off by a death, and be done again by the next process.
void Executor::RollForward(const StepUpdate& update, int index, Round round) {
  // Its word is stored, so the round is whole.
  if (memory_.store->step(index) == update.step &&
      (round == Round::kFirst || !memory_.store->is_half(index))) {
    return;
  }
  LanePool& lanes = journal_.kept()->update_lanes();
  const uint64_t tag = LaneTag(update.step, round);
  // A chunk with a lane is half new where it lies.
  const bool in_place = round == Round::kSecond || lanes.HasLeft(index, tag);
  auto write = memory_.store->BeginWrite(
      index, in_place ? Destination::kInPlace : Destination::kInPlaceIfFree);
  Check(write.ok(), "nothing is pinned while a job is taken over");
  RedoLane* const lane = write->in_place ? lanes.Take(index, tag, /*may_wait=*/true) : nullptr;
  ChunkUpdate chunk = UpdateOf(update, index, write->from, round);
  chunk.to = write->to;
  chunk.redo = lane;
  if (lane != nullptr) {
    const RedoWord word = RedoWord::Unpack(lane->word);
    // The turn that the word names is whole in the lane, and may be there in part in the planes, so
    // it is copied once more. A lane that was just taken names a turn of no elements.
    StoreTurn(lane->turns[word.turn], PlanesWritten(*chunk.hyper_parameters, round), chunk.to,
              word.done - word.count, word.count);
    chunk.done = word.done;
  }
  UpdateChunk(chunk, [&](int parameter) { return update.update_counts[parameter]; });
  Publish(*write, update, round);
  if (lane != nullptr) lanes.Give(lane);
}

}  // namespace ballast
