// Which process has which rank: attaching, streams, shared memory.
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"

namespace ballast {

// A rank's stream: passes everything on to the job with its own key.
class JobImpl::Stream : public RankStream {
 public:
  Stream(std::shared_ptr<JobImpl> job, StreamKey key, RankPosition position)
      : job_(std::move(job)), key_(key), position_(std::move(position)) {}
  ~Stream() override { job_->CloseStream(key_, why_); }

  const RankPosition& position() const override { return position_; }
  absl::Status BeginStep(StepAttempt at, const StepSettings& settings) override {
    return job_->BeginStep(key_, at, settings);
  }
  absl::StatusOr<ContributionResult> Contribute(const Contribution& contribution) override {
    return job_->Contribute(key_, contribution);
  }
  absl::Status EndMicroStep(StepAttempt at, uint32_t micro_step,
                            const UsedParameters& used) override {
    return job_->EndMicroStep(key_, at, micro_step, used);
  }
  absl::StatusOr<std::optional<SealRefusal>> Seal(StepAttempt at, uint32_t micro_steps,
                                                  const std::optional<StepVote>& vote,
                                                  uint32_t refusals_heard) override {
    return job_->Seal(key_, at, micro_steps, vote, refusals_heard);
  }
  absl::Status Report(StepAttempt at, const RankReport& report) override {
    return job_->Report(key_, at, report);
  }
  absl::Status Vote(StepAttempt at, const StepVote& vote, uint32_t refusals_heard) override {
    return job_->Vote(key_, at, vote, refusals_heard);
  }
  Pending StopProvisional(StepAttempt at, uint32_t micro_step_begin,
                          absl::Span<const int64_t> chunks, Done<bool> done) override {
    // The Done may end this stream.
    return std::shared_ptr(job_)->StopProvisional(key_, at, micro_step_begin, chunks,
                                                  std::move(done));
  }
  Pending Discard(StepAttempt at, Done<bool> done) override {
    return std::shared_ptr(job_)->Discard(key_, at, std::move(done));
  }
  void EndsBecause(std::string why) override { why_ = std::move(why); }

 private:
  const std::shared_ptr<JobImpl> job_;
  const StreamKey key_;
  const RankPosition position_;
  std::string why_ = "its stream has ended";
};

// ---------------------------------------------------------------- attaching

Pending JobImpl::Attach(AttachRequest request, Done<Attachment> done) {
  if (absl::Status status = members_.CheckAttachRequest(request); !status.ok()) {
    std::move(done)(std::move(status));
    return {};
  }
  auto waits = std::make_shared<AttachWaits>();
  {
    JobCore::Section section(core_);
    if (core_.identity.is_lead()) {
      AttachInTurn(std::move(request), waits, std::move(done));
    } else {
      AttachByLead(std::move(request), std::nullopt, waits, std::move(done));
    }
    if (waits->turn == 0 && waits->ask == 0) return {};
  }
  return Pending([this, weak = weak_from_this(), waits] {
    const std::shared_ptr<const Job> alive = weak.lock();
    if (alive == nullptr) return;
    JobCore::Section section(core_);
    core_.gate.Cancel(waits->turn);
    CancelAsk(waits->ask);
  });
}

void JobImpl::AttachInTurn(AttachRequest request, std::shared_ptr<AttachWaits> waits,
                           Done<Attachment> done) {
  const int rank = request.rank;
  AttachWaits& numbers = *waits;
  // What is sealed and whole rolls forward first, so an update under way is waited for.
  const uint64_t turn =
      core_.EnterHere(Admission::kAttach, rank,
                      [this, self = Self(), request = std::move(request), waits = std::move(waits),
                       done = std::move(done)](absl::Status admitted)
                          ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                            waits->turn = 0;
                            if (admitted.ok())
                              admitted = members_.CheckMayAttach(request, committed_step());
                            if (!admitted.ok())
                              return core_.Reply<Attachment>(std::move(done), admitted);
                            AttachNow(request, std::move(waits), std::move(done));
                          });
  if (turn != 0) numbers.turn = turn;
}

// A rank takes the generation and the step of its job from the lead. Words come in their order, so
// when the answer is there this member stands where the lead stood.
void JobImpl::AttachByLead(AttachRequest request, std::optional<std::string> give_up,
                           std::shared_ptr<AttachWaits> waits, Done<Attachment> done) {
  AttachWaits& numbers = *waits;
  numbers.ask = AskLead(
      std::move(give_up),
      [this, self = Self(), request = std::move(request), waits = std::move(waits),
       done = std::move(done)](absl::Status answered)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
            waits->ask = 0;
            if (answered.ok()) {
              return AttachInTurn(std::move(request), std::move(waits), std::move(done));
            }
            if (!absl::IsUnavailable(answered)) {
              return core_.Reply<Attachment>(std::move(done), answered);
            }
            AttachByLead(std::move(request), std::nullopt, std::move(waits), std::move(done));
          });
}

void JobImpl::AttachNow(const AttachRequest& request, std::shared_ptr<AttachWaits> waits,
                        Done<Attachment> done) {
  // The older process may still be there, with gradients on their way. A rank whose stream has
  // ended between steps is free, and so taken from nobody.
  const bool taken = members_.table.IsTakenFrom(request.rank, request.process_id);
  // Another session of the same process may bring other first weights.
  const bool begins = !request.rejoin && !request.generation.has_value();
  const auto take = [this, self = shared_from_this(), begins, rank = request.rank,
                     process_id = request.process_id]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    Detached detached;
    if (members_.table[rank].last_process_id != process_id || begins) {
      ForgetUploads(rank);
      core_.Move();
    }
    members_.table.Take(rank, process_id, detached);
    // A later process has to know, too, which process had the rank last and may rejoin.
    journal_.Keep();
    return detached;
  };
  const auto replace_stream = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    members_.EndStream(request.rank, taken ? reason::kRankReplaced : reason::kStreamReplaced,
                       absl::StrCat("another process or session has taken rank ", request.rank,
                                    " of job ", spec().name));
  };
  // The lead was asked to give it up, and has skipped it.
  const bool is_skipped = waits->given_up != 0 && waits->given_up == core_.record.committed_step &&
                          WasLost(waits->given_up) && !HasBegun(request.rank);
  if (is_skipped) {
    replace_stream();
    members_.Detach(take(), absl::OkStatus());
    return core_.Reply<Attachment>(std::move(done), PositionNow());
  }
  // A process that attaches anew in mid-step does the step anew: what was sent before must not meet
  // what is sent now.
  const bool takes_part =
      HasBegun(request.rank) || (second_round_.has_value() && second_round_->told[request.rank]);
  if (taken || (!request.generation.has_value() && takes_part)) {
    const std::string why =
        absl::StrCat(taken ? "a new process" : "a new session of its process", " has taken rank ",
                     request.rank, " of job ", spec().name,
                     taken ? "; if that is another training, give it its own job name" : "");
    if (!core_.identity.is_lead()) {
      waits->given_up = core_.record.committed_step + 1;
      return AttachByLead(request, why, std::move(waits), std::move(done));
    }
    if (MaySkipStep()) replace_stream();  // Streams go on then, but not the older one of this rank.
    GiveUpStep(why, [this, take, done = std::move(done)]()
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                          members_.Detach(take(), absl::OkStatus());
                          core_.Reply<Attachment>(std::move(done), PositionNow());
                        });
    return;
  }
  // An older stream may be broken, though nothing here has noticed: when that ends it must not take
  // the rank away again.
  members_.EndStream(request.rank, reason::kStreamReplaced,
                     absl::StrCat("rank ", request.rank, " has attached again"));
  members_.Detach(take(), absl::OkStatus());
  core_.Reply<Attachment>(std::move(done), PositionNow());
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
  } else if (request.rank < 0 || request.rank >= core_.layout.world_size()) {
    status = absl::InvalidArgumentError(
        absl::StrCat("rank ", request.rank, " is not in job ", spec().name));
  } else if (spec().newton_schulz == Orthogonalizer::kWorkers && !request.orthogonalizes) {
    status = absl::FailedPreconditionError(absl::StrCat(
        "ranks of job ", spec().name, " orthogonalize directions (newton_schulz is ",
        Name(spec().newton_schulz), "), and this client does not: use a client that ",
        "does, or create the job with newton_schulz ", Name(Orthogonalizer::kService)));
  } else {
    // A stream of an older generation, or of a process that has not the rank, does not wait to be
    // refused.
    JobCore::Lock lock(core_);
    status = members_.CheckMayOpen(request);
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
  return core_.Enter(
      Admission::kOpenStream, rank,
      [this, self = shared_from_this(), rank, number, request = std::move(request),
       listener = std::move(listener), done = std::move(done)](absl::Status admitted)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
            // Asked at each admission: while the call waited, the generation may have risen, or
            // another process may have taken the rank.
            if (admitted.ok()) admitted = members_.CheckMayOpen(request);
            if (!admitted.ok()) {
              return core_.Reply<std::unique_ptr<RankStream>>(std::move(done), admitted);
            }
            EndOlderStream(rank);
            *number = core_.EnterHere(
                Admission::kQuietRank, rank,
                [this, self, request = std::move(request), listener = std::move(listener),
                 done = std::move(done)](absl::Status quiet)
                    ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                      if (quiet.ok()) quiet = members_.CheckMayOpen(request);
                      if (!quiet.ok()) {
                        return core_.Reply<std::unique_ptr<RankStream>>(std::move(done), quiet);
                      }
                      core_.Reply(std::move(done), OpenNow(request, std::move(listener)));
                    });
          },
      number);
}

void JobImpl::EndOlderStream(int rank) {
  members_.EndStream(rank, reason::kStreamReplaced,
                     absl::StrCat("a newer stream has replaced this one of rank ", rank));
}

absl::StatusOr<std::unique_ptr<RankStream>> JobImpl::OpenNow(
    const OpenStreamRequest& request, std::shared_ptr<RankListener> listener) {
  EndOlderStream(request.rank);  // One may have been opened while this one waited.
  journal_.Touch();
  const StreamKey key = members_.table.OpenStream(request.rank, std::move(listener),
                                                  request.update_mode, request.weights_in_place);
  core_.Tell(absl::StrCat("rank ", request.rank, " attached: process ", request.process_id),
             request.rank);
  if (core_.gate.phase() == Phase::kDirections) second_round_->told[request.rank] = true;
  return std::make_unique<Stream>(Self(), key, PositionOf(request.rank));
}

void JobImpl::CloseStream(const StreamKey& key, const std::string& why) {
  std::shared_ptr<RankListener> listener;  // Destroyed outside the lock.
  {
    JobCore::Lock lock(core_);
    if (!members_.table.IsCurrent(key)) return;
    // A stream that was replaced ends without a trace, since the rank is its successor's.
    journal_.Touch();
    listener = members_.table.CloseStream(key.rank, HasBegun(key.rank));
  }
  if (!core_.environment.tell) return;
  core_.environment.tell({.job = spec().name,
                          .rank = key.rank,
                          .text = absl::StrCat("rank ", key.rank, " is gone: ", why)});
}

bool JobImpl::HasBegun(int rank) const {
  return !machine_.between_steps() && machine_.agreement()->ranks()[rank].has_part();
}

RankPosition JobImpl::PositionOf(int rank) const {
  RankPosition position;
  position.generation = core_.record.generation;
  position.committed_step = committed_step();
  position.awaits_orthogonal = core_.gate.phase() == Phase::kDirections;
  const StepAgreement* given = machine_.undecided();
  if (given == nullptr) return position;
  // Also of an attempt that the rank has not begun: it may have discarded those before.
  position.attempt = given->ranks()[rank].attempt;
  if (!given->ranks()[rank].begun) return position;
  position.open_step = given->step();
  position.micro_steps_ended = machine_.part().rank(rank).micro_steps_ended;
  for (const int chunk : core_.layout.chunks_of_rank(rank)) {
    if (const uint32_t next = machine_.ledger().next_micro_step(chunk); next > 0) {
      position.delivered.push_back({.chunk = chunk, .next_micro_step = next});
    }
  }
  return position;
}

// ---------------------------------------------------------------- shared memory

absl::StatusOr<MemoryBudget::Reservation> JobImpl::ReserveRankMemory(int rank) {
  return core_.environment.budget->Reserve(
      members_.MemoryBytes(rank),
      absl::StrCat("memory shared with rank ", rank, " of job ", spec().name));
}

absl::Status JobImpl::GiveRankMemory(const RankHolder& holder,
                                     std::shared_ptr<const RankMemory> memory) {
  const int64_t size_bytes = members_.MemoryBytes(holder.rank);
  const auto give = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) -> absl::StatusOr<bool> {
    BALLAST_RETURN_IF_ERROR(members_.CheckGeneration(holder.generation));
    BALLAST_RETURN_IF_ERROR(members_.CheckHolder(holder.rank, holder.process_id));
    // Gradients of the step may lie in the memory that the rank has now.
    if (HasBegun(holder.rank)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", holder.rank, " of job ", spec().name, " is in the middle of a step"));
    }
    Detached replaced;
    replaced.memories.push_back(
        members_.table.GiveMemory(holder.rank, std::move(memory), size_bytes));
    journal_.Keep();
    members_.Detach(std::move(replaced), absl::OkStatus());
    return true;
  };
  return Await<bool>([&](Done<bool> done) {
           core_.Enter(Admission::kRankMemory, holder.rank,
                       [this, give, done = std::move(done)](
                           absl::Status admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                         core_.Reply<bool>(std::move(done),
                                           admitted.ok() ? give() : absl::StatusOr<bool>(admitted));
                       });
         })
      .status();
}

void JobImpl::DropRankMemory(int rank, const RankMemory* memory) {
  std::shared_ptr<const RankMemory> dropped;  // Unmapped after the lock.
  JobCore::Lock lock(core_);
  // The record may still name it. A later process finds no such memory, and goes on without.
  dropped = members_.table.DropMemory(rank, memory);
}

}  // namespace ballast
