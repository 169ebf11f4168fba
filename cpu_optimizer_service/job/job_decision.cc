// From the last seal to the commit, on the engine's threads.
//
// The gate keeps everything else away from gradients and state meanwhile, except for the time in
// which votes are awaited. The decision is the commit point: before it nothing of the step shows,
// after it the step only rolls forward.
#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/text/overflow.h"
#include "cpu_optimizer_service/host/kept_record.h"
#include "cpu_optimizer_service/job/job_impl.h"
#include "cpu_optimizer_service/job/step/chunk_update.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {

// ---------------------------------------------------------------- the decision

void JobImpl::StartDecisionIfDue() {
  // Called wherever the last condition may have come true: a last seal or vote, or a reader that
  // stops.
  if (gate_.Ask(Admission::kDecide) != Answer::kGranted) return;
  gate_.StartDeciding();
  RunAfter([self = Self()] { self->StartTask([self] { self->RunDecision(); }); });
}

void JobImpl::RunDecision() {
  const auto chunks = static_cast<int64_t>(layout_.chunks().size());
  std::vector<bool> claimed;
  uint64_t step = 0;
  {
    MutexLock lock(mutex_);
    step = record_.committed_step + 1;
    // Sums whose tasks are only queued are computed here, because ranks wait. Those tasks find
    // nothing to claim then.
    claimed = sums_.ClaimAll();
  }
  if (std::find(claimed.begin(), claimed.end(), true) != claimed.end()) {
    // An abort meanwhile does not clear the gradients: it waits for this task
    // (GateState::deciding).
    environment_.tasks->ForEach(
        chunks,
        [self = Self(), step, claimed = std::move(claimed)](int64_t chunk) {
          if (!claimed[chunk]) return;
          self->Guarded([&] { self->ComputeSums(step, static_cast<int>(chunk), nullptr); });
        },
        [self = Self()] { self->Guarded([&] { self->DecideWhenComputed(); }); });
    return;
  }
  DecideWhenComputed();
}

void JobImpl::DecideWhenComputed() {
  // What other tasks still compute is waited for in the gate. The last of them gives the turn, so
  // this goes on on a thread of the engine's.
  Section section(*this);
  if (broken()) return;
  // Only now, so that provisional updates that were queued before the decision's task have had
  // their turn.
  speculation_.Stop();
  EnterHere(Admission::kUpdate, -1,
            [this, self = Self()](absl::Status admitted)
                ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                  if (!admitted.ok()) return gate_.EndDeciding();  // Aborted meanwhile.
                  sums_.FinishAll();
                  // Ranks have voted since.
                  // The sums stand from the time before the votes: a discard would have made the
                  // step an open one, without them.
                  if (std::get<SealedStep>(step_).group_sums().has_value()) {
                    return DecideOrAwaitVotes();
                  }
                  // What is left to sum is not little where chunks cut many blocks. An abort
                  // waits for it.
                  gate_.StartComputing();
                  RunAfter([self = std::move(self)]() mutable { self->CombineAndDecide(); });
                });
}

void JobImpl::CombineAndDecide() {
  TaskPool& tasks = *environment_.tasks;
  std::vector<double> group_sums = gradients_->CombineSums(
      [&](int64_t count, absl::FunctionRef<void(int64_t)> body) { tasks.ForEach(count, body); });
  Section section(*this);
  gate_.StopComputing();
  // Asked for once more: the step may have been aborted while the lock was free.
  EnterHere(Admission::kUpdate, -1,
            [this, self = Self(), group_sums = std::move(group_sums)](absl::Status admitted)
                ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                  if (!admitted.ok()) return gate_.EndDeciding();  // Aborted meanwhile.
                  std::get<SealedStep>(step_).SetSums(group_sums);
                  DecideOrAwaitVotes();
                });
}

void JobImpl::DecideOrAwaitVotes() {
  auto& sealed = std::get<SealedStep>(step_);
  const std::vector<int> awaited = sealed.RanksWithoutVote();
  if (!awaited.empty()) {
    TellNorm(sealed, awaited);
  } else if (CheckVotes(sealed)) {
    return DecideOrTry(MakeDraft(sealed));
  }
  // Votes that differ have been voided by now, so they are awaited like those that are missing.
  gate_.AwaitVotes();
}

void JobImpl::TellNorm(const SealedStep& sealed, absl::Span<const int> ranks) {
  const std::string non_finite = FirstNonFinite(sealed);
  Listeners listeners;
  for (const int rank : ranks) {
    if (ranks_[rank].listener != nullptr) listeners.push_back(ranks_[rank].listener);
  }
  RunAfter([listeners = std::move(listeners), norm = NormOf({.spec = spec(),
                                                             .layout = layout_,
                                                             .step = sealed,
                                                             .update_counts = record_.update_counts,
                                                             .non_finite = non_finite})] {
    for (const auto& listener : listeners) listener->OnNorm(norm);
  });
}

void JobImpl::DecideOrTry(Draft draft) {
  const auto is_finite = [](const StateBounds& bounds) { return bounds.finite(); };
  if (!draft.outcome.decision.apply ||
      std::all_of(draft.bounds.begin(), draft.bounds.end(), is_finite)) {
    UpdatePlan plan = Decide(std::move(draft));
    trace_.Record(TraceEventKind::kDecided, plan.terms.step, /*chunk=*/-1, sealed_ns_);
    return RunAfter(
        [self = Self(), plan = std::move(plan)]() mutable { self->CarryOut(std::move(plan)); });
  }
  // The bounds do not settle it, so the update is tried. After that they are finite, or the draft
  // is a skip, and the next call decides.
  gate_.StartComputing();
  RunAfter([this, self = Self(), draft = std::move(draft)]() mutable {
    TryUpdate(draft);
    Section section(*this);
    gate_.StopComputing();
    EnterHere(Admission::kUpdate, -1,
              [this, self, draft = std::move(draft)](absl::Status admitted)
                  ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                    if (!admitted.ok()) return gate_.EndDeciding();  // Aborted meanwhile.
                    DecideOrTry(std::move(draft));
                  });
  });
}

void JobImpl::TryUpdate(Draft& draft) {
  const auto chunks = static_cast<int64_t>(layout_.chunks().size());
  std::vector<TrialUpdate> trials(chunks);
  environment_.tasks->ForEach(chunks, [&](int64_t index) {
    const int chunk = static_cast<int>(index);
    if (draft.bounds[layout_.chunks()[chunk].group].finite()) return;
    trials[chunk] =
        TryUpdateChunk(UpdateOf(draft.update, chunk, store_->Published(chunk)),
                       [&](int parameter) { return draft.update.update_counts[parameter]; });
  });
  for (StateBounds& bounds : draft.bounds) {
    // What is tried is measured, so these bounds begin at zero and become the largest magnitudes.
    if (!bounds.finite()) bounds = {.master = 0, .exp_avg = 0, .exp_avg_sq = 0};
  }
  // The first in the order of groups and of declaration, whichever chunk has it.
  std::optional<ChunkPiece> first;
  const auto place = [&](const ChunkPiece& piece) {
    return std::tuple(layout_.chunks()[piece.chunk].group, piece.parameter, piece.parameter_offset);
  };
  for (int chunk = 0; chunk < static_cast<int>(chunks); ++chunk) {
    const TrialUpdate& trial = trials[chunk];
    if (trial.non_finite.has_value()) {
      const ChunkPiece found = layout_.PieceAt(chunk, trial.non_finite->element);
      if (!first.has_value() || place(found) < place(*first)) first = found;
      continue;
    }
    if (!trial.largest.finite()) continue;  // It was not tried.
    StateBounds& bounds = draft.bounds[layout_.chunks()[chunk].group];
    bounds.master = std::max(bounds.master, trial.largest.master);
    bounds.exp_avg = std::max(bounds.exp_avg, trial.largest.exp_avg);
    bounds.exp_avg_sq = std::max(bounds.exp_avg_sq, trial.largest.exp_avg_sq);
  }
  if (!first.has_value()) return;
  draft.outcome.skip_reason = DescribeOverflow(draft, *first, *trials[first->chunk].non_finite);
  draft.outcome.skip_cause = SkipCause::kState;
  draft.outcome.decision.apply = false;
  draft.outcome.decision.multipliers.clear();
}

std::string JobImpl::DescribeOverflow(const Draft& draft, const ChunkPiece& piece,
                                      const TrialUpdate::NonFinite& found) const {
  const Chunk& chunk = layout_.chunks()[piece.chunk];
  const GradientView gradient = gradients_->view(piece.chunk);
  return ToString(Overflow{.plane = Name(found.plane),
                           .parameter = spec().layout.parameters[piece.parameter].name,
                           .element = piece.parameter_offset,
                           .value = found.value,
                           .rank = chunk.rank,
                           .gradient = LoadElement(gradient.data, gradient.dtype, found.element),
                           .multiplier = draft.update.multipliers[chunk.group]});
}

JobImpl::Draft JobImpl::MakeDraft(const SealedStep& sealed) {
  const absl::Span<const double> group_sums = *sealed.group_sums();
  const std::string non_finite = FirstNonFinite(sealed);
  Draft draft;
  static_cast<DecidedUpdate&>(draft) = DecideStep({.spec = spec(),
                                                   .layout = layout_,
                                                   .step = sealed,
                                                   .update_counts = record_.update_counts,
                                                   .non_finite = non_finite});
  if (!draft.outcome.decision.apply) return draft;
  for (int group = 0; group < layout_.group_count(); ++group) {
    draft.bounds.push_back(BoundsAfter(bounds_.empty() ? StateBounds() : bounds_[group],
                                       draft.update.hyper_parameters[group], group_sums[group],
                                       draft.update.multipliers[group]));
  }
  return draft;
}

std::string JobImpl::FirstNonFinite(const SealedStep& sealed) const {
  const auto is_finite = [](double sum) { return std::isfinite(sum); };
  if (std::all_of(sealed.group_sums()->begin(), sealed.group_sums()->end(), is_finite)) return "";
  // It may find none: a rank can still write to memory that it shares after the sums were computed.
  const std::optional<ChunkPiece> found = gradients_->FirstNonFinite();
  if (!found.has_value()) return "";
  // Nearer to the cause than what has been summed over ranks.
  if (const std::optional<NonFiniteReport>& report = sealed.non_finite(); report.has_value()) {
    return absl::StrCat("gradient of ", spec().layout.parameters[report->found.parameter].name,
                        " is ", report->found.value, " at element ", report->found.element,
                        ", found on rank ", report->rank, " in micro-step ", report->micro_step,
                        " before reducing");
  }
  const GradientView gradient = gradients_->view(found->chunk);
  return absl::StrCat("gradient of ", spec().layout.parameters[found->parameter].name, " is ",
                      LoadElement(gradient.data, gradient.dtype, found->chunk_offset),
                      " at element ", found->parameter_offset, ", from rank ",
                      layout_.chunks()[found->chunk].rank);
}

JobImpl::UpdatePlan JobImpl::Decide(Draft draft) {
  SealedStep sealed = std::move(std::get<SealedStep>(step_));
  UpdatePlan plan;
  plan.terms = sealed.terms();
  plan.vote = sealed.vote();
  plan.micro_steps = sealed.micro_steps();
  plan.coverage_complete = ledger_.IsWhole(plan.micro_steps);
  history_.SetGroupNorms(plan.terms.step,
                         GroupNorms(*sealed.group_sums(), plan.terms.settings.scale));
  plan.update = std::move(draft.update);
  if (draft.outcome.decision.apply) bounds_ = std::move(draft.bounds);
  // No stream is opened before the commit (kOpenStream), so these are all that are to be told.
  plan.listeners = ranks_.ByRank();
  plan.weights_in_place = ranks_.WeightsMemories();
  plan.outcome = draft.outcome;
  if (CanSpeculate()) {
    // This drops versions that no word of the table names. A death between this and the decision's
    // record changes nothing that a later process would find.
    plan.speculation = speculation_.Settle(
        *store_, ChunksAsSpeculated(layout_, plan.outcome, speculation_.begun_with(), plan.update),
        plan.outcome.decision.apply,
        [&](int rank, uint64_t stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
          return ranks_.IsCurrent({.rank = rank, .stream = stream});
        },
        ranks_.size());
  } else {
    plan.speculation.chunks_left = static_cast<int64_t>(layout_.chunks().size());
  }
  // The record is stored before any rank is told or any chunk is written: from here on a later
  // process carries the step out, too.
  KeepDecision(plan, sealed.ranks()[0].attempt);
  gate_.Decide();
  step_ = std::move(sealed).Decide(std::move(draft.outcome));  // The commit point.
  return plan;
}

// ---------------------------------------------------------------- the update

void JobImpl::CarryOut(UpdatePlan plan) {
  for (size_t rank = 0; rank < plan.listeners.size(); ++rank) {
    if (plan.listeners[rank] == nullptr) continue;
    plan.listeners[rank]->OnDecision(plan.outcome, plan.speculation.dropped.empty()
                                                       ? absl::Span<const int>()
                                                       : plan.speculation.dropped[rank]);
  }
  if (!plan.outcome.decision.apply) return Commit(std::move(plan));
  // Only now, with the decision's record stored: with its word in the table a version is the state.
  store_->Publish(plan.speculation.published, plan.update.step);
  if (plan.speculation.chunks_left == 0) return Commit(std::move(plan));
  // Ascending: backward ends with the first layers, so the first chunks' gradients are those that
  // caches may still have; and a chunk's index is what leads it to its NUMA node.
  const auto shared = std::make_shared<UpdatePlan>(std::move(plan));
  environment_.tasks->ForEach(
      static_cast<int64_t>(layout_.chunks().size()),
      [self = Self(), shared](int64_t chunk) {
        self->Guarded([&] { self->CarryOutChunk(*shared, static_cast<int>(chunk)); });
      },
      [self = Self(), shared] { self->Guarded([&] { self->Commit(std::move(*shared)); }); });
}

int64_t JobImpl::WeightBytes(int index) const {
  const Chunk& chunk = layout_.chunks()[index];
  return chunk.elements * SizeBytes(spec().groups[chunk.group].return_dtype);
}

ChunkUpdate JobImpl::UpdateOf(const StepUpdate& update, int index, const Slot& from) const {
  const int group = layout_.chunks()[index].group;
  return {.layout = &layout_,
          .chunk = index,
          .gradient = gradients_->view(index),
          .from = from,
          .to = {},
          .hyper_parameters = &update.hyper_parameters[group],
          .multiplier = update.multipliers[group],
          .shard = nullptr,
          .shard_dtype = spec().groups[group].return_dtype};
}

void JobImpl::UpdateTo(const StepUpdate& update, int index, const ChunkStore::Write& write,
                       const WeightBuffer& weights, RedoLane* redo) {
  ChunkUpdate chunk = UpdateOf(update, index, write.from);
  chunk.to = write.to;
  chunk.shard = weights.data();
  chunk.redo = redo;
  UpdateChunk(chunk, [&](int parameter) { return update.update_counts[parameter]; });
}

WeightBuffer JobImpl::BufferFor(const UpdatePlan& plan, int index, bool gradient_may_go) {
  const auto& memory = plan.weights_in_place[layout_.chunks()[index].rank];
  if (memory != nullptr) return WeightBuffer::InPlace(memory, index);
  // The decision is made, so nothing but this update reads the gradient any more.
  WeightBuffer place = gradients_->LendPlace(index, WeightBytes(index), gradient_may_go);
  return place ? std::move(place) : weight_buffers_->TryTake(WeightBytes(index));
}

void JobImpl::CarryOutChunk(const UpdatePlan& plan, int chunk) {
  using Left = Speculation::Settled::Left;
  switch (plan.speculation.left.empty() ? Left::kUpdate : plan.speculation.left[chunk]) {
    case Left::kUpdate:
      return ApplyToChunk(plan, chunk);
    case Left::kSend:
      return SendPublishedWeights(plan, chunk);
    case Left::kNothing:
      return;
  }
}

void JobImpl::SendPublishedWeights(const UpdatePlan& plan, int index) {
  const Chunk& chunk = layout_.chunks()[index];
  const std::shared_ptr<RankListener>& listener = plan.listeners[chunk.rank];
  if (listener == nullptr) return;
  // Null: the listener reads the weights again. Another stream has been sent them, which is rare.
  WeightBuffer weights;
  if (plan.weights_in_place[chunk.rank] != nullptr) {
    weights = WeightBuffer::InPlace(plan.weights_in_place[chunk.rank], index);
    ConvertFromFloat(store_->Published(index)[Plane::kMaster], weights.data(),
                     spec().groups[chunk.group].return_dtype, chunk.elements);
  }
  CountWeights(index, weights);
  listener->OnWeights(plan.update.step, index, std::move(weights));
}

void JobImpl::ApplyToChunk(const UpdatePlan& plan, int index) {
  const Chunk& chunk = layout_.chunks()[index];
  const std::shared_ptr<RankListener>& listener = plan.listeners[chunk.rank];
  auto write = store_->BeginWrite(index, Destination::kInPlaceIfFree);
  // A pinned chunk has a slot reserved, so there is always a place.
  Check(write.ok(), "a decided chunk has a place to be written to");
  RedoLane* const lane =
      kept_ != nullptr && write->in_place ? kept_->TakeLane(index, plan.update.step) : nullptr;
  // What is written elsewhere has no lane: a later process computes it from the gradient again.
  const bool gradient_may_go = kept_ == nullptr || lane != nullptr;
  WeightBuffer weights;
  if (listener != nullptr) weights = BufferFor(plan, index, gradient_may_go);
  {
    const TraceSpan span(trace_, TraceEventKind::kUpdated, plan.update.step, index);
    UpdateTo(plan.update, index, *write, weights, lane);
  }
  if (!write->in_place) Stored("a new version of a chunk");
  store_->Publish(*write, plan.update.step);
  // After the chunk's word: up to that a later process needs the lane to go on with the update.
  if (lane != nullptr) kept_->GiveLane(lane);
  if (listener == nullptr) return;
  CountWeights(index, weights);
  listener->OnWeights(plan.update.step, index, std::move(weights));
}

void JobImpl::TakeOverrides(const StepSettings& settings, const StepVote& vote) {
  std::vector<HyperParameters>& values = record_.hyper_parameters;
  // In the order in which they were said; what an operator has changed since the step began comes
  // last.
  for (const auto* said : {&settings.overrides, &vote.overrides}) {
    for (const auto& [group, overrides] : *said) values[group] = Apply(values[group], overrides);
  }
  for (int group = 0; group < layout_.group_count(); ++group) {
    values[group] = Apply(values[group], std::exchange(record_.later_changes[group], {}));
  }
}

void JobImpl::Commit(UpdatePlan plan) {
  // Before the lock is taken, since the last reference to a rank's memory unmaps it.
  plan.weights_in_place.clear();
  Section section(*this);
  if (broken()) return;
  const auto* decided = std::get_if<DecidedStep>(&step_);
  Check(decided != nullptr, "only a decided step is committed");
  const StepTimes times = decided->TimesUntilNow();
  last_accumulators_in_use_ = gradients_->accumulators_in_use();
  gradients_->ClearAll();
  ledger_.Clear();
  sums_.Clear();
  speculation_.Recycle(std::move(plan.speculation.published));
  VoidAllTickets();
  // A skipped step uses up its number, so chunks stand at it with the state that they had.
  if (!plan.outcome.decision.apply) store_->SetStep(plan.terms.step);
  trace_.Mark(TraceEventKind::kCommitted, plan.terms.step);
  const uint64_t step = plan.terms.step;
  RecordStep({.outcome = std::move(plan.outcome),
              .terms = std::move(plan.terms),
              .vote = std::move(plan.vote),
              .micro_steps = plan.micro_steps,
              .coverage_complete = plan.coverage_complete,
              .hyper_parameters = std::move(plan.update.hyper_parameters),
              .update_counts = std::move(plan.update.update_counts),
              .speculation = plan.speculation.counts},
             times);
  ranks_.FreeLeft();
  step_ = std::monostate();
  gate_.Commit();
  step_over_.NotifyAll();
  SaveIfDue();
  // Memories are unmapped last: that takes long, and ranks wait for the commit.
  RunAfter([listeners = std::move(plan.listeners), lenders = ranks_.TakeLenders(), step,
            update_seconds = times.updating]() mutable {
    for (const auto& listener : listeners) {
      if (listener != nullptr) listener->OnCommitted(step, update_seconds);
    }
  });
}

void JobImpl::RecordStep(KeptDecision decided, const StepTimes& times) {
  if (spec().keep_previous) {
    // Before anything below changes what an undo is to bring back.
    record_.previous = PreviousState{.committed_step = record_.committed_step,
                                     .applied = decided.outcome.decision.apply,
                                     .hyper_parameters = record_.hyper_parameters,
                                     .update_counts = record_.update_counts,
                                     .trainer_state = record_.trainer_state};
  }
  if (decided.outcome.decision.apply) {
    for (size_t p = 0; p < record_.update_counts.size(); ++p) {
      if (decided.update_counts[p] > 0) record_.update_counts[p] = decided.update_counts[p];
    }
  }
  TakeOverrides(decided.terms.settings, decided.vote);
  Move();
  record_.committed_step = decided.terms.step;
  record_.trainer_state =
      decided.vote.trainer_state.value_or(std::move(decided.terms.settings.trainer_state));
  record_.history.Add({.outcome = std::move(decided.outcome),
                       .speculation = decided.speculation,
                       .micro_steps = decided.micro_steps,
                       .loss_scale = decided.terms.settings.scale.loss_scale,
                       .times = times,
                       .voted = decided.vote.clipping,
                       .abandoned = !decided.vote.apply,
                       .hyper_parameters = std::move(decided.hyper_parameters)},
                      decided.coverage_complete);
  history_.Add(record_.history.recent_steps.back(),
               {.job_bytes = need_.total_bytes() + RankMemoryBytesNow(),
                .service_bytes = environment_.budget->used_bytes()});
  record_.last_vote = std::move(decided.vote);
  if (kept_ != nullptr) kept_->FreeLeftSumLanes();
  record_.decision.reset();
  // With the next epoch, words of the ledger and entries of the log count no more, in the same
  // flip.
  ++record_.epoch;
  Keep();
}

}  // namespace ballast
