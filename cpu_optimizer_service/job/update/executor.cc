// Tasks, sums of squares, and what becomes of both when a step or a rank's part of it is over.
#include "cpu_optimizer_service/job/update/executor.h"

#include <algorithm>
#include <utility>

namespace ballast {

Executor::Executor(JobCore& core, JobMemory& memory, Journal& journal, const StateView& view,
                   const RankTable& ranks, const StepMachine& machine)
    : core_(core),
      memory_(memory),
      journal_(journal),
      view_(view),
      ranks_(ranks),
      machine_(machine),
      tasks_(*core.environment.tasks),
      sums_(static_cast<int64_t>(core.layout.chunks().size())),
      speculation_(core.layout),
      tickets_(core.layout.world_size()) {}

void Executor::StartTask(std::function<void()> work, int node) {
  tasks_.Start([keep = core_.KeepAlive(), work = std::move(work)] { work(); }, node);
}

void Executor::StartOfChunk(int chunk, std::function<void()> task) {
  const int node =
      core_.environment.tasks->NodeOf(chunk, static_cast<int64_t>(core_.layout.chunks().size()));
  StartTask(std::move(task), node);
}

// ---------------------------------------------------------------- sums of squares

Executor::Ahead Executor::Renew(int chunk) {
  // It was made of less than there will be: the chunk had come with may_guess.
  if (speculation_.Drop(chunk, *memory_.store)) ++core_.record.history.speculation.redone;
  sums_.Clear(chunk);
  return {.update = speculation_.update(), .ticket = tickets_[core_.layout.chunks()[chunk].rank]};
}

double Executor::ComputeSums(uint64_t step, int chunk, const StepUpdate* provisional) {
  const TraceSpan span(core_.trace, TraceEventKind::kSummed, step, chunk);
  memory_.gradients->ComputeSums(chunk);
  if (provisional == nullptr) return 0;
  const double unscale = provisional->multipliers[core_.layout.chunks()[chunk].group];
  return unscale * unscale * memory_.gradients->SumInChunk(chunk);
}

std::optional<Speculation::Task> Executor::FinishSums(int chunk, double squared_norm) {
  sums_.Finish(chunk);
  return SpeculateIfWorthwhile(chunk, squared_norm);
}

void Executor::StartSums(uint64_t step, int chunk, uint64_t ticket) {
  StartOfChunk(chunk, [this, step, chunk, ticket] { RunSums(step, chunk, ticket); });
}

void Executor::RunSums(uint64_t step, int chunk, uint64_t ticket) {
  const int owner = core_.layout.chunks()[chunk].rank;
  std::shared_ptr<const StepUpdate> update;
  {
    JobCore::Lock lock(core_);
    // The step is over or forgotten, or its decision was first. What the chunk holds now may be
    // another attempt's, which has tasks of its own.
    if (ticket != tickets_[owner] || !sums_.Claim(chunk)) return;
    core_.gate.StartComputing(owner);
    update = speculation_.update();
  }
  const double squared_norm = ComputeSums(step, chunk, update.get());
  std::optional<Speculation::Task> provisional;
  {
    JobCore::Section section(core_);
    core_.gate.StopComputing(owner);
    provisional = FinishSums(chunk, squared_norm);
  }
  // Here and now, since the gradient is in this thread's cache.
  if (provisional.has_value()) RunProvisional(*std::move(provisional));
}

std::vector<bool> Executor::ClaimSums() {
  speculation_.Stop();
  return sums_.ClaimAll();
}

void Executor::ComputeClaimed(const std::vector<bool>& claimed, uint64_t step) {
  if (std::ranges::find(claimed, true) == claimed.end()) return;
  core_.environment.tasks->ForEach(static_cast<int64_t>(claimed.size()), [&](int64_t chunk) {
    if (claimed[chunk]) ComputeSums(step, static_cast<int>(chunk), nullptr);
  });
}

// ---------------------------------------------------------------- what is over or forgotten

void Executor::Cancel(int rank) {
  ++tickets_[rank];
  speculation_.Cancel(rank);
}

void Executor::CancelAll() {
  for (uint64_t& ticket : tickets_) ++ticket;
  speculation_.Stop();
}

void Executor::Forget(int rank) {
  Cancel(rank);
  speculation_.DropOfRank(rank, *memory_.store);
  for (const int chunk : core_.layout.chunks_of_rank(rank)) {
    sums_.Clear(chunk);
    memory_.gradients->Clear(chunk);
  }
}

void Executor::ForgetAll() {
  speculation_.DropAll(*memory_.store);
  sums_.Clear();
  memory_.gradients->ClearAll();
}

void Executor::EndStep(std::vector<ChunkStore::Write> published) {
  memory_.gradients->ClearAll();
  sums_.Clear();
  speculation_.Recycle(std::move(published));
  for (uint64_t& ticket : tickets_) ++ticket;
}

}  // namespace ballast
