// Provisional updates, before the decision, on the engine's threads.
#include <memory>
#include <optional>
#include <utility>

#include "cpu_optimizer_service/host/kept_record.h"
#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {

std::optional<Speculation::Task> JobImpl::SpeculateIfWorthwhile(int index, double squared_norm) {
  if (speculation_.update() == nullptr) return std::nullopt;
  const int owner = layout_.chunks()[index].rank;
  // Of an attempt that can no longer be decided, nothing is worth it.
  const auto* open = std::get_if<OpenStep>(&step_);
  if (open != nullptr && !open->IsLive(owner)) return std::nullopt;
  speculation_.AddSquaredNorm(index, squared_norm);
  // A chunk of zeros alone is most likely unused, and will be skipped.
  if (spec().unused_policy == UnusedPolicy::kSkip && gradients_->is_zero(index)) {
    return std::nullopt;
  }
  const RankEntry& rank = ranks_[owner];
  if (rank.update_mode != UpdateMode::kSpeculate || !speculation_.Queue(index)) {
    return std::nullopt;
  }
  if (auto memory = rank.WeightsMemory(); memory != nullptr) {
    return speculation_.MakeTask(index, WeightBuffer::InPlace(std::move(memory), index));
  }
  // Behind those that are parked already: the task that can run may be of another chunk.
  speculation_.Park(index);
  return NextParked();
}

std::optional<Speculation::Task> JobImpl::NextParked() {
  const std::optional<int> chunk = speculation_.first_parked();
  if (!chunk.has_value()) return std::nullopt;
  WeightBuffer weights = weight_buffers_->TryTakeOrTell(WeightBytes(*chunk));
  if (!weights) return std::nullopt;
  speculation_.Unpark();
  return speculation_.MakeTask(*chunk, std::move(weights));
}

// Until the pool is empty again, so that the next buffer to be given back is announced for what is
// parked then.
void JobImpl::StartParked() {
  for (;;) {
    std::optional<Speculation::Task> task;
    {
      MutexLock lock(mutex_);
      if (!broken()) task = NextParked();
    }
    if (!task.has_value()) return;
    StartProvisional(*std::move(task));
  }
}

void JobImpl::StartProvisional(Speculation::Task task) {
  const int chunk = task.chunk;
  // Shared, since std::function requires that it can be copied.
  auto shared = std::make_shared<Speculation::Task>(std::move(task));
  StartOfChunk(chunk, [self = Self(), shared = std::move(shared)] {
    self->RunProvisional(std::move(*shared));
  });
}

bool JobImpl::AcceptsProvisional(const RankEntry& rank, const WeightBuffer& weights) {
  if (!weights || rank.listener == nullptr || rank.update_mode != UpdateMode::kSpeculate) {
    return false;
  }
  // The stream may be another than when the update began, and take its weights elsewhere.
  return weights.in_place() == (rank.WeightsMemory() != nullptr);
}

void JobImpl::RunProvisional(Speculation::Task task) {
  const int index = task.chunk;
  const std::shared_ptr<const StepUpdate>& update = task.update;
  const int owner = layout_.chunks()[index].rank;
  {
    MutexLock lock(mutex_);
    if (broken() || !speculation_.Run(task)) return;
    gate_.StartComputing(owner);
  }
  absl::StatusOr<ChunkStore::Write> write = store_->BeginWrite(index, Destination::kFresh);
  // There may be no slot: a save or a snapshot has the other one, and the budget has no room for
  // one more. Then the chunk is updated after the decision.
  if (write.ok()) {
    const TraceSpan span(trace_, TraceEventKind::kSpeculated, update->step, index);
    UpdateTo(*update, index, *write, task.weights);
    Stored("a provisional version of a chunk");
  }
  const std::shared_ptr<RankListener> listener = FinishProvisional(task, write);
  if (listener == nullptr) return;
  // It still counts as computing: the decision waits for it, so that no rank is told the decision
  // before the provisional weights that it speaks of.
  CountWeights(index, task.weights);
  listener->OnProvisionalWeights(update->step, index, std::move(task.weights));
  Section section(*this);
  if (broken()) return;
  speculation_.StopSending(index);
  gate_.StopComputing(owner);
}

std::shared_ptr<RankListener> JobImpl::FinishProvisional(
    const Speculation::Task& task, const absl::StatusOr<ChunkStore::Write>& write) {
  const int index = task.chunk;
  const int owner = layout_.chunks()[index].rank;
  Section section(*this);
  if (broken()) return nullptr;
  const bool superseded = speculation_.IsSuperseded(index);
  if (write.ok()) {
    speculation_.Finish(*write);
    ++record_.history.speculation.speculated;
  } else {
    speculation_.Fail(index);
  }
  // The contribution that waits for this drops the version (Accept), so its weights are not sent.
  if (superseded) gate_.StopSuperseded(owner);
  const RankEntry& rank = ranks_[owner];
  if (write.ok() && !superseded && AcceptsProvisional(rank, task.weights)) {
    speculation_.StartSending(index, rank.stream);
    return rank.listener;
  }
  gate_.StopComputing(owner);
  return nullptr;
}

}  // namespace ballast
