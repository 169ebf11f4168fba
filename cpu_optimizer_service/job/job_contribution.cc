// Gradients: taken from ranks, and their sums of squares.
//
// A payload is added by the thread that brings it, while it is in that thread's cache, and so are
// its sums taken. What lies in memory that is shared with the rank costs the transport's thread
// nothing but the ledger: it stays where it is, and a task takes its sums.
//
// The sums of a chunk go none -> running -> current under the job's mutex. Whoever makes them
// running computes them: a task, or, so that it never waits for what is only queued, the decision.
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {

absl::Status JobImpl::CheckContribution(int rank, const Contribution& given) const {
  if (given.chunk < 0 || given.chunk >= static_cast<int64_t>(layout_.chunks().size())) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", given.chunk, " is not in job ",
                                                   spec_.name, ", which has ",
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
  const DType dtype = spec_.groups[chunk.group].wire_dtype;
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
  if (spec_.max_micro_steps > 0 && given.micro_step_end > spec_.max_micro_steps) {
    return absl::FailedPreconditionError(absl::StrCat(
        "chunk ", given.chunk, " covers micro-steps up to ", given.micro_step_end, " but job ",
        spec_.name, " was created with max_micro_steps ", spec_.max_micro_steps));
  }
  return absl::OkStatus();
}

absl::StatusOr<JobImpl::Accepted> JobImpl::Take(const StreamKey& key, const Contribution& given) {
  const int chunk = static_cast<int>(given.chunk);
  BALLAST_RETURN_IF_ERROR(CheckCurrent(key));
  BALLAST_RETURN_IF_ERROR(CheckContribution(key.rank, given));
  BALLAST_ASSIGN_OR_RETURN(OpenStep * open, FindOpenStep(given.step));
  BALLAST_ASSIGN_OR_RETURN(
      const Ledger::Verdict verdict,
      ledger_.Check(given.chunk, given.micro_step_begin, given.micro_step_end));
  if (verdict == Ledger::Verdict::kRepeat) return Accepted{.repeat = true};
  BALLAST_RETURN_IF_ERROR(open->CheckMayContribute(key.rank));
  Rank& rank = ranks_[key.rank];
  Accepted taken = {.guess = guess_, .attempt = attempt_};
  if (given.in_place) {
    if (rank.memory == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat(
          "chunk ", given.chunk, " from rank ", key.rank,
          " is said to lie in shared memory, but job ", spec_.name, " shares none with that rank"));
    }
    taken.memory = rank.memory;
    taken.borrowed = given.final && ledger_.next_micro_step(given.chunk) == 0;
  }
  if (taken.borrowed) {
    rank.lender = rank.memory;
    gradients_->Borrow(chunk, rank.memory->gradient(chunk).data());
    ledger_.Advance(given.chunk, given.micro_step_end, given.final);
  } else {
    ++rank.in_flight;
  }
  if (given.empty) open->RecordEmpty(chunk, given.micro_step_begin, given.micro_step_end);
  return taken;
}

absl::StatusOr<ContributionResult> JobImpl::Contribute(const StreamKey& key,
                                                       const Contribution& given) {
  const int64_t arrived_ns = trace_.Begin(given.step);
  const int chunk = static_cast<int>(given.chunk);
  Accepted taken;
  {
    MutexLock lock(mutex_);
    BALLAST_ASSIGN_OR_RETURN(taken, Take(key, given));
  }
  if (taken.repeat) return ContributionResult::kRepeat;
  if (taken.borrowed) {
    trace_.Record(TraceEventKind::kArrived, given.step, chunk, arrived_ns);
    StartSums(given.step, chunk, taken.attempt);
    return ContributionResult::kAdded;
  }
  // This rank's calls come one at a time and nobody else owns the chunk.
  AddToGradient(given, taken.memory.get());
  trace_.Record(TraceEventKind::kArrived, given.step, chunk, arrived_ns);
  const bool sums_here = given.final && !given.in_place;
  const double squared_norm = sums_here ? ComputeSums(given.step, chunk, taken.guess.get()) : 0;
  std::optional<GuessTask> guess;
  {
    MutexLock lock(mutex_);
    ledger_.Advance(given.chunk, given.micro_step_end, given.final);
    --ranks_[key.rank].in_flight;
    if (sums_here) {
      sums_[chunk] = SumsState::kCurrent;
      guess = GuessIfWorthwhile(chunk, squared_norm);
    }
    changed_.NotifyAll();
  }
  if (guess.has_value()) StartGuess(*std::move(guess));
  if (given.final && !sums_here) StartSums(given.step, chunk, taken.attempt);
  return ContributionResult::kAdded;
}

void JobImpl::AddToGradient(const Contribution& given, const RankMemory* memory) {
  const int chunk = static_cast<int>(given.chunk);
  if (given.empty) {
    gradients_->AddZeros(chunk);
  } else if (memory != nullptr) {
    const absl::Span<const std::byte> place = memory->gradient(chunk);
    gradients_->Add(chunk, {&place, 1});
  } else {
    gradients_->Add(chunk, given.payload);
  }
}

// ---------------------------------------------------------------- sums of squares

double JobImpl::ComputeSums(uint64_t step, int chunk, const Update* guess) {
  const TraceSpan span(trace_, TraceEventKind::kSummed, step, chunk);
  gradients_->ComputeSums(chunk);
  return guess == nullptr ? 0 : SquaredNormOf(chunk, *guess);
}

void JobImpl::StartOfChunk(int chunk, std::function<void()> task) {
  const int node = environment_.tasks->NodeOf(chunk, static_cast<int64_t>(layout_.chunks().size()));
  environment_.tasks->Start(std::move(task), node);
}

void JobImpl::StartSums(uint64_t step, int chunk, uint64_t attempt) {
  auto self = std::static_pointer_cast<JobImpl>(shared_from_this());
  StartOfChunk(chunk, [self = std::move(self), step, chunk, attempt] {
    self->RunSums(step, chunk, attempt);
  });
}

void JobImpl::RunSums(uint64_t step, int chunk, uint64_t attempt) {
  std::shared_ptr<const Update> update;
  {
    MutexLock lock(mutex_);
    // The step is over or forgotten, or its decision was first. What the chunk holds now may be
    // another attempt's, which has tasks of its own.
    if (attempt != attempt_ || sums_[chunk] != SumsState::kNone) return;
    sums_[chunk] = SumsState::kRunning;
    ++sums_running_;
    update = guess_;
  }
  const double squared_norm = ComputeSums(step, chunk, update.get());
  std::optional<GuessTask> guess;
  {
    MutexLock lock(mutex_);
    sums_[chunk] = SumsState::kCurrent;
    --sums_running_;
    guess = GuessIfWorthwhile(chunk, squared_norm);
    changed_.NotifyAll();
  }
  // Here and now, since the gradient is in this thread's cache.
  if (guess.has_value()) RunGuess(*std::move(guess));
}

void JobImpl::FinishSums() {
  const auto chunks = static_cast<int64_t>(layout_.chunks().size());
  std::vector<bool> mine(chunks, false);
  int64_t count = 0;
  uint64_t step = 0;
  {
    MutexLock lock(mutex_);
    step = committed_step_ + 1;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      if (sums_[chunk] != SumsState::kNone) continue;
      sums_[chunk] = SumsState::kRunning;
      mine[chunk] = true;
      ++count;
    }
    sums_running_ += count;
  }
  if (count > 0) {
    environment_.tasks->ForEach(chunks, [&](int64_t chunk) {
      if (mine[chunk]) ComputeSums(step, static_cast<int>(chunk), nullptr);
    });
  }
  MutexLock lock(mutex_);
  sums_running_ -= count;
  while (sums_running_ > 0) changed_.Wait(mutex_);
  sums_.assign(sums_.size(), SumsState::kCurrent);
}

}  // namespace ballast
