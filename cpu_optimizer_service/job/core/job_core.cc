#include "cpu_optimizer_service/job/core/job_core.h"

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"

namespace ballast {

JobCore::JobCore(const Job& job, JobIdentity id, Layout its_layout, const JobEnvironment& env)
    : identity(std::move(id)),
      layout(std::move(its_layout)),
      environment(env),
      history(identity.spec),
      gate(layout.world_size(), !identity.is_lead()),
      first_weights(static_cast<int64_t>(layout.chunks().size()), layout.world_size()),
      job_(job) {}

// clang takes job_lock for what mutex_ is, and is not told of mutex_.
JobCore::Lock::Lock(const JobCore& core) ABSL_NO_THREAD_SAFETY_ANALYSIS : core_(core) {
  core_.mutex_.Lock();
}

JobCore::Lock::~Lock() ABSL_NO_THREAD_SAFETY_ANALYSIS { core_.mutex_.Unlock(); }

JobCore::Section::Section(JobCore& core) ABSL_NO_THREAD_SAFETY_ANALYSIS : core_(core) {
  core_.mutex_.Lock();
}

JobCore::Section::~Section() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  core_.gate.GiveTurns();
  std::vector<After> after = std::exchange(core_.after_, {});
  core_.mutex_.Unlock();
  for (After& run : after) std::move(run)();
}

void JobCore::WaitForStepOver(std::chrono::steady_clock::time_point deadline)
    ABSL_NO_THREAD_SAFETY_ANALYSIS {
  step_over_.WaitUntil(mutex_, deadline);
}

void JobCore::StopReading() {
  Section section(*this);
  gate.StopReading();
}

void JobCore::Warn(const std::string& line) const {
  if (environment.warn) environment.warn(line);
}

std::shared_ptr<Progress> JobCore::BeginActivity(ActivityKind kind, int64_t total_bytes,
                                                 std::string directory) const {
  return environment.activities->Begin({.kind = kind,
                                        .job = spec().name,
                                        .directory = std::move(directory),
                                        .total_bytes = total_bytes});
}

void JobCore::Move() {
  ++moves_;
  if (!std::exchange(has_derived_, false)) return;
  RunAfter([keep = KeepAlive(), moved = environment.moved] { moved(*keep); });
}

uint64_t JobCore::Lend() {
  has_derived_ = true;
  return moves_;
}

std::vector<std::string> JobCore::Ancestry() const {
  std::vector<std::string> ancestry = {identity.uid};
  for (const std::string& each : record.ancestors) {
    if (ancestry.size() < kMostAncestors) ancestry.push_back(each);
  }
  return ancestry;
}

void JobCore::Tell(JobEvent event) {
  if (!environment.tell) return;
  // Without the job: who is told that it is closed may count on its memory.
  RunAfter([tell = environment.tell, event = std::move(event)] { tell(event); });
}

absl::Status JobCore::StatusOf(std::optional<Answer> answer) const {
  const std::string job = absl::StrCat("job ", spec().name);
  if (!answer.has_value()) return absl::CancelledError("the caller has given up waiting");
  switch (*answer) {
    case Answer::kGranted:
    case Answer::kWaits:
      return absl::OkStatus();
    case Answer::kClosed:
      if (record.superseded_by != 0 && !record.closed) {
        return WithReason(absl::FailedPreconditionError(absl::StrCat(
                              job, " of epoch ", spec().epoch,
                              " is over: it has gone on elsewhere, from a checkpoint, "
                              "in epoch ",
                              record.superseded_by, "; to free its memory: ballast close ",
                              spec().name, " --here, with the --service of this one")),
                          reason::kSuperseded);
      }
      return WithReason(absl::NotFoundError(absl::StrCat(job, " has been closed")),
                        reason::kNoSuchJob);
    case Answer::kLoading:
      return absl::UnavailableError(
          absl::StrCat(job, " is loading a checkpoint; try again when it has"));
    case Answer::kTorn:
      return WithReason(absl::FailedPreconditionError(absl::StrCat(
                            "the state of ", job, " is torn: loading ", record.torn_by,
                            " did not end; load a whole checkpoint (ballast load ", spec().name,
                            "), or close it (ballast close ", spec().name, ")")),
                        reason::kJobBroken);
    case Answer::kChanging:
      return absl::UnavailableError(absl::StrCat(job, " is about to change; read again"));
    case Answer::kNoStep:
    case Answer::kAborted:
      return absl::FailedPreconditionError(
          absl::StrCat(job, " is between steps, at step ", record.committed_step));
    case Answer::kHasStep:
      return absl::FailedPreconditionError(
          absl::StrCat("step ", record.committed_step + 1, " of ", job,
                       " has begun; abort it first (ballast abort-step ", spec().name, ")"));
    case Answer::kDecided:
      return absl::FailedPreconditionError(
          absl::StrCat("step ", record.committed_step + (record.directions.has_value() ? 0 : 1),
                       " of ", job, " is decided and must complete first"));
  }
  return absl::InternalError("the gate gave an answer that has no status");
}

uint64_t JobCore::EnterHere(Admission admission, int rank, Turn turn) {
  // The job outlives what waits in its gate: the gate is a member, and a call that waits has the
  // job.
  return gate.Enter(
      admission, rank,
      [this, turn = std::move(turn)](std::optional<Answer> answer)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable { std::move(turn)(StatusOf(answer)); });
}

Pending JobCore::Enter(Admission admission, int rank, Turn turn, std::shared_ptr<uint64_t> number) {
  // Made first: the turn may have come, on another thread, and with it the end of the job.
  Pending pending = PendingOf(number);
  Section section(*this);
  const uint64_t waits = EnterHere(admission, rank, std::move(turn));
  if (waits != 0) *number = waits;
  if (*number == 0) return {};
  return pending;
}

Pending JobCore::PendingOf(std::shared_ptr<uint64_t> number) {
  // Weak: a caller may keep its Pending for long, and that must not keep the job's memory.
  return Pending([this, weak = job_.weak_from_this(), number = std::move(number)] {
    const std::shared_ptr<const Job> alive = weak.lock();
    if (alive == nullptr) return;
    Section section(*this);
    gate.Cancel(*number);  // No call has number 0.
  });
}

absl::Status JobCore::CheckUsable() const {
  const GateState& state = gate.state();
  if (state.phase == Phase::kClosed) return StatusOf(Answer::kClosed);
  if (state.phase == Phase::kLoading) return StatusOf(Answer::kLoading);
  return state.torn ? StatusOf(Answer::kTorn) : absl::OkStatus();
}

}  // namespace ballast
