// Gradients that a rank gives, and the sums of their squares.
//
// A payload is added by the thread that brings it, while it is in that thread's cache, and its sums
// of squares are computed there, too. What lies in memory that is shared with the rank costs the
// transport's thread nothing but the ledger: it stays where it is, and a task computes its sums.
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {

absl::Status JobImpl::CheckContribution(int rank, const Contribution& given) const {
  if (given.chunk < 0 || given.chunk >= static_cast<int64_t>(layout_.chunks().size())) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", given.chunk, " is not in job ",
                                                   spec().name, ", which has ",
                                                   layout_.chunks().size()));
  }
  const Chunk& chunk = layout_.chunks()[given.chunk];
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
  BALLAST_RETURN_IF_ERROR(CheckCurrent(key));
  BALLAST_RETURN_IF_ERROR(CheckContribution(key.rank, given));
  if (WasGivenUp(given.step, key.rank)) return Accepted{.result = ContributionResult::kDiscarded};
  BALLAST_ASSIGN_OR_RETURN(OpenStep * open, FindOpenStep(given.step));
  // A worker may push on one thread while it discards on another.
  BALLAST_ASSIGN_OR_RETURN(const bool current, open->CheckAttempt(key.rank, given.attempt));
  if (!current) return Accepted{.result = ContributionResult::kDiscarded};
  BALLAST_ASSIGN_OR_RETURN(
      const Ledger::Verdict verdict,
      ledger_.Check(given.chunk, given.micro_step_begin, given.micro_step_end));
  // Before it is asked whether the rank may still contribute: a stream that was opened again sends
  // what it does not know to have arrived, also after its seal.
  if (verdict == Ledger::Verdict::kRepeat) return Accepted{.result = ContributionResult::kRepeat};
  BALLAST_RETURN_IF_ERROR(open->CheckMayContribute(key.rank));
  // The sum has a part of one contribution already. Any other one would be added to a torn sum.
  if (gradients_->half_added(chunk) &&
      (given.empty || !kept_->HasLeft(chunk, KeptJob::TagOf(record_.epoch, given.attempt,
                                                            given.micro_step_end)))) {
    return absl::FailedPreconditionError(absl::StrCat(
        "chunk ", given.chunk, " from rank ", key.rank, " covers micro-steps ",
        given.micro_step_begin, " to ", given.micro_step_end,
        ", and others were being added when the service's process died; send those again, or "
        "discard the attempt"));
  }
  if (speculation_.IsRunning(chunk)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "chunk ", given.chunk, " from rank ", key.rank, " covers micro-steps ",
        given.micro_step_begin, " to ", given.micro_step_end,
        ", and its provisional update, which reads those before, is running; stop that first "
        "(RankStream::StopProvisional)"));
  }
  // It was made of less than there will be: the chunk had come with may_guess.
  if (speculation_.Drop(chunk, *store_)) ++record_.history.speculation.redone;
  sums_.Clear(chunk);
  const RankEntry& rank = ranks_[key.rank];
  Accepted accepted = {
      .provisional = speculation_.update(), .ticket = tickets_[key.rank], .epoch = record_.epoch};
  if (given.in_place) {
    if (rank.memory == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("chunk ", given.chunk, " from rank ", key.rank,
                       " is said to lie in shared memory, but job ", spec().name,
                       " shares none with that rank"));
    }
    accepted.memory = rank.memory;
    // Where shared memory may be gone before the job is, its gradients are copied: what has been
    // acknowledged, and decided, must be there.
    const bool may_borrow =
        environment_.named_memory == nullptr || environment_.named_memory->KeepsShared();
    accepted.borrowed = may_borrow && given.final && ledger_.next_micro_step(given.chunk) == 0;
  }
  if (accepted.borrowed) {
    ranks_.Lend(key.rank);
    gradients_->Borrow(chunk, rank.memory->gradient(chunk).data());
    KeepContribution(given, accepted.epoch);
    ledger_.Advance(given.chunk, given.micro_step_end, given.final);
  } else {
    // This can refuse, so it comes before the contribution counts as being added.
    if (!given.empty) BALLAST_RETURN_IF_ERROR(gradients_->MakePlace(chunk));
    gate_.StartAdding(key.rank);
  }
  if (given.empty) {
    // The process may die before the ledger's word is stored, and then the rank says it again. Said
    // twice it means the same.
    open->RecordEmpty(chunk, given.micro_step_begin, given.micro_step_end);
    if (kept_ != nullptr) {
      KeepWord({.kind = KeptWord::Kind::kEmpty,
                .rank = key.rank,
                .step = given.step,
                .chunk = chunk,
                .begin = given.micro_step_begin,
                .end = given.micro_step_end});
    }
  }
  return accepted;
}

absl::StatusOr<ContributionResult> JobImpl::Contribute(const StreamKey& key,
                                                       const Contribution& given) {
  const int64_t arrived_ns = trace_.Begin(given.step);
  const int chunk = static_cast<int>(given.chunk);
  Accepted accepted;
  {
    // A plain lock and no section: nothing in here gives a waiting call its turn.
    MutexLock lock(mutex_);
    BALLAST_ASSIGN_OR_RETURN(accepted, Accept(key, given));
  }
  if (accepted.result != ContributionResult::kAdded) return accepted.result;
  if (!given.empty) {
    traffic_.CountGradient(layout_.chunks()[chunk].elements *
                               SizeBytes(spec().groups[layout_.chunks()[chunk].group].wire_dtype),
                           given.in_place);
  }
  if (accepted.borrowed) {
    trace_.Record(TraceEventKind::kArrived, given.step, chunk, arrived_ns);
    StartSums(given.step, chunk, accepted.ticket);
    return ContributionResult::kAdded;
  }
  // This rank's calls come one at a time, and no other rank owns the chunk.
  SumLane* lane = nullptr;
  if (kept_ != nullptr && !given.empty && gradients_->changes_sum(chunk)) {
    lane = kept_->TakeSumLane(chunk,
                              KeptJob::TagOf(accepted.epoch, given.attempt, given.micro_step_end));
    // Without a lane a later process must not rely on the sum until all is added.
    if (lane == nullptr) KeepLost(given, accepted.epoch);
  }
  AddToGradient(given, accepted.memory.get(), lane);
  KeepContribution(given, accepted.epoch);
  if (lane != nullptr) kept_->GiveSumLane(lane);
  trace_.Record(TraceEventKind::kArrived, given.step, chunk, arrived_ns);
  // What may be added to later is not left to a task.
  const bool whole = given.final || given.may_guess;
  const bool sums_here = whole && (given.may_guess || !given.in_place);
  const double squared_norm =
      sums_here ? ComputeSums(given.step, chunk, accepted.provisional.get()) : 0;
  std::optional<Speculation::Task> provisional;
  {
    Section section(*this);
    if (broken()) return broken_;
    // Both in one section: a newer stream of the rank waits for StopAdding, and is told then what
    // the ledger has.
    ledger_.Advance(given.chunk, given.micro_step_end, given.final);
    gate_.StopAdding(key.rank);
    if (sums_here) {
      sums_.Finish(chunk);
      provisional = SpeculateIfWorthwhile(chunk, squared_norm);
    }
  }
  if (provisional.has_value()) StartProvisional(*std::move(provisional));
  if (whole && !sums_here) StartSums(given.step, chunk, accepted.ticket);
  return ContributionResult::kAdded;
}

// What is only queued is cancelled in the same section, so nothing starts before the Done.
Pending JobImpl::StopProvisional(const StreamKey& key, StepAttempt at, uint32_t micro_step_begin,
                                 absl::Span<const int64_t> chunks, Done<bool> done) {
  const auto number = std::make_shared<uint64_t>(0);
  {
    Section section(*this);
    if (CheckCurrent(key).ok()) SupersedeUpdates(key.rank, at, micro_step_begin, chunks);
    *number = EnterHere(Admission::kSupersede, key.rank,
                        [this, self = Self(), key, done = std::move(done)](absl::Status admitted)
                            ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                              if (admitted.ok()) admitted = CheckCurrent(key);
                              Reply<bool>(std::move(done), admitted.ok()
                                                               ? absl::StatusOr<bool>(true)
                                                               : absl::StatusOr<bool>(admitted));
                            });
    if (*number == 0) return {};
  }
  return PendingOf(number);
}

void JobImpl::SupersedeUpdates(int rank, StepAttempt at, uint32_t micro_step_begin,
                               absl::Span<const int64_t> chunks) {
  const auto* open = std::get_if<OpenStep>(&step_);
  if (open == nullptr || open->terms().step != at.step ||
      open->ranks()[rank].attempt != at.attempt || !open->CheckMayContribute(rank).ok()) {
    return;
  }
  const auto chunk_count = static_cast<int64_t>(layout_.chunks().size());
  for (const int64_t index : chunks) {
    // A repeat changes nothing, and Contribute says what is wrong.
    if (index < 0 || index >= chunk_count || layout_.chunks()[index].rank != rank) continue;
    if (ledger_.closed(index) || ledger_.next_micro_step(index) != micro_step_begin) continue;
    if (speculation_.Supersede(static_cast<int>(index))) gate_.Supersede(rank);
  }
}

void JobImpl::AddToGradient(const Contribution& given, const RankMemory* memory, SumLane* lane) {
  const int chunk = static_cast<int>(given.chunk);
  if (given.empty) {
    gradients_->AddZeros(chunk);
  } else if (memory != nullptr) {
    const absl::Span<const std::byte> place = memory->gradient(chunk);
    gradients_->Add(chunk, {&place, 1}, lane);
  } else {
    gradients_->Add(chunk, given.payload, lane);
  }
}

// ---------------------------------------------------------------- sums of squares

double JobImpl::ComputeSums(uint64_t step, int chunk, const StepUpdate* provisional) {
  const TraceSpan span(trace_, TraceEventKind::kSummed, step, chunk);
  gradients_->ComputeSums(chunk);
  if (provisional == nullptr) return 0;
  const double unscale = provisional->multipliers[layout_.chunks()[chunk].group];
  return unscale * unscale * gradients_->SumInChunk(chunk);
}

void JobImpl::StartOfChunk(int chunk, std::function<void()> task) {
  const int node = environment_.tasks->NodeOf(chunk, static_cast<int64_t>(layout_.chunks().size()));
  StartTask(std::move(task), node);
}

void JobImpl::StartSums(uint64_t step, int chunk, uint64_t ticket) {
  StartOfChunk(chunk, [self = Self(), step, chunk, ticket] { self->RunSums(step, chunk, ticket); });
}

void JobImpl::RunSums(uint64_t step, int chunk, uint64_t ticket) {
  const int owner = layout_.chunks()[chunk].rank;
  std::shared_ptr<const StepUpdate> update;
  {
    MutexLock lock(mutex_);
    // The step is over or forgotten, or its decision was first. What the chunk holds now may be
    // another attempt's, which has tasks of its own.
    if (broken() || ticket != tickets_[owner] || !sums_.Claim(chunk)) return;
    gate_.StartComputing(owner);
    update = speculation_.update();
  }
  const double squared_norm = ComputeSums(step, chunk, update.get());
  std::optional<Speculation::Task> provisional;
  {
    Section section(*this);
    if (broken()) return;
    sums_.Finish(chunk);
    gate_.StopComputing(owner);
    provisional = SpeculateIfWorthwhile(chunk, squared_norm);
  }
  // Here and now, since the gradient is in this thread's cache.
  if (provisional.has_value()) RunProvisional(*std::move(provisional));
}

}  // namespace ballast
