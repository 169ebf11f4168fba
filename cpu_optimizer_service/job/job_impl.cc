#include "cpu_optimizer_service/job/job_impl.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

// What outlives the process beside state and gradients (kept_job.h): records and logs of an
// ordinary job in pages of their own, lanes, and two words a chunk. (A word more of a previous
// version is with that: NeedOf.)
int64_t KeptBytes(const Layout& layout, int threads) {
  constexpr int64_t kRecords = int64_t{512} << 10;
  constexpr int64_t kLanesOfThread = 2 * static_cast<int64_t>(sizeof(RedoLane) + sizeof(SumLane));
  return kRecords + kLanesOfThread * (threads + 1) +
         static_cast<int64_t>(2 * sizeof(uint64_t) * layout.chunks().size());
}

}  // namespace

absl::StatusOr<std::shared_ptr<JobImpl>> JobImpl::Describe(JobIdentity identity,
                                                           const JobEnvironment& environment,
                                                           bool is_there) {
  BALLAST_RETURN_IF_ERROR(Validate(identity.spec));
  // A short description may have millions of shards. Of more than kMaxShards none is laid out.
  // Reserved only while the layout is made: the job's own reservation counts these tables, too
  // (NeedOf).
  MemoryBudget::Reservation room;
  if (const int64_t bytes = ShardTableBytes(identity.spec.layout);
      bytes > 0 && bytes <= kBytesOfShard * kMaxShards) {
    if (is_there) {  // A lower limit takes nothing from it.
      room = environment.budget->Take(bytes);
    } else {
      BALLAST_ASSIGN_OR_RETURN(room,
                               environment.budget->Reserve(bytes, "laying out a job's shards"));
    }
  }
  BALLAST_ASSIGN_OR_RETURN(Layout layout, Layout::Create(identity.spec.layout));
  return std::shared_ptr<JobImpl>(new JobImpl(std::move(identity), std::move(layout), environment));
}

JobImpl::JobImpl(JobIdentity identity, Layout layout, const JobEnvironment& environment)
    : identity_(std::move(identity)),
      layout_(std::move(layout)),
      environment_(environment),
      need_(NeedOf(identity_.spec, layout_)),
      history_(identity_.spec),
      tasks_(*environment_.tasks),
      stream_calls_(layout_.world_size()),
      gate_(layout_.world_size()),
      ranks_(layout_.world_size()),
      first_weights_(static_cast<int64_t>(layout_.chunks().size()), layout_.world_size()),
      ledger_(static_cast<int64_t>(layout_.chunks().size())),
      sums_(static_cast<int64_t>(layout_.chunks().size())),
      speculation_(layout_),
      tickets_(layout_.world_size()) {
  if (environment_.named_memory != nullptr) {
    need_.other_bytes += KeptBytes(layout_, environment_.tasks->threads());
  }
  record_.generation = identity_.generation;
  record_.update_counts.assign(identity_.spec.layout.parameters.size(), 0);
  record_.later_changes.resize(identity_.spec.groups.size());
  for (const GroupSpec& group : identity_.spec.groups) {
    record_.hyper_parameters.push_back(group.hyper_parameters);
  }
}

absl::Status JobImpl::Allocate(JobImpl* origin) {
  absl::Status status = AllocateParts();
  // Of a job that is taken over nothing can be left out: its memory was made before.
  const bool may_do_without = kept_ == nullptr || !kept_->taken_over();
  if (absl::IsResourceExhausted(status) && need_.speculation_bytes > 0 && may_do_without) {
    // Without second versions, then. Also where the budget has room and the system has none: it
    // limits the process's address space (ulimit -v), say.
    speculation_refused_ = std::string(status.message());
    need_.speculation_bytes = 0;
    status = AllocateParts();
  }
  BALLAST_RETURN_IF_ERROR(status);
  broken_ =
      WithReason(absl::FailedPreconditionError(absl::StrCat(
                     "job ", spec().name,
                     " is broken: the service's process had no memory for a part of its work (see "
                     "its limits, ulimit -v and the control group); close it (ballast close ",
                     spec().name, "), and create it anew or go on from its last checkpoint")),
                 reason::kJobBroken);
  // A task, because a buffer may come back anywhere, under whatever lock. Without memory for it the
  // chunks that wait are updated after the decision.
  const auto start_parked = [weak = weak_from_this()] {
    const auto self = std::static_pointer_cast<JobImpl>(weak.lock());
    if (self == nullptr) return;
    (void)RunsInMemory([&] { self->StartTask([self] { self->StartParked(); }); });
  };
  weight_buffers_ = WeightBufferPool::Create(WeightBufferBytes(spec(), layout_),
                                             WeightBufferCount(layout_), start_parked);
  if (kept_ == nullptr || !kept_->taken_over()) {
    if (const std::string& path = identity_.derivation.checkpoint; !path.empty()) {
      BALLAST_RETURN_IF_ERROR(InheritCheckpoint(path, origin));
    } else if (origin != nullptr) {
      BALLAST_RETURN_IF_ERROR(Inherit(*origin));
    }
  }
  // The record is stored last: where a later process finds one it takes the job over, and refuses a
  // job of which a part is missing.
  if (kept_ == nullptr || kept_->taken_over()) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(kept_->StoreIdentity());
  MutexLock lock(mutex_);
  Keep();
  return absl::OkStatus();
}

absl::Status JobImpl::AllocateParts() {
  const std::string owner = absl::StrCat("job ", spec().name);
  // An earlier try may have failed half way. Its memory goes before its share of the budget, so
  // that no other job is admitted into memory that is still in use.
  gradients_.reset();
  store_.reset();
  reservation_ = {};
  const bool is_there = kept_ != nullptr && kept_->taken_over();
  if (!is_there) {
    const std::string what =
        need_.previous_bytes == 0
            ? owner
            : absl::StrCat(owner, ", with ", need_.previous_bytes, " bytes for keep_previous,");
    BALLAST_ASSIGN_OR_RETURN(reservation_, environment_.budget->Reserve(need_.total_bytes(), what));
    // The budget is the operator's limit; this asks what the machine and its control group have
    // left.
    if (environment_.named_memory != nullptr) {
      BALLAST_RETURN_IF_ERROR(environment_.named_memory->Admit(need_.total_bytes(), what));
    }
  }
  const auto progress = BeginActivity(ActivityKind::kMakingMemory, need_.total_bytes());
  const CountsIn here(*progress);
  BALLAST_RETURN_IF_ERROR(AllocateKept());
  // After AllocateKept, which finds out whether second versions belong to what is needed.
  // A limit that has become lower makes it no less.
  if (is_there) reservation_ = environment_.budget->Take(need_.total_bytes());
  ArenaFactory& arenas = kept_ != nullptr ? kept_->arenas() : *environment_.arenas;
  BALLAST_ASSIGN_OR_RETURN(store_,
                           ChunkStore::Create(layout_,
                                              {.planes = PlanesByGroup(spec()),
                                               .second_versions = need_.speculation_bytes > 0,
                                               .keep_previous = spec().keep_previous,
                                               .budget = environment_.budget,
                                               .owner = owner,
                                               .named = kept_ ? &kept_->arenas() : nullptr},
                                              arenas));
  BALLAST_ASSIGN_OR_RETURN(gradients_, GradientStore::Create(spec(), layout_, arenas,
                                                             kept_ ? &kept_->arenas() : nullptr));
  return absl::OkStatus();
}

// ---------------------------------------------------------------- the gate

JobImpl::Section::Section(JobImpl& job) : job_(job) { job_.mutex_.Lock(); }

JobImpl::Section::~Section() {
  // What has been left for afterwards must still run if a turn finds no memory: it has the answers
  // of other calls. So the job breaks below, where the lock is free, which Break takes.
  bool given = true;
  try {
    job_.gate_.GiveTurns();
  } catch (const std::bad_alloc&) {
    given = false;
  } catch (const std::length_error&) {
    given = false;
  }
  std::vector<After> after = std::exchange(job_.after_, {});
  job_.mutex_.Unlock();
  if (!given) job_.Break();
  // Each on its own, so that one without memory keeps no other from its answer.
  for (After& run : after) job_.Guarded(std::move(run));
}

void JobImpl::Break() noexcept {
  int ranks = 0;
  {
    MutexLock lock(mutex_);
    if (broken() || gate_.phase() == Phase::kClosed) return;
    gate_.Break();
    // From here on no call finds a step to add to. What still runs finds the job broken when it
    // takes the lock next.
    step_ = std::monostate();
    ranks = ranks_.size();
  }
  step_over_.NotifyAll();
  // One rank after the other, with the lock taken anew for each: a list of them would need memory.
  for (int rank = 0; rank < ranks; ++rank) {
    std::shared_ptr<RankListener> listener;
    {
      MutexLock lock(mutex_);
      listener = ranks_.CloseStream(rank, /*in_step=*/false);
    }
    // One that has no memory to say it either has ended its stream.
    if (listener != nullptr) (void)RunsInMemory([&] { listener->OnDetached(broken_); });
    (void)RunsInMemory([&] { stream_calls_.Answer(rank, broken_); });
  }
  { const Section section(*this); }  // Those who wait are told.
  if (environment_.warn) {
    (void)RunsInMemory([&] { environment_.warn(std::string(broken_.message())); });
  }
}

void JobImpl::StartTask(std::function<void()> work, int node) {
  tasks_.Start([self = Self(), work = std::move(work)] { self->Guarded(work); }, node);
}

void JobImpl::Tell(std::string text, int rank) {
  if (!environment_.tell) return;
  // Without the job: who is told that it is closed may count on its memory.
  RunAfter([tell = environment_.tell,
            event = JobEvent{.job = spec().name, .rank = rank, .text = std::move(text)}] {
    tell(event);
  });
}

absl::Status JobImpl::StatusOf(std::optional<Answer> answer) const {
  const std::string job = absl::StrCat("job ", spec().name);
  if (!answer.has_value()) return absl::CancelledError("the caller has given up waiting");
  switch (*answer) {
    case Answer::kGranted:
    case Answer::kWaits:
      return absl::OkStatus();
    case Answer::kBroken:
      return broken_;
    case Answer::kClosed:
      return WithReason(absl::NotFoundError(absl::StrCat(job, " has been closed")),
                        reason::kNoSuchJob);
    case Answer::kLoading:
      return absl::UnavailableError(
          absl::StrCat(job, " is loading a checkpoint; try again when it has"));
    case Answer::kTorn:
      return WithReason(absl::FailedPreconditionError(absl::StrCat(
                            "the state of ", job, " is torn: loading ", record_.torn_by,
                            " did not end; load a whole checkpoint (ballast load ", spec().name,
                            "), or close it (ballast close ", spec().name, ")")),
                        reason::kJobBroken);
    case Answer::kChanging:
      return absl::UnavailableError(absl::StrCat(job, " is about to change; read again"));
    case Answer::kNoStep:
    case Answer::kAborted:
      return absl::FailedPreconditionError(
          absl::StrCat(job, " is between steps, at step ", committed_step()));
    case Answer::kHasStep:
      return absl::FailedPreconditionError(
          absl::StrCat("step ", record_.committed_step + 1, " of ", job,
                       " has begun; abort it first (ballast abort-step ", spec().name, ")"));
    case Answer::kDecided:
      return absl::FailedPreconditionError(absl::StrCat("step ", record_.committed_step + 1, " of ",
                                                        job, " is decided and can only go on"));
  }
  return absl::InternalError("the gate gave an answer that has no status");
}

uint64_t JobImpl::EnterHere(Admission admission, int rank, Turn turn) {
  // The job outlives what waits in its gate: the gate is a member, and a call that waits has the
  // job.
  return gate_.Enter(
      admission, rank,
      [this, turn = std::move(turn)](std::optional<Answer> answer)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable { std::move(turn)(StatusOf(answer)); });
}

Pending JobImpl::Enter(Admission admission, int rank, Turn turn, std::shared_ptr<uint64_t> number) {
  {
    Section section(*this);
    const uint64_t waits = EnterHere(admission, rank, std::move(turn));
    if (waits != 0) *number = waits;
    if (*number == 0) return {};
  }
  return PendingOf(std::move(number));
}

Pending JobImpl::PendingOf(std::shared_ptr<uint64_t> number) {
  // Weak: a caller may keep its Pending for long, and that must not keep the job's memory.
  return Pending([weak = weak_from_this(), number = std::move(number)] {
    const auto self = std::static_pointer_cast<JobImpl>(weak.lock());
    if (self == nullptr) return;
    Section section(*self);
    self->gate_.Cancel(*number);  // No call has number 0.
  });
}

absl::Status JobImpl::CheckUsable() const {
  const GateState& state = gate_.state();
  if (state.phase == Phase::kClosed) return StatusOf(Answer::kClosed);
  if (state.broken) return broken_;
  if (state.phase == Phase::kLoading) return StatusOf(Answer::kLoading);
  return state.torn ? StatusOf(Answer::kTorn) : absl::OkStatus();
}

// ---------------------------------------------------------------- control

void JobImpl::TellWaiting() {
  Listeners sealed;
  std::vector<int> awaited;
  uint64_t step = 0;
  {
    MutexLock lock(mutex_);
    const OpenStep* given = Undecided();
    if (given == nullptr || !given->SecondsSinceFirstSeal().has_value()) return;
    const bool voting = gate_.phase() == Phase::kVoting;
    // All have sealed, and the engine is at work: no rank waits for another one.
    if (!voting && std::holds_alternative<SealedStep>(step_)) return;
    step = given->terms().step;
    awaited = voting ? std::get<SealedStep>(step_).RanksWithoutVote() : given->UnsealedRanks();
    for (int rank = 0; rank < layout_.world_size(); ++rank) {
      const RankInStep& state = given->ranks()[rank];
      const bool waits = voting ? state.vote.has_value() : state.sealed.has_value();
      if (waits && ranks_[rank].listener != nullptr) sealed.push_back(ranks_[rank].listener);
    }
  }
  for (const auto& listener : sealed) listener->OnWaiting(step, awaited);
}

std::optional<double> JobImpl::SecondsSinceFirstSeal() const {
  MutexLock lock(mutex_);
  // In other phases nobody waits for a rank, so no deadline applies.
  if (gate_.phase() != Phase::kOpen && gate_.phase() != Phase::kVoting) return std::nullopt;
  const OpenStep* given = Undecided();
  return given == nullptr ? std::nullopt : given->SecondsSinceFirstSeal();
}

Pending JobImpl::AbortStep(Done<uint64_t> done) {
  return Enter(Admission::kAbort, -1,
               [this, self = shared_from_this(), done = std::move(done)](absl::Status admitted)
                   ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                     if (!admitted.ok()) return Reply<uint64_t>(std::move(done), admitted);
                     // Kept for the answer: a step that is decided as a skip raises the committed
                     // step.
                     const uint64_t step = record_.committed_step + 1;
                     // What is still on its way must not meet the next attempt.
                     GiveUpStep(
                         absl::StrCat("step ", step, " of job ", spec().name, " was aborted"),
                         [this, self, step, done = std::move(done)]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                             mutex_) mutable { Reply<uint64_t>(std::move(done), step); });
                   });
}

absl::StatusOr<HyperParameters> JobImpl::UpdateGroup(int group,
                                                     const HyperParameterOverrides& changes) {
  Check(group >= 0 && group < layout_.group_count(), "the group is one of the job's");
  Section section(*this);
  BALLAST_RETURN_IF_ERROR(CheckUsable());
  const HyperParameters changed = Apply(record_.hyper_parameters[group], changes);
  BALLAST_RETURN_IF_ERROR(
      Annotate(Validate(changed), absl::StrCat("group ", spec().groups[group].name)));
  HyperParameters in_force = changed;
  HyperParameterOverrides later = record_.later_changes[group];
  if (!std::holds_alternative<std::monostate>(step_)) {
    // The step in progress puts its own overrides into force when it is committed. A change that an
    // operator makes meanwhile is newer, so it is applied once more after them.
    later = Merge(later, changes);
  }
  HyperParameters before;
  // They are an operator's, not the last step's.
  if (record_.previous.has_value()) {
    before = Apply(record_.previous->hyper_parameters[group], changes);
  }
  const auto swap = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::swap(record_.hyper_parameters[group], in_force);
    std::swap(record_.later_changes[group], later);
    if (record_.previous.has_value()) {
      std::swap(record_.previous->hyper_parameters[group], before);
    }
  };
  swap();
  try {
    Keep();
  } catch (...) {
    swap();  // What is not kept is not in force: the caller gets an error.
    throw;
  }
  Move();
  return changed;
}

bool JobImpl::IsBetweenSteps() const {
  MutexLock lock(mutex_);
  const Phase phase = gate_.phase();
  // The step of a broken job never ends, so a drain must not wait for it.
  return broken() || phase == Phase::kIdle || phase == Phase::kLoading || phase == Phase::kClosed;
}

bool JobImpl::IsAbandoned() const {
  MutexLock lock(mutex_);
  // In the other phases of a step the engine brings it to its end, whoever is there.
  if (gate_.phase() != Phase::kOpen && gate_.phase() != Phase::kVoting) return false;
  return UseNow().streams == 0;
}

void JobImpl::TellStreams(const absl::Status& why) {
  Listeners listeners;
  {
    MutexLock lock(mutex_);
    listeners = ranks_.ByRank();
  }
  for (const std::shared_ptr<RankListener>& listener : listeners) {
    if (listener != nullptr) listener->OnDetached(why);
  }
}

Pending JobImpl::Close(std::optional<Use> unused, Done<bool> done) {
  return Enter(
      Admission::kClose, -1,
      [this, self = shared_from_this(), unused, done = std::move(done)](absl::Status admitted)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
            if (admitted.ok() && unused.has_value()) admitted = CheckUnused(*unused);
            // Another call has closed the job: then this one is done, too.
            if (absl::IsNotFound(admitted)) admitted = absl::OkStatus();
            // What still runs of a broken job keeps it until it has ended. Should the
            // process die before, a later one finds no job all the same; a flip that says
            // so would need memory.
            if (admitted.ok() && broken() && gate_.phase() != Phase::kClosed) {
              gate_.Close();
              if (kept_ != nullptr) kept_->GiveUp();
              Tell("closed; it was broken");
            }
            if (gate_.phase() == Phase::kClosed || !admitted.ok()) {
              return Reply<bool>(std::move(done), admitted.ok() ? absl::StatusOr<bool>(true)
                                                                : absl::StatusOr<bool>(admitted));
            }
            CloseNow(absl::StrCat("job ", spec().name, " has been closed"), std::move(done));
          });
}

void JobImpl::CloseNow(const std::string& why, Done<bool> done) {
  RaiseGeneration(why, [this, self = Self(), done = std::move(done)]()
                           ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                             gate_.Close();
                             // After this flip a later process finds no job, so that memory may
                             // go part by part.
                             record_.closed = true;
                             try {
                               Keep();
                             } catch (...) {
                               kept_->GiveUp();  // Needs no memory.
                             }
                             step_over_.NotifyAll();
                             Tell(absl::StrCat("closed at step ", committed_step()));
                             Reply<bool>(std::move(done), true);
                           });
}

absl::Status JobImpl::CheckUnused(const Use& unused) const {
  if (unused == UseNow() && unused.streams == 0 && !environment_.draining->load()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("job ", spec().name, " is used again, or the service is stopping"));
}

// ---------------------------------------------------------------- Job's short forms

absl::StatusOr<Attachment> Job::Attach(const AttachRequest& request) {
  return Await<Attachment>([&](Done<Attachment> done) { Attach(request, std::move(done)); });
}

absl::StatusOr<std::unique_ptr<RankStream>> Job::OpenStream(
    const OpenStreamRequest& request, std::shared_ptr<RankListener> listener) {
  return Await<std::unique_ptr<RankStream>>([&](Done<std::unique_ptr<RankStream>> done) {
    OpenStream(request, std::move(listener), std::move(done));
  });
}

absl::StatusOr<uint64_t> Job::AbortStep() {
  return Await<uint64_t>([&](Done<uint64_t> done) { AbortStep(std::move(done)); });
}

absl::StatusOr<uint64_t> Job::UndoStep(const UndoRequest& request) {
  return Await<uint64_t>([&](Done<uint64_t> done) { UndoStep(request, std::move(done)); });
}

absl::StatusOr<Snapshot> Job::TakeSnapshot(absl::Span<const int> parameters) {
  return Await<Snapshot>([&](Done<Snapshot> done) {
    TakeSnapshot(std::vector<int>(parameters.begin(), parameters.end()), std::move(done));
  });
}

absl::StatusOr<CheckpointInfo> Job::Save(const std::string& folder) {
  return Await<CheckpointInfo>(
      [&](Done<CheckpointInfo> done) { Save({.folder = folder}, std::move(done)); });
}

absl::StatusOr<CheckpointInfo> Job::Load(const std::string& path, bool weights_only) {
  return Await<CheckpointInfo>([&](Done<CheckpointInfo> done) {
    Load({.path = path, .weights_only = weights_only}, std::move(done));
  });
}

}  // namespace ballast
