#include "cpu_optimizer_service/job/impl/job_impl.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

// What outlives the process beside state and gradients (kept_job.h): records and logs of an
// ordinary job in pages of their own, lanes, and two words a chunk. (A word more of a previous
// version is with that: NeedOf.)
int64_t KeptBytes(const Layout& layout, int threads) {
  constexpr int64_t kRecords = int64_t{512} << 10;
  constexpr int64_t kLanesOfThread = 4 * static_cast<int64_t>(sizeof(RedoLane));
  return kRecords + kLanesOfThread * (threads + 1) +
         static_cast<int64_t>(2 * sizeof(uint64_t) * layout.chunks().size());
}

// By member, its lowest rank.
std::vector<int> FirstRanks(const JobSpec& spec) {
  std::vector<int> ranks;
  for (int member = 0; member < spec.member_count(); ++member) {
    ranks.push_back(spec.RanksOf(member).front());
  }
  return ranks;
}

}  // namespace

absl::StatusOr<std::shared_ptr<JobImpl>> JobImpl::Describe(JobIdentity identity,
                                                           const JobEnvironment& environment,
                                                           bool is_there) {
  BALLAST_RETURN_IF_ERROR(Validate(identity.spec));
  BALLAST_RETURN_IF_ERROR(CheckParameters(identity.spec.layout));
  // A short description may have millions of chunks and shards. Of more than kMaxShards none is laid
  // out. Reserved only while the layout is made: the job's own reservation counts these tables, too
  // (NeedOf).
  MemoryBudget::Reservation room;
  const int64_t shards = ShardTableBytes(identity.spec.layout);
  const int64_t bytes =
      ChunkTableBytes(identity.spec.layout) + (shards <= kBytesOfShard * kMaxShards ? shards : 0);
  if (is_there) {  // A lower limit takes nothing from it.
    room = environment.budget->Take(bytes);
  } else {
    BALLAST_ASSIGN_OR_RETURN(room, environment.budget->Reserve(bytes, "laying out a job"));
  }
  BALLAST_ASSIGN_OR_RETURN(
      Layout layout,
      Layout::CreateForRanks(identity.spec.layout, identity.spec.RanksOf(identity.member)));
  return std::shared_ptr<JobImpl>(new JobImpl(std::move(identity), std::move(layout), environment));
}

JobImpl::JobImpl(JobIdentity identity, Layout layout, const JobEnvironment& environment)
    : core_(*this, std::move(identity), std::move(layout), environment),
      memory_{.need = NeedOf(spec(), core_.layout)},
      members_(core_),
      journal_(core_, memory_, members_.table),
      view_(core_, memory_),
      tasks_(core_.identity.spec,
             [this](int member, const LeadWord& word)
                 ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return SendTo(member, word); }),
      saver_(core_, memory_, view_, tasks_,
             [this](MemberWord word)
                 ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { Say(std::move(word)); }),
      origin_(core_, memory_, members_, journal_, saver_),
      loader_(
          core_, memory_, journal_, view_, saver_, origin_,
          [this](const Generation& to, std::string why, absl::AnyInvocable<void() &&> then)
              ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
                RaiseTo(to, std::move(why), std::move(then));
              },
          {.tasks = tasks_,
           .check_none_has_begun =
               [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return CheckNoneHasBegun(); },
           .have_loaded =
               [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return OthersHaveLoaded(); },
           .tell_lead = [this](uint64_t loads, const absl::Status& status)
                            ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { SayLoaded(loads, status); },
           .say = [this](MemberWord word)
                      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { Say(std::move(word)); }}),
      writes_(core_, memory_, members_, journal_, view_, machine_),
      machine_(core_.identity.spec, core_.layout),
      orthogonal_(core_.layout),
      lead_(core_.identity.spec, core_.layout, FirstRanks(core_.identity.spec)),
      links_(spec().member_count()),
      seats_(core_.identity.spec),
      executor_(core_, memory_, journal_, view_, members_.table, machine_),
      decider_(core_, memory_, executor_, machine_, lead_) {
  if (core_.environment.named_memory != nullptr) {
    memory_.need.other_bytes += KeptBytes(core_.layout, core_.environment.tasks->threads());
  }
  if (!is_alone()) core_.first_weights.Hold();  // Until all members have theirs.
  core_.record.generation = {1, spec().epoch};
  core_.record.update_counts.assign(core_.identity.spec.layout.parameters.size(), 0);
  core_.record.later_changes.resize(core_.identity.spec.groups.size());
  for (const GroupSpec& group : core_.identity.spec.groups) {
    core_.record.hyper_parameters.push_back(group.hyper_parameters);
  }
}

absl::Status JobImpl::OrWithoutSpeculation(absl::FunctionRef<absl::Status()> get) {
  absl::Status status = get();
  // Of a job that is taken over nothing can be left out: its memory was made before.
  const bool may_do_without = memory_.need.speculation_bytes > 0 && !journal_.is_taken_over();
  if (!absl::IsResourceExhausted(status) || !may_do_without) return status;
  memory_.speculation_refused = std::string(status.message());
  memory_.need.speculation_bytes = 0;
  // Memory goes before its share of the budget, so that no other job is admitted into memory that
  // is still in use.
  memory_.gradients.reset();
  memory_.directions.reset();
  memory_.store.reset();
  memory_.reservation = {};
  return get();
}

absl::Status JobImpl::Reserve() {
  return OrWithoutSpeculation([this] { return ReserveNeed(); });
}

absl::Status JobImpl::ReserveNeed() {
  if (memory_.reservation.bytes() > 0) return absl::OkStatus();
  std::string what = absl::StrCat("job ", spec().name);
  if (memory_.need.previous_bytes > 0) {
    absl::StrAppend(&what, ", with ", memory_.need.previous_bytes, " bytes for keep_previous,");
  }
  BALLAST_ASSIGN_OR_RETURN(MemoryBudget::Reservation reservation,
                           core_.environment.budget->Reserve(memory_.need.total_bytes(), what));
  // The budget is the operator's limit; this asks what the machine and its control group have
  // left.
  if (core_.environment.named_memory != nullptr) {
    BALLAST_RETURN_IF_ERROR(
        core_.environment.named_memory->Admit(memory_.need.total_bytes(), what));
  }
  memory_.reservation = std::move(reservation);
  return absl::OkStatus();
}

absl::Status JobImpl::Allocate(JobImpl* origin) {
  // Without second versions also where the budget has room and the system has none: it limits the
  // process's address space (ulimit -v), say.
  BALLAST_RETURN_IF_ERROR(OrWithoutSpeculation([this] { return AllocateParts(); }));
  // A task, because a buffer may come back anywhere, under whatever lock.
  const auto start_parked = [weak = weak_from_this()] {
    const auto self = std::static_pointer_cast<JobImpl>(weak.lock());
    if (self != nullptr) self->executor_.StartTask([self] { self->executor_.StartParked(); });
  };
  memory_.weight_buffers = WeightBufferPool::Create(WeightBufferBytes(spec(), core_.layout),
                                                    WeightBufferCount(core_.layout), start_parked);
  if (journal_.is_taken_over()) return absl::OkStatus();
  if (const std::string& path = core_.identity.derivation.checkpoint; !path.empty()) {
    return InheritCheckpoint(path, origin);
  }
  return origin != nullptr ? Inherit(*origin) : absl::OkStatus();
}

absl::Status JobImpl::Establish() {
  // The record is stored last: where a later process finds one it takes the job over, and refuses a
  // job of which a part is missing.
  if (journal_.kept() != nullptr) BALLAST_RETURN_IF_ERROR(journal_.kept()->StoreIdentity());
  const JobCore::Section section(core_);
  if (journal_.kept() != nullptr) journal_.Keep();
  is_established_ = true;
  if (!is_alone()) SayStanding();
  for (Early& each : std::exchange(early_, {})) {
    HearNow(each.member, each.link, std::move(each.word));
  }
  return absl::OkStatus();
}

absl::Status JobImpl::AllocateParts() {
  const std::string owner = absl::StrCat("job ", spec().name);
  const bool is_there = journal_.is_taken_over();
  if (!is_there) BALLAST_RETURN_IF_ERROR(ReserveNeed());
  const auto progress =
      core_.BeginActivity(ActivityKind::kMakingMemory, memory_.need.total_bytes());
  const CountsIn here(*progress);
  BALLAST_RETURN_IF_ERROR(journal_.Allocate());
  // After Journal::Allocate, which finds out whether second versions belong to what is needed.
  // A limit that has become lower makes it no less.
  if (is_there) memory_.reservation = core_.environment.budget->Take(memory_.need.total_bytes());
  ArenaFactory& arenas =
      journal_.kept() != nullptr ? journal_.kept()->arenas() : *core_.environment.arenas;
  BALLAST_ASSIGN_OR_RETURN(
      memory_.store,
      ChunkStore::Create(core_.layout,
                         {.planes = PlanesByGroup(spec()),
                          .second_versions = memory_.need.speculation_bytes > 0,
                          .keep_previous = spec().keep_previous,
                          .budget = core_.environment.budget,
                          .owner = owner,
                          .named = journal_.kept() ? &journal_.kept()->arenas() : nullptr},
                         arenas));
  BALLAST_ASSIGN_OR_RETURN(
      memory_.gradients,
      GradientStore::Create(spec(), core_.layout, arenas,
                            journal_.kept() ? &journal_.kept()->arenas() : nullptr));
  BALLAST_ASSIGN_OR_RETURN(memory_.directions, DirectionStore::Create(spec(), core_.layout, arenas,
                                                                      *core_.environment.arenas));
  return absl::OkStatus();
}

absl::StatusOr<bool> JobImpl::WriteInitialWeights(
    int64_t chunk, absl::Span<const absl::Span<const std::byte>> payload,
    const std::optional<Uploader>& uploader) {
  BALLAST_ASSIGN_OR_RETURN(const bool are_all, origin_.Write(chunk, payload, uploader));
  if (are_all && !is_alone()) {
    const JobCore::Section section(core_);
    SayStanding();
    return core_.first_weights.complete();
  }
  if (!are_all || derivation().uid.empty()) return are_all;
  core_.environment.take_place(Self());
  return false;
}

// ---------------------------------------------------------------- control

Pending JobImpl::AbortStep(Done<uint64_t> done) {
  const std::weak_ptr<Job> weak = weak_from_this();
  const auto number = std::make_shared<uint64_t>(0);
  const auto asked = std::make_shared<uint64_t>(0);
  core_.Enter(
      Admission::kAbort, -1,
      [this, self = shared_from_this(), asked, done = std::move(done)](
          absl::Status admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
        if (admitted.ok() && core_.gate.phase() == Phase::kDirections) {
          const uint64_t step = core_.record.committed_step;
          StopAwaitingOrthogonal("an operator aborts its wait for ranks");
          return core_.Reply<uint64_t>(std::move(done), step);
        }
        // Ranks of another member may have begun it.
        const bool is_begun_elsewhere = core_.gate.phase() == Phase::kIdle && !is_alone() &&
                                        core_.identity.is_lead() && LeadOfStep().has_begun();
        if (!admitted.ok() && !is_begun_elsewhere) {
          return core_.Reply<uint64_t>(std::move(done), admitted);
        }
        // Kept for the answer: a step that is decided as a skip raises the committed
        // step.
        const uint64_t step = core_.record.committed_step + 1;
        const std::string why =
            absl::StrCat("step ", step, " of job ", spec().name, " was aborted");
        if (!core_.identity.is_lead()) {
          *asked = AskLead(
              why, [this, self, step, before = core_.record.generation, done = std::move(done)](
                       absl::Status answered) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                // The lead had decided it.
                if (answered.ok() && core_.record.generation == before && !WasLost(step)) {
                  answered = core_.StatusOf(Answer::kDecided);
                }
                core_.Reply<uint64_t>(std::move(done), answered.ok()
                                                           ? absl::StatusOr<uint64_t>(step)
                                                           : absl::StatusOr<uint64_t>(answered));
              });
          return;
        }
        // What is still on its way must not meet the next attempt.
        GiveUpStep(why, [this, self, step, done = std::move(done)]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                            job_lock) mutable { core_.Reply<uint64_t>(std::move(done), step); });
      },
      number);
  return Pending([this, weak, number, asked] {
    const std::shared_ptr<const Job> alive = weak.lock();
    if (alive == nullptr) return;
    JobCore::Section section(core_);
    core_.gate.Cancel(*number);
    CancelAsk(*asked);
  });
}

absl::StatusOr<HyperParameters> JobImpl::UpdateGroup(int group,
                                                     const HyperParameterOverrides& changes) {
  Check(group >= 0 && group < core_.layout.group_count(), "the group is one of the job's");
  JobCore::Section section(core_);
  // Other members get it with the next decision.
  BALLAST_RETURN_IF_ERROR(CheckLeads());
  BALLAST_RETURN_IF_ERROR(core_.CheckUsable());
  const HyperParameters& now = core_.record.hyper_parameters[group];
  BALLAST_RETURN_IF_ERROR(ValidateChanges(spec(), group, now, changes));
  const HyperParameters changed = Apply(now, changes);
  core_.record.hyper_parameters[group] = changed;
  if (!machine_.between_steps()) {
    // The step in progress puts its own overrides into force when it is committed. A change that an
    // operator makes meanwhile is newer, so it is applied once more after them.
    core_.record.later_changes[group] = Merge(core_.record.later_changes[group], changes);
  }
  if (core_.record.previous.has_value()) {
    // They are an operator's, not the last step's.
    HyperParameters& before = core_.record.previous->hyper_parameters[group];
    before = Apply(before, changes);
  }
  journal_.Keep();
  core_.Move();
  return changed;
}

bool JobImpl::IsBetweenSteps() const {
  JobCore::Lock lock(core_);
  const Phase phase = core_.gate.phase();
  return phase == Phase::kIdle || phase == Phase::kLoading || phase == Phase::kClosed;
}

bool JobImpl::IsAbandoned() const {
  JobCore::Lock lock(core_);
  // In the other phases of a step the engine brings it to its end, whoever is there. So do other
  // members with a reported part.
  if (core_.gate.phase() == Phase::kReported && !is_alone()) return false;
  const Phase phase = core_.gate.phase();
  if (phase != Phase::kOpen && phase != Phase::kReported && phase != Phase::kDirections) {
    return false;
  }
  return UseNow().streams == 0;
}

void JobImpl::TellStreams(const absl::Status& why) {
  Listeners listeners;
  {
    JobCore::Lock lock(core_);
    listeners = members_.table.ByRank();
  }
  for (const std::shared_ptr<RankListener>& listener : listeners) {
    if (listener != nullptr) listener->OnDetached(why);
  }
}

absl::Status JobImpl::CheckUnused(const Use& unused) const {
  if (unused == UseNow() && unused.streams == 0 && !core_.environment.draining->load()) {
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
