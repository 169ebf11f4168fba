// Gradients that a rank gives, and the sums of their squares.
//
// A payload is added by the thread that brings it, while it is in that thread's cache, and its sums
// of squares are computed there, too. What lies in memory that is shared with the rank costs the
// transport's thread nothing but the ledger: it stays where it is, and a task computes its sums.
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"

namespace ballast {

absl::Status JobImpl::CheckContribution(int rank, const Contribution& given) const {
  if (given.chunk < 0 || given.chunk >= static_cast<int64_t>(core_.layout.chunks().size())) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", given.chunk, " is not in job ",
                                                   spec().name, ", which has ",
                                                   core_.layout.chunks().size()));
  }
  const Chunk& chunk = core_.layout.chunks()[given.chunk];
  if (chunk.rank != rank) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", given.chunk, " belongs to rank ",
                                                   chunk.rank, ", not to rank ", rank));
  }
  if (given.in_place && given.empty) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", given.chunk, " from rank ", rank,
                                                   " lies in shared memory and is empty"));
  }
  size_t size_bytes = 0;
  for (const auto& piece : given.payload) size_bytes += piece.size();
  const DType dtype = spec().groups[chunk.group].wire_dtype;
  const bool has_payload = !given.empty && !given.in_place;
  const size_t expected =
      has_payload ? static_cast<size_t>(chunk.elements * SizeBytes(dtype)) : size_t{0};
  if (size_bytes != expected) {
    return absl::InvalidArgumentError(absl::StrCat(
        "chunk ", given.chunk, " from rank ", rank, " has ", size_bytes, " bytes, expected ",
        expected,
        given.empty      ? " as it is empty"
        : given.in_place ? " as it lies in shared memory"
                         : absl::StrCat(": ", chunk.elements, " elements of ", Name(dtype))));
  }
  return CheckMicroSteps(absl::StrCat("chunk ", given.chunk, " covers"), given.micro_step_end);
}

absl::StatusOr<JobImpl::Accepted> JobImpl::Accept(const StreamKey& key, const Contribution& given) {
  const int chunk = static_cast<int>(given.chunk);
  BALLAST_RETURN_IF_ERROR(members_.CheckCurrent(key));
  BALLAST_RETURN_IF_ERROR(CheckContribution(key.rank, given));
  BALLAST_ASSIGN_OR_RETURN(
      const StepMachine::Wants wants,
      machine_.CheckContribution(Before(), key.rank, {given.step, given.attempt}, chunk,
                                 given.micro_step_begin, given.micro_step_end));
  if (wants == StepMachine::Wants::kDiscarded) {
    return Accepted{.result = ContributionResult::kDiscarded};
  }
  if (wants == StepMachine::Wants::kRepeat) return Accepted{.result = ContributionResult::kRepeat};
  // The sum has a part of one contribution already. Any other one would be added to a torn sum.
  if (memory_.gradients->half_added(chunk) &&
      (given.empty ||
       !journal_.kept()->sum_lanes().HasLeft(
           chunk, KeptJob::TagOf(core_.record.epoch, given.attempt, given.micro_step_end)))) {
    return absl::FailedPreconditionError(absl::StrCat(
        "chunk ", given.chunk, " from rank ", key.rank, " covers micro-steps ",
        given.micro_step_begin, " to ", given.micro_step_end,
        ", but the service crashed while adding other ones; send those again, or discard the "
        "attempt"));
  }
  if (executor_.IsUpdatedAhead(chunk)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "chunk ", given.chunk, " from rank ", key.rank, " covers micro-steps ",
        given.micro_step_begin, " to ", given.micro_step_end,
        ", but its provisional update, which reads the earlier ones, is running; stop it first "
        "(RankStream::StopProvisional)"));
  }
  const RankEntry& rank = members_.table[key.rank];
  Accepted accepted = {.ahead = executor_.Renew(chunk), .epoch = core_.record.epoch};
  if (given.in_place) {
    if (rank.memory == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("chunk ", given.chunk, " from rank ", key.rank,
                       " is declared to be in shared memory, but job ", spec().name,
                       " shares none with that rank"));
    }
    accepted.memory = rank.memory;
    // Where shared memory may be gone before the job is, its gradients are copied: what has been
    // acknowledged, and decided, must be there.
    const bool may_borrow =
        core_.environment.named_memory == nullptr || core_.environment.named_memory->KeepsShared();
    accepted.borrowed =
        may_borrow && given.final && machine_.ledger().next_micro_step(given.chunk) == 0;
  }
  if (accepted.borrowed) {
    members_.table.Lend(key.rank);
    memory_.gradients->Borrow(chunk, rank.memory->gradient(chunk).data());
    journal_.KeepContribution(given, accepted.epoch);
    machine_.Added(chunk, given.micro_step_end, given.final);
  } else {
    // This can refuse, so it comes before the contribution counts as being added.
    if (!given.empty) BALLAST_RETURN_IF_ERROR(memory_.gradients->MakePlace(chunk));
    core_.gate.StartAdding(key.rank);
  }
  if (given.empty) {
    // The process may die before the ledger's word is stored, and then the rank says it again. Said
    // twice it means the same.
    StepEffects effects;
    machine_.Empty(key.rank, chunk, given.micro_step_begin, given.micro_step_end, effects);
    Perform(std::move(effects));
  }
  return accepted;
}

absl::StatusOr<ContributionResult> JobImpl::Contribute(const StreamKey& key,
                                                       const Contribution& given) {
  const int64_t arrived_ns = core_.trace.Begin(given.step);
  const int chunk = static_cast<int>(given.chunk);
  Accepted accepted;
  {
    // A plain lock and no section: nothing in here gives a waiting call its turn.
    JobCore::Lock lock(core_);
    BALLAST_ASSIGN_OR_RETURN(accepted, Accept(key, given));
  }
  if (accepted.result != ContributionResult::kAdded) return accepted.result;
  if (!given.empty) {
    core_.traffic.CountGradient(
        core_.layout.chunks()[chunk].elements *
            SizeBytes(spec().groups[core_.layout.chunks()[chunk].group].wire_dtype),
        given.in_place);
  }
  if (accepted.borrowed) {
    core_.trace.Record(TraceEventKind::kArrived, given.step, chunk, arrived_ns);
    executor_.StartSums(given.step, chunk, accepted.ahead.ticket);
    return ContributionResult::kAdded;
  }
  // This rank's calls come one at a time, and no other rank owns the chunk.
  RedoLane* lane = nullptr;
  if (journal_.kept() != nullptr && !given.empty && memory_.gradients->changes_sum(chunk)) {
    lane = journal_.kept()->sum_lanes().Take(
        chunk, KeptJob::TagOf(accepted.epoch, given.attempt, given.micro_step_end),
        /*may_wait=*/false);
    // Without a lane a later process must not rely on the sum until all is added.
    if (lane == nullptr) journal_.KeepLost(given, accepted.epoch);
  }
  AddToGradient(given, accepted.memory.get(), lane);
  journal_.KeepContribution(given, accepted.epoch);
  if (lane != nullptr) journal_.kept()->sum_lanes().Give(lane);
  core_.trace.Record(TraceEventKind::kArrived, given.step, chunk, arrived_ns);
  // What may be added to later is not left to a task.
  const bool whole = given.final || given.may_guess;
  const bool sums_here = whole && (given.may_guess || !given.in_place);
  const double squared_norm =
      sums_here ? executor_.ComputeSums(given.step, chunk, accepted.ahead.update.get()) : 0;
  std::optional<Speculation::Task> provisional;
  {
    JobCore::Section section(core_);
    // Both in one section: a newer stream of the rank waits for StopAdding, and is told then what
    // the ledger has.
    machine_.Added(chunk, given.micro_step_end, given.final);
    core_.gate.StopAdding(key.rank);
    if (sums_here) provisional = executor_.FinishSums(chunk, squared_norm);
  }
  if (provisional.has_value()) executor_.StartProvisional(*std::move(provisional));
  if (whole && !sums_here) executor_.StartSums(given.step, chunk, accepted.ahead.ticket);
  return ContributionResult::kAdded;
}

// What is only queued is cancelled in the same section, so nothing starts before the Done.
Pending JobImpl::StopProvisional(const StreamKey& key, StepAttempt at, uint32_t micro_step_begin,
                                 absl::Span<const int64_t> chunks, Done<bool> done) {
  const auto number = std::make_shared<uint64_t>(0);
  {
    JobCore::Section section(core_);
    if (members_.CheckCurrent(key).ok()) SupersedeUpdates(key.rank, at, micro_step_begin, chunks);
    *number = core_.EnterHere(
        Admission::kSupersede, key.rank,
        [this, self = Self(), key, done = std::move(done)](absl::Status admitted)
            ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
              if (admitted.ok()) admitted = members_.CheckCurrent(key);
              core_.Reply<bool>(std::move(done), admitted.ok() ? absl::StatusOr<bool>(true)
                                                               : absl::StatusOr<bool>(admitted));
            });
    if (*number == 0) return {};
  }
  return core_.PendingOf(number);
}

void JobImpl::SupersedeUpdates(int rank, StepAttempt at, uint32_t micro_step_begin,
                               absl::Span<const int64_t> chunks) {
  const StepAgreement* const agreement = machine_.agreement();
  if (machine_.stage() != StepMachine::Stage::kOpen || agreement->step() != at.step ||
      agreement->ranks()[rank].attempt != at.attempt || !agreement->CheckMayContribute(rank).ok()) {
    return;
  }
  const auto chunk_count = static_cast<int64_t>(core_.layout.chunks().size());
  for (const int64_t index : chunks) {
    // A repeat changes nothing, and Contribute says what is wrong.
    if (index < 0 || index >= chunk_count || core_.layout.chunks()[index].rank != rank) continue;
    if (machine_.ledger().closed(index) ||
        machine_.ledger().next_micro_step(index) != micro_step_begin)
      continue;
    if (executor_.Supersede(static_cast<int>(index))) core_.gate.Supersede(rank);
  }
}

void JobImpl::AddToGradient(const Contribution& given, const RankMemory* memory, RedoLane* lane) {
  const int chunk = static_cast<int>(given.chunk);
  if (given.empty) {
    memory_.gradients->AddZeros(chunk);
  } else if (memory != nullptr) {
    const absl::Span<const std::byte> place = memory->gradient(chunk);
    memory_.gradients->Add(chunk, {&place, 1}, lane);
  } else {
    memory_.gradients->Add(chunk, given.payload, lane);
  }
}

}  // namespace ballast
