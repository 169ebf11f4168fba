// From the last seal to the commit. Runs on the engine's threads; `deciding_` keeps everyone else
// away from gradients and state meanwhile.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/job/chunk_update.h"
#include "cpu_optimizer_service/job/job_impl.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {

void JobImpl::StartDecisionIfDue() const {
  if (deciding_ || holds_ > 0 || !std::holds_alternative<SealedStep>(step_)) return;
  deciding_ = true;
  // const_cast: a reader's hold ends in a const call, and may be what the decision waited for.
  auto self = std::static_pointer_cast<JobImpl>(const_cast<JobImpl*>(this)->shared_from_this());
  environment_.tasks->Start([self] { self->RunDecision(); });
}

void JobImpl::RunDecision() {
  FinishSums();
  UpdatePlan plan;
  {
    MutexLock lock(mutex_);
    FinishGuesses();
    const auto* sealed = std::get_if<SealedStep>(&step_);
    if (sealed == nullptr) {  // Aborted meanwhile.
      deciding_ = false;
      changed_.NotifyAll();
      return;
    }
    plan = Decide(MakeOutcome(*sealed));
    trace_.Record(TraceEventKind::kDecided, plan.terms.step, /*chunk=*/-1, sealed_ns_);
  }
  for (size_t rank = 0; rank < plan.listeners.size(); ++rank) {
    if (plan.listeners[rank] == nullptr) continue;
    plan.listeners[rank]->OnDecision(
        plan.outcome, plan.dropped.empty() ? absl::Span<const int>() : plan.dropped[rank]);
  }
  if (plan.outcome.decision.apply) UpdateChunks(plan);
  plan.weights_in_place.clear();
  Commit(plan);
}

StepOutcome JobImpl::MakeOutcome(const SealedStep& sealed) {
  const StepTerms& terms = sealed.terms();
  std::vector<double> group_sums;
  for (int group = 0; group < layout_.group_count(); ++group) {
    group_sums.push_back(gradients_->CombineSums(group));
  }
  StepOutcome outcome;
  outcome.step = terms.step;
  outcome.decision = ballast::Decide(group_sums, terms.settings.scale, spec_.max_norm);
  if (!outcome.decision.apply) outcome.skip_reason = DescribeNonFinite(sealed.non_finite());
  return outcome;
}

std::string JobImpl::DescribeNonFinite(const std::optional<NonFiniteReport>& report) const {
  for (int index = 0; index < static_cast<int>(layout_.chunks().size()); ++index) {
    const Chunk& chunk = layout_.chunks()[index];
    const absl::Span<const double> sums = gradients_->block_sums(chunk.group);
    const int64_t end = chunk.begin + chunk.elements;
    for (int64_t block = chunk.begin / kBlockElements; block < end / kBlockElements; ++block) {
      if (std::isfinite(sums[block])) continue;
      const GradientView gradient = gradients_->view(index);
      for (int64_t i = block * kBlockElements; i < (block + 1) * kBlockElements; ++i) {
        const float value = LoadElement(gradient.data, gradient.dtype, i - chunk.begin);
        if (std::isfinite(value)) continue;
        if (report.has_value()) {  // Nearer to the cause than what has been summed over ranks.
          return absl::StrCat("gradient of ", spec_.layout.parameters[report->found.parameter].name,
                              " is ", report->found.value, " at element ", report->found.element,
                              ", found on rank ", report->rank, " in micro-step ",
                              report->micro_step, " before reducing");
        }
        const int parameter = layout_.ParameterAt(chunk.group, i);
        if (parameter == -1) return absl::StrCat("gradient is ", value, " in the padding");
        return absl::StrCat("gradient of ", spec_.layout.parameters[parameter].name, " is ", value,
                            " at element ", i - layout_.place(parameter).offset, ", from rank ",
                            chunk.rank);
      }
    }
  }
  return "the gradients' norm with the loss scale and clipping leaves no fp32 multiplier";
}

JobImpl::UpdatePlan JobImpl::Decide(StepOutcome outcome) {
  SealedStep sealed = std::move(std::get<SealedStep>(step_));
  UpdatePlan plan;
  plan.terms = sealed.terms();
  plan.micro_steps = sealed.micro_steps();
  if (ledger_.IsWhole(plan.micro_steps)) ++coverage_complete_steps_;
  plan.update = {.step = plan.terms.step,
                 .hyper_parameters = plan.terms.hyper_parameters,
                 .multipliers = outcome.decision.multipliers,
                 .update_counts = {}};
  plan.update.update_counts.reserve(update_counts_.size());
  for (int p = 0; p < static_cast<int>(update_counts_.size()); ++p) {
    const ParameterSpec& parameter = spec_.layout.parameters[p];
    const bool unused = parameter.trainable && layout_.place(p).elements > 0 && !sealed.used(p);
    if (unused) outcome.unused_parameters.push_back(parameter.name);
    const bool updated =
        parameter.trainable && !(unused && spec_.unused_policy == UnusedPolicy::kSkip);
    plan.update.update_counts.push_back(updated ? update_counts_[p] + 1 : 0);
  }
  for (const Rank& rank : ranks_) {
    plan.listeners.push_back(rank.listener);
    plan.weights_in_place.push_back(rank.weights_in_place ? rank.memory : nullptr);
  }
  plan.outcome = outcome;
  SettleGuesses(plan);
  step_ = std::move(sealed).Decide(std::move(outcome));  // The commit point.
  return plan;
}

int64_t JobImpl::ShardBytes(int index) const {
  const Chunk& chunk = layout_.chunks()[index];
  return chunk.elements * SizeBytes(spec_.groups[chunk.group].return_dtype);
}

void JobImpl::UpdateTo(const Update& update, int index, const ChunkStore::Write& write,
                       const WeightBuffer& shard) {
  const int group = layout_.chunks()[index].group;
  UpdateChunk({.layout = &layout_,
               .chunk = index,
               .gradient = gradients_->view(index),
               .from = write.from,
               .to = write.to,
               .hyper_parameters = &update.hyper_parameters[group],
               .multiplier = update.multipliers[group],
               .shard = shard.data(),
               .shard_dtype = spec_.groups[group].return_dtype},
              [&](int parameter) { return update.update_counts[parameter]; });
}

WeightBuffer JobImpl::ShardFor(const UpdatePlan& plan, int index) {
  const auto& memory = plan.weights_in_place[layout_.chunks()[index].rank];
  if (memory != nullptr) return WeightBuffer::InPlace(memory, index);
  // The decision is made, so nothing but this update reads the gradient any more.
  WeightBuffer place = gradients_->LendPlace(index, ShardBytes(index));
  return place ? std::move(place) : weight_buffers_->TryTake(ShardBytes(index));
}

void JobImpl::UpdateChunks(const UpdatePlan& plan) {
  store_->Publish(plan.holds, plan.update.step);
  if (plan.chunks_left == 0) return;
  // Ascending: backward ends with the first layers, so the first chunks' gradients are those that
  // caches may still hold; and a chunk's index is what leads it to its NUMA node.
  environment_.tasks->ForEach(static_cast<int64_t>(layout_.chunks().size()), [&](int64_t index) {
    const int chunk = static_cast<int>(index);
    switch (plan.left.empty() ? UpdatePlan::Left::kUpdate : plan.left[chunk]) {
      case UpdatePlan::Left::kUpdate:
        return ApplyToChunk(plan, chunk);
      case UpdatePlan::Left::kTell:
        return TellGuessedWeights(plan, chunk);
      case UpdatePlan::Left::kNothing:
        return;
    }
  });
}

void JobImpl::TellGuessedWeights(const UpdatePlan& plan, int index) {
  const Chunk& chunk = layout_.chunks()[index];
  const std::shared_ptr<RankListener>& listener = plan.listeners[chunk.rank];
  if (listener == nullptr) return;
  WeightBuffer shard;  // Another stream was told, so it is rare enough to be converted again.
  if (plan.weights_in_place[chunk.rank] != nullptr) {
    shard = WeightBuffer::InPlace(plan.weights_in_place[chunk.rank], index);
    ConvertFromFloat(store_->Published(index)[Plane::kMaster], shard.data(),
                     spec_.groups[chunk.group].return_dtype, chunk.elements);
  }
  listener->OnWeights(plan.update.step, index, std::move(shard));
}

void JobImpl::ApplyToChunk(const UpdatePlan& plan, int index) {
  const Chunk& chunk = layout_.chunks()[index];
  const std::shared_ptr<RankListener>& listener = plan.listeners[chunk.rank];
  WeightBuffer shard;
  if (listener != nullptr) shard = ShardFor(plan, index);
  auto write = store_->BeginWrite(index, Destination::kInPlaceIfFree);
  // A pinned chunk has a slot reserved, so there is always a place.
  Check(write.ok(), "a decided chunk has a place to be written to");
  {
    const TraceSpan span(trace_, TraceEventKind::kUpdated, plan.update.step, index);
    UpdateTo(plan.update, index, *write, shard);
  }
  store_->Publish(*write, plan.update.step);
  if (listener != nullptr) listener->OnWeights(plan.update.step, index, std::move(shard));
}

void JobImpl::Commit(UpdatePlan& plan) {
  double update_seconds = 0;
  RankMemories lenders;  // Let go of last: unmapping takes long, and ranks wait for the commit.
  {
    MutexLock lock(mutex_);
    const auto* decided = std::get_if<DecidedStep>(&step_);
    Check(decided != nullptr, "only a decided step is committed");
    update_seconds = decided->SecondsSinceDecision();
    last_accumulators_in_use_ = gradients_->accumulators_in_use();
    for (int chunk = 0; chunk < static_cast<int>(layout_.chunks().size()); ++chunk) {
      gradients_->Clear(chunk);
    }
    ledger_.Clear();
    sums_.assign(sums_.size(), SumsState::kNone);
    plan.holds.clear();
    guess_writes_.swap(plan.holds);  // For its memory.
    ++attempt_;
    if (plan.outcome.decision.apply) {
      for (size_t p = 0; p < update_counts_.size(); ++p) {
        if (plan.update.update_counts[p] > 0) update_counts_[p] = plan.update.update_counts[p];
      }
      ++applied_steps_;
    } else {
      store_->SetStep(plan.terms.step);
      ++skipped_steps_;
    }
    for (const auto& [group, overrides] : plan.terms.settings.overrides) {
      hyper_parameters_[group] = Apply(hyper_parameters_[group], overrides);
    }
    for (int group = 0; group < layout_.group_count(); ++group) {
      hyper_parameters_[group] = Apply(hyper_parameters_[group], later_changes_[group]);
      later_changes_[group] = {};
    }
    trace_.Mark(TraceEventKind::kCommitted, plan.terms.step);
    committed_step_ = plan.terms.step;
    trainer_state_ = plan.terms.settings.trainer_state;
    recent_steps_.push_back({.outcome = plan.outcome,
                             .speculation = plan.speculation,
                             .micro_steps = plan.micro_steps,
                             .loss_scale = plan.terms.settings.scale.loss_scale,
                             .hyper_parameters = plan.terms.hyper_parameters});
    std::vector<std::string>& names = recent_steps_.back().outcome.unused_parameters;
    names.resize(std::min(names.size(), kRecordedNames));
    if (recent_steps_.size() > kRecentSteps) recent_steps_.pop_front();
    for (Rank& rank : ranks_) {
      if (rank.lender != rank.memory) lenders.push_back(std::move(rank.lender));
      rank.lender = nullptr;
      FreeIfLeft(rank);
    }
    step_ = std::monostate();
    deciding_ = false;
    changed_.NotifyAll();
    step_over_.NotifyAll();
  }
  for (const auto& listener : plan.listeners) {
    if (listener != nullptr) listener->OnCommitted(plan.terms.step, update_seconds);
  }
}

}  // namespace ballast
