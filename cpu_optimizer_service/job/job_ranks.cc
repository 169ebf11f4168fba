// Which process has which rank: attaching, streams, shared memory.
#include <algorithm>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/rank_memory_layout.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {

template <typename Call>
auto JobImpl::Answered(Call&& call) -> decltype(std::forward<Call>(call)()) {
  std::optional<decltype(std::forward<Call>(call)())> answer;
  if (RunsInMemory([&] { answer.emplace(std::forward<Call>(call)()); })) return *std::move(answer);
  Break();
  return broken_;
}

// A rank's stream: passes everything on to the job with its own key.
class JobImpl::Stream : public RankStream {
 public:
  Stream(std::shared_ptr<JobImpl> job, StreamKey key, RankPosition position)
      : job_(std::move(job)), key_(key), position_(std::move(position)) {}
  ~Stream() override { job_->CloseStream(key_, why_); }

  const RankPosition& position() const override { return position_; }
  absl::Status BeginStep(StepAttempt at, const StepSettings& settings) override {
    return job_->Answered([&] { return job_->BeginStep(key_, at, settings); });
  }
  absl::StatusOr<ContributionResult> Contribute(const Contribution& contribution) override {
    return job_->Answered([&] { return job_->Contribute(key_, contribution); });
  }
  absl::Status EndMicroStep(StepAttempt at, uint32_t micro_step,
                            const UsedParameters& used) override {
    return job_->Answered([&] { return job_->EndMicroStep(key_, at, micro_step, used); });
  }
  absl::StatusOr<std::optional<SealRefusal>> Seal(StepAttempt at, uint32_t micro_steps,
                                                  const std::optional<StepVote>& vote) override {
    return job_->Answered([&] { return job_->Seal(key_, at, micro_steps, vote); });
  }
  absl::Status Report(StepAttempt at, const RankReport& report) override {
    return job_->Answered([&] { return job_->Report(key_, at, report); });
  }
  absl::Status Vote(StepAttempt at, const StepVote& vote) override {
    return job_->Answered([&] { return job_->Vote(key_, at, vote); });
  }
  Pending StopProvisional(StepAttempt at, uint32_t micro_step_begin,
                          absl::Span<const int64_t> chunks, Done<bool> done) override {
    return Start(std::move(done), [&](JobImpl& job, Done<bool> answer) {
      return job.StopProvisional(key_, at, micro_step_begin, chunks, std::move(answer));
    });
  }
  Pending Discard(StepAttempt at, Done<bool> done) override {
    return Start(std::move(done), [&](JobImpl& job, Done<bool> answer) {
      return job.Discard(key_, at, std::move(answer));
    });
  }
  void EndsBecause(std::string why) override { why_ = std::move(why); }

 private:
  // A call that may wait. Its Done is answered whatever becomes of the call: the job, which breaks
  // if there is no memory for a part of it, answers what is left then.
  Pending Start(Done<bool> done, absl::FunctionRef<Pending(JobImpl& job, Done<bool> answer)> call) {
    const std::shared_ptr<JobImpl> job = job_;  // The Done may end this stream, as these.
    const std::shared_ptr<StreamCall> waiting = call_;
    waiting->Begin(std::move(done));
    Pending pending;
    const bool in_memory = RunsInMemory([&] {
      // Before the call begins, so that Break finds it wherever it has come to.
      job->stream_calls_.Add(key_.rank, waiting);
      pending = call(
          *job, [waiting](absl::StatusOr<bool> result) { waiting->Answer(std::move(result)); });
    });
    if (in_memory) return pending;
    job->Break();
    waiting->Answer(job->broken_);  // It may have been broken before.
    return {};
  }

  const std::shared_ptr<StreamCall> call_ = std::make_shared<StreamCall>();
  const std::shared_ptr<JobImpl> job_;
  const StreamKey key_;
  const RankPosition position_;
  std::string why_ = "its stream has ended";
};

// ---------------------------------------------------------------- checks

absl::Status JobImpl::CheckGeneration(const Generation& generation) const {
  if (generation == record_.generation) return absl::OkStatus();
  return WithReason(absl::AbortedError(absl::StrCat("job ", spec().name, " is at generation ",
                                                    ToString(record_.generation), ", not ",
                                                    ToString(generation), "; attach again")),
                    reason::kOlderGeneration);
}

absl::Status JobImpl::CheckCurrent(const StreamKey& key) const {
  // First: Break has closed all streams, and its reason is to be told, not that the stream was
  // replaced.
  if (broken()) return CheckUsable();
  if (ranks_.IsCurrent(key)) return CheckUsable();
  return WithReason(
      absl::AbortedError(absl::StrCat("this stream of rank ", key.rank, " of job ", spec().name,
                                      " is no longer its stream; attach again")),
      reason::kStreamReplaced);
}

absl::Status JobImpl::CheckHolder(int rank, const std::string& process_id) const {
  if (ranks_.IsHeldBy(rank, process_id)) return absl::OkStatus();
  return WithReason(
      absl::AbortedError(absl::StrCat("rank ", rank, " of job ", spec().name,
                                      " is not held by this process; attach again")),
      ranks_.IsTakenFrom(rank, process_id) ? reason::kRankReplaced : reason::kRankNotHeld);
}

absl::Status JobImpl::CheckAttachRequest(const AttachRequest& request) const {
  if (request.rank < 0 || request.rank >= layout_.world_size()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", request.rank, " is not in job ",
                                                   spec().name, ", whose world size is ",
                                                   layout_.world_size()));
  }
  if (request.process_id.empty() || request.process_id.size() > kMaxProcessIdBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("process_id must have 1 to ", kMaxProcessIdBytes, " bytes"));
  }
  if (!request.uid.empty() && request.uid != uid()) {
    return WithReason(
        absl::NotFoundError(absl::StrCat("job ", spec().name, " is not the one with uid ",
                                         request.uid, "; it was created again")),
        reason::kOtherJob);
  }
  if (request.spec.has_value()) {
    if (const std::string difference = FirstDifference(spec(), *request.spec);
        !difference.empty()) {
      return WithReason(
          absl::FailedPreconditionError(absl::StrCat(
              "rank ", request.rank, " describes job ", spec().name, " otherwise: ", difference,
              " (here: the service's job); close the job or train with the same description")),
          reason::kOtherDescription);
    }
  }
  return absl::OkStatus();
}

absl::Status JobImpl::CheckMayAttach(const AttachRequest& request) const {
  if (request.generation.has_value()) {
    BALLAST_RETURN_IF_ERROR(CheckGeneration(*request.generation));
    // Clients reopen streams by themselves. If that took the rank back, two processes would take it
    // from each other again and again.
    if (ranks_.IsTakenFrom(request.rank, request.process_id)) {
      return WithReason(absl::AbortedError(absl::StrCat(
                            "another process has taken rank ", request.rank, " of job ",
                            spec().name, " in generation ", ToString(record_.generation))),
                        reason::kRankReplaced);
    }
  }
  const std::string& last = ranks_[request.rank].last_process_id;
  if (request.rejoin && !last.empty() && last != request.process_id) {
    return WithReason(absl::FailedPreconditionError(
                          absl::StrCat("another process has taken rank ", request.rank, " of job ",
                                       spec().name, ": ", last, "; this one was replaced")),
                      reason::kRankReplaced);
  }
  if (request.expected_committed_step.has_value() &&
      *request.expected_committed_step != committed_step()) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          "job ", spec().name, " stands at step ", committed_step(), ", rank ",
                          request.rank, " expected ", *request.expected_committed_step)),
                      reason::kOtherStep);
  }
  return absl::OkStatus();
}

absl::Status JobImpl::CheckMayOpen(const OpenStreamRequest& request) const {
  // First: closing raises the generation, too, and the caller is to learn that the job is gone.
  if (gate_.phase() == Phase::kClosed) return CheckUsable();
  BALLAST_RETURN_IF_ERROR(CheckGeneration(request.generation));
  BALLAST_RETURN_IF_ERROR(CheckUsable());
  BALLAST_RETURN_IF_ERROR(CheckHolder(request.rank, request.process_id));
  if (request.weights_in_place && ranks_[request.rank].memory == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", request.rank, " wants its weights in shared memory, but job ",
                     spec().name, " shares none with it"));
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- attaching

Pending JobImpl::Attach(AttachRequest request, Done<Attachment> done) {
  if (absl::Status status = CheckAttachRequest(request); !status.ok()) {
    std::move(done)(std::move(status));
    return {};
  }
  const int rank = request.rank;
  // What is sealed and whole rolls forward first, so an update under way is waited for.
  return Enter(Admission::kAttach, rank,
               [this, self = shared_from_this(), request = std::move(request),
                done = std::move(done)](absl::Status admitted)
                   ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                     if (admitted.ok()) admitted = CheckMayAttach(request);
                     if (!admitted.ok()) return Reply<Attachment>(std::move(done), admitted);
                     AttachNow(request, std::move(done));
                   });
}

void JobImpl::AttachNow(const AttachRequest& request, Done<Attachment> done) {
  // The older process may still be there, with gradients on their way. A rank whose stream has
  // ended between steps is free, and so taken from nobody.
  const bool taken = ranks_.IsTakenFrom(request.rank, request.process_id);
  // Another session of the same process may bring other first weights.
  const bool begins = !request.rejoin && !request.generation.has_value();
  const auto take = [this, self = shared_from_this(), begins, rank = request.rank,
                     process_id = request.process_id]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Detached detached;
    if (ranks_[rank].last_process_id != process_id || begins) {
      ForgetUploads(rank);
      Move();
    }
    ranks_.Take(rank, process_id, detached);
    // A later process has to know, too, which process had the rank last and may rejoin.
    Keep();
    return detached;
  };
  // A process that attaches anew in mid-step does the step anew: what was sent before must not meet
  // what is sent now.
  if (taken || (!request.generation.has_value() && HasBegun(request.rank))) {
    if (MaySkipStep()) {  // Streams go on then, but not the older one of this rank.
      Detached replaced;
      ranks_.TakeListener(request.rank, replaced.listeners);
      Detach(
          std::move(replaced),
          WithReason(absl::AbortedError(absl::StrCat("another process or session has taken rank ",
                                                     request.rank, " of job ", spec().name)),
                     taken ? reason::kRankReplaced : reason::kStreamReplaced));
    }
    GiveUpStep(absl::StrCat(taken ? "a new process" : "a new session of its process",
                            " has taken rank ", request.rank, " of job ", spec().name),
               [this, take, done = std::move(done)]()
                   ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                     Detach(take(), absl::OkStatus());
                     Reply<Attachment>(std::move(done), PositionNow());
                   });
    return;
  }
  // An older stream may be broken, though nothing here has noticed: when that ends it must not take
  // the rank away again.
  Detached detached = take();
  ranks_.TakeListener(request.rank, detached.listeners);
  Detach(std::move(detached),
         WithReason(absl::AbortedError(absl::StrCat("rank ", request.rank, " has attached again")),
                    reason::kStreamReplaced));
  Reply<Attachment>(std::move(done), PositionNow());
}

// ---------------------------------------------------------------- streams

Pending JobImpl::OpenStream(OpenStreamRequest request, std::shared_ptr<RankListener> listener,
                            Done<std::unique_ptr<RankStream>> done) {
  absl::Status status;
  if (request.uid.empty()) {
    status = absl::InvalidArgumentError(
        "no uid; give the one that attaching returned, so that no other job is meant");
  } else if (request.uid != uid()) {
    status = WithReason(
        absl::NotFoundError(absl::StrCat("job ", spec().name, " is not the one with uid '",
                                         request.uid, "'; attach first")),
        reason::kOtherJob);
  } else if (request.rank < 0 || request.rank >= layout_.world_size()) {
    status = absl::InvalidArgumentError(
        absl::StrCat("rank ", request.rank, " is not in job ", spec().name));
  } else {
    // A stream of an older generation, or of a process that has not the rank, does not wait to be
    // refused.
    MutexLock lock(mutex_);
    status = CheckMayOpen(request);
  }
  if (!status.ok()) {
    std::move(done)(std::move(status));
    return {};
  }
  // The older stream is detached as soon as no update is under way; then what it is adding is
  // waited for. Meanwhile the step may be decided, so the second admission waits for an update
  // again.
  const int rank = request.rank;
  const auto number = std::make_shared<uint64_t>(0);
  return Enter(
      Admission::kOpenStream, rank,
      [this, self = shared_from_this(), rank, number, request = std::move(request),
       listener = std::move(listener), done = std::move(done)](absl::Status admitted)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
            // Asked at each admission: while the call waited, the generation may have risen, or
            // another process may have taken the rank.
            if (admitted.ok()) admitted = CheckMayOpen(request);
            if (!admitted.ok()) {
              return Reply<std::unique_ptr<RankStream>>(std::move(done), admitted);
            }
            Detached replaced;
            ranks_.TakeListener(rank, replaced.listeners);
            Detach(std::move(replaced),
                   WithReason(absl::AbortedError(absl::StrCat(
                                  "a newer stream has replaced this one of rank ", rank)),
                              reason::kStreamReplaced));
            *number =
                EnterHere(Admission::kQuietRank, rank,
                          [this, self, request = std::move(request), listener = std::move(listener),
                           done = std::move(done)](absl::Status quiet)
                              ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                                if (quiet.ok()) quiet = CheckMayOpen(request);
                                if (!quiet.ok()) {
                                  return Reply<std::unique_ptr<RankStream>>(std::move(done), quiet);
                                }
                                Reply(std::move(done), OpenNow(request, std::move(listener)));
                              });
          },
      number);
}

absl::StatusOr<std::unique_ptr<RankStream>> JobImpl::OpenNow(
    const OpenStreamRequest& request, std::shared_ptr<RankListener> listener) {
  Detached replaced;  // Another stream may have been opened while this one waited.
  ranks_.TakeListener(request.rank, replaced.listeners);
  Detach(std::move(replaced),
         WithReason(absl::AbortedError(absl::StrCat("a newer stream has replaced this one of rank ",
                                                    request.rank)),
                    reason::kStreamReplaced));
  ++changes_;
  const StreamKey key = ranks_.OpenStream(request.rank, std::move(listener), request.update_mode,
                                          request.weights_in_place);
  Tell(absl::StrCat("rank ", request.rank, " attached: process ", request.process_id),
       request.rank);
  return std::make_unique<Stream>(Self(), key, PositionOf(request.rank));
}

void JobImpl::CloseStream(const StreamKey& key, const std::string& why) {
  std::shared_ptr<RankListener> listener;  // Destroyed outside the lock.
  {
    MutexLock lock(mutex_);
    if (!ranks_.IsCurrent(key)) return;
    // A stream that was replaced ends without a trace, since the rank is its successor's.
    ++changes_;
    listener = ranks_.CloseStream(key.rank, HasBegun(key.rank));
  }
  if (!environment_.tell) return;
  // The log can do without a line; a stream's end cannot fail.
  (void)RunsInMemory([&] {
    environment_.tell({.job = spec().name,
                       .rank = key.rank,
                       .text = absl::StrCat("rank ", key.rank, " is gone: ", why)});
  });
}

bool JobImpl::HasBegun(int rank) const {
  const auto has_begun = [&](const auto& step) {
    if constexpr (std::is_same_v<std::decay_t<decltype(step)>, std::monostate>) {
      return false;
    } else {
      return step.ranks()[rank].has_part();
    }
  };
  return std::visit(has_begun, step_);
}

const OpenStep* JobImpl::Undecided() const {
  if (const auto* open = std::get_if<OpenStep>(&step_)) return open;
  const auto* sealed = std::get_if<SealedStep>(&step_);
  return sealed == nullptr ? nullptr : &sealed->given();
}

RankPosition JobImpl::PositionOf(int rank) const {
  RankPosition position;
  position.generation = record_.generation;
  position.committed_step = committed_step();
  const OpenStep* given = Undecided();
  if (given == nullptr) return position;
  // Also of an attempt that the rank has not begun: it may have discarded those before.
  position.attempt = given->ranks()[rank].attempt;
  if (!given->ranks()[rank].begun) return position;
  position.open_step = given->terms().step;
  position.micro_steps_ended = given->ranks()[rank].micro_steps_ended;
  for (const int chunk : layout_.chunks_of_rank(rank)) {
    if (const uint32_t next = ledger_.next_micro_step(chunk); next > 0) {
      position.delivered.push_back({.chunk = chunk, .next_micro_step = next});
    }
  }
  return position;
}

// ---------------------------------------------------------------- shared memory

int64_t JobImpl::RankMemoryBytes(int rank) const {
  return RankMemoryLayout(layout_, spec().groups, rank).size_bytes();
}

absl::StatusOr<MemoryBudget::Reservation> JobImpl::ReserveRankMemory(int rank) {
  return environment_.budget->Reserve(
      RankMemoryBytes(rank),
      absl::StrCat("memory shared with rank ", rank, " of job ", spec().name));
}

absl::Status JobImpl::GiveRankMemory(const RankHolder& holder,
                                     std::shared_ptr<const RankMemory> memory) {
  const int64_t size_bytes = RankMemoryBytes(holder.rank);
  const auto give = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> absl::StatusOr<bool> {
    BALLAST_RETURN_IF_ERROR(CheckGeneration(holder.generation));
    BALLAST_RETURN_IF_ERROR(CheckHolder(holder.rank, holder.process_id));
    // Gradients of the step may lie in the memory that the rank has now.
    if (HasBegun(holder.rank)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", holder.rank, " of job ", spec().name, " is in the middle of a step"));
    }
    Detached replaced;
    replaced.memories.push_back(ranks_.GiveMemory(holder.rank, std::move(memory), size_bytes));
    Keep();
    Detach(std::move(replaced), absl::OkStatus());
    return true;
  };
  return Await<bool>([&](Done<bool> done) {
           Enter(Admission::kRankMemory, holder.rank,
                 [this, give, done = std::move(done)](absl::Status admitted)
                     ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                       Reply<bool>(std::move(done),
                                   admitted.ok() ? give() : absl::StatusOr<bool>(admitted));
                     });
         })
      .status();
}

void JobImpl::DropRankMemory(int rank, const RankMemory* memory) {
  std::shared_ptr<const RankMemory> dropped;  // Unmapped after the lock.
  MutexLock lock(mutex_);
  // The record may still name it. A later process finds no such memory, and goes on without.
  dropped = ranks_.DropMemory(rank, memory);
}

}  // namespace ballast
