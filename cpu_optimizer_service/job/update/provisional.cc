// Provisional updates, before the decision.
#include <memory>
#include <optional>
#include <utility>

#include "cpu_optimizer_service/host/kept_record.h"
#include "cpu_optimizer_service/job/update/executor.h"

namespace ballast {

void Executor::Begin(const StepTerms& terms) {
  speculation_.Begin(CanSpeculate()
                         ? MakeProvisionalUpdate(core_.spec(), terms, core_.record.update_counts)
                         : nullptr,
                     terms.settings.expected_clipping.max_norm);
}

std::optional<Speculation::Task> Executor::SpeculateIfWorthwhile(int index, double squared_norm) {
  if (speculation_.update() == nullptr) return std::nullopt;
  const int owner = core_.layout.chunks()[index].rank;
  // Of an attempt that can no longer be decided, nothing is worth it.
  const bool is_open = machine_.stage() == StepMachine::Stage::kOpen;
  if (is_open && !machine_.agreement()->IsLive(owner)) return std::nullopt;
  speculation_.AddSquaredNorm(index, squared_norm);
  // Newton-Schulz begins from decided directions alone.
  if (HasTwoRounds(index)) return std::nullopt;
  // A chunk of zeros alone is most likely unused, and will be skipped.
  if (core_.spec().unused_policy == UnusedPolicy::kSkip && memory_.gradients->is_zero(index)) {
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

std::optional<Speculation::Task> Executor::NextParked() {
  const std::optional<int> chunk = speculation_.first_parked();
  if (!chunk.has_value()) return std::nullopt;
  WeightBuffer weights = memory_.weight_buffers->TryTakeOrTell(WeightBytes(*chunk));
  if (!weights) return std::nullopt;
  speculation_.Unpark();
  return speculation_.MakeTask(*chunk, std::move(weights));
}

// Until the pool is empty again, so that the next buffer to be given back is announced for what is
// parked then.
void Executor::StartParked() {
  for (;;) {
    std::optional<Speculation::Task> task;
    {
      JobCore::Lock lock(core_);
      task = NextParked();
    }
    if (!task.has_value()) return;
    StartProvisional(*std::move(task));
  }
}

void Executor::StartProvisional(Speculation::Task task) {
  const int chunk = task.chunk;
  // Shared, since std::function requires that it can be copied.
  auto shared = std::make_shared<Speculation::Task>(std::move(task));
  StartOfChunk(chunk, [this, shared = std::move(shared)] { RunProvisional(std::move(*shared)); });
}

// Whether the rank's stream accepts provisional weights where these lie.
static bool AcceptsProvisional(const RankEntry& rank, const WeightBuffer& weights) {
  if (!weights || rank.listener == nullptr || rank.update_mode != UpdateMode::kSpeculate) {
    return false;
  }
  // The stream may be another than when the update began, and take its weights elsewhere.
  return weights.in_place() == (rank.WeightsMemory() != nullptr);
}

void Executor::RunProvisional(Speculation::Task task) {
  const int index = task.chunk;
  const std::shared_ptr<const StepUpdate>& update = task.update;
  const int owner = core_.layout.chunks()[index].rank;
  {
    JobCore::Lock lock(core_);
    if (!speculation_.Run(task)) return;
    core_.gate.StartComputing(owner);
  }
  absl::StatusOr<ChunkStore::Write> write = memory_.store->BeginWrite(index, Destination::kFresh);
  // There may be no slot: a save or a snapshot has the other one, and the budget has no room for
  // one more. Then the chunk is updated after the decision.
  if (write.ok()) {
    const TraceSpan span(core_.trace, TraceEventKind::kSpeculated, update->step, index);
    UpdateTo(*update, index, *write, task.weights);
    Stored("a provisional version of a chunk");
  }
  const std::shared_ptr<RankListener> listener = FinishProvisional(task, write);
  if (listener == nullptr) return;
  // It still counts as computing: the decision waits for it, so that no rank is told the decision
  // before the provisional weights that it speaks of.
  CountWeights(index, task.weights);
  listener->OnProvisionalWeights(update->step, index, std::move(task.weights));
  JobCore::Section section(core_);
  speculation_.StopSending(index);
  core_.gate.StopComputing(owner);
}

std::shared_ptr<RankListener> Executor::FinishProvisional(
    const Speculation::Task& task, const absl::StatusOr<ChunkStore::Write>& write) {
  const int index = task.chunk;
  const int owner = core_.layout.chunks()[index].rank;
  JobCore::Section section(core_);
  const bool superseded = speculation_.IsSuperseded(index);
  if (write.ok()) {
    speculation_.Finish(*write);
    ++core_.record.history.speculation.speculated;
  } else {
    speculation_.Fail(index);
  }
  // The contribution that waits for this drops the version (Accept), so its weights are not sent.
  if (superseded) core_.gate.StopSuperseded(owner);
  const RankEntry& rank = ranks_[owner];
  if (write.ok() && !superseded && AcceptsProvisional(rank, task.weights)) {
    speculation_.StartSending(index, rank.stream);
    return rank.listener;
  }
  core_.gate.StopComputing(owner);
  return nullptr;
}

}  // namespace ballast
