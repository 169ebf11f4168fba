// Jobs with several members: created by the lead on all of them or none, and followed by the others.
#include <chrono>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/engine_impl.h"

namespace ballast {
namespace {

absl::Status CheckMayHaveMembers(const JobSpec& spec, const Derivation& derivation) {
  const char* what = nullptr;
  if (!derivation.is_from_nothing()) what = "be derived from another one";
  if (what == nullptr) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("job ", spec.name,
                                               " has several members and cannot ", what,
                                               " yet; leave that out, or use one service"));
}

}  // namespace

// ---------------------------------------------------------------- the lead

void Engine::UseDialer(MemberDialer* dialer) {
  std::vector<std::shared_ptr<JobImpl>> all;
  {
    MutexLock lock(impl_->mutex);
    impl_->dialer = dialer;
    for (const auto& [name, entry] : impl_->jobs) all.push_back(entry.job);
  }
  if (dialer == nullptr) {
    for (const auto& job : all) job->GiveUpOthers(absl::UnavailableError("the service is stopping"));
    return;
  }
  for (const std::shared_ptr<JobImpl>& job : impl_->AllJobs()) {
    if (job->spec().member_count() == 1 || !job->is_lead()) continue;
    dialer->Dial(job);
    // An earlier process was told to.
    if (job->is_closing()) CloseJob(job, [](const absl::StatusOr<bool>&) {});
  }
}

void Engine::Impl::HangUp(const JobImpl& job) {
  if (job.spec().member_count() == 1 || !job.is_lead()) return;
  MemberDialer* used = nullptr;
  {
    MutexLock lock(mutex);
    used = dialer;
  }
  if (used != nullptr) used->HangUp(job);
}

absl::Status Engine::Impl::CreateOverMembers(const std::shared_ptr<JobImpl>& job) {
  BALLAST_RETURN_IF_ERROR(CheckMayHaveMembers(job->spec(), job->derivation()));
  MemberDialer* used = nullptr;
  {
    MutexLock lock(mutex);
    used = dialer;
  }
  if (used == nullptr) {
    return absl::UnimplementedError("this service connects to no other members");
  }
  const MemberWord::Seat here = job->Seat(job->Reserve());
  used->Dial(job);
  const absl::Status created = [&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(
        job->seats().AwaitRoom(here, std::chrono::duration_cast<Clock::duration>(member_timeout)));
    job->TellAll({LeadWord::Keep()});
    BALLAST_RETURN_IF_ERROR(job->Allocate());
    BALLAST_RETURN_IF_ERROR(job->seats().AwaitKept());
    return job->Establish();
  }();
  if (created.ok()) return created;
  job->TellAll({LeadWord::Close{std::string(created.message())}});
  used->HangUp(*job);
  return created;
}

void Engine::Impl::Leave(const Job& job, const absl::Status& why) {
  std::vector<Done<std::shared_ptr<Job>>> waiting;
  {
    MutexLock lock(mutex);
    const auto found = jobs.find(job.spec().name);
    if (found == jobs.end() || found->second.job.get() != &job) return;
    waiting = std::move(found->second.waiting);
    jobs.erase(found);
  }
  for (auto& each : waiting) std::move(each)(why);
}

// ---------------------------------------------------------------- another member

// One link of a lead, and what it is for. The engine's threads may outlive the link.
class Engine::Part : public std::enable_shared_from_this<Part> {
 public:
  Part(Engine& engine, std::string principal, std::shared_ptr<WordSink<MemberWord>> sink)
      : engine_(engine), principal_(std::move(principal)), sink_(std::move(sink)) {}

  absl::Status Begin(const Follow& follow) {
    if (follow.is_new) return Reserve(follow);
    absl::StatusOr<std::shared_ptr<Job>> job = engine_.FindJob(follow.spec.name, follow.uid);
    if (absl::IsUnavailable(job.status())) return job.status();
    if (job.ok()) {
      auto& found = static_cast<JobImpl&>(**job);
      // An address may have become another service's.
      if (found.is_lead() || found.member() != follow.member || !(found.spec() == follow.spec)) {
        return absl::UnavailableError(absl::StrCat("the service there is not member ",
                                                   follow.member, " of job ", follow.spec.name));
      }
      if (found.lead_principal() != principal_) {
        return absl::PermissionDeniedError(absl::StrCat("job ", follow.spec.name, " is led by '",
                                                        found.lead_principal(), "' here"));
      }
      Link(found);
    } else {
      Refuse(job.status());
    }
    return absl::OkStatus();
  }

  void Hear(LeadWord word) {
    const bool closes = std::holds_alternative<LeadWord::Close>(word.what);
    std::shared_ptr<JobImpl> job;
    uint64_t link = 0;
    {
      MutexLock lock(mutex_);
      if (state_ == State::kReserved && std::holds_alternative<LeadWord::Keep>(word.what)) {
        state_ = State::kMaking;
        engine_.impl_->parts_under_way.Begin();
        // It may take long: pages are touched.
        engine_.impl_->disk_threads.Run([self = shared_from_this()] {
          self->Make();
          self->engine_.impl_->parts_under_way.End();
        });
        return;
      }
      if (state_ != State::kLinked) {
        if (closes) is_closed_ = true;
        if (!closes || state_ != State::kReserved) return;
        state_ = State::kNone;
      }
      job = linked_.lock();
      link = link_;
    }
    if (link == 0) return Drop(absl::AbortedError(std::get<LeadWord::Close>(word.what).why));
    if (job == nullptr) {  // Closed here alone.
      if (closes) Refuse(absl::OkStatus());
      return;
    }
    if (!closes) return job->HearLead(link, std::move(word));
    CloseAndSay(std::move(job));
  }

  void End() {
    std::shared_ptr<JobImpl> linked;
    uint64_t link = 0;
    {
      MutexLock lock(mutex_);
      has_ended_ = true;
      if (state_ == State::kMaking || state_ == State::kNone) return;
      linked = linked_.lock();
      link = link_;
      state_ = State::kNone;
    }
    const absl::Status why = absl::UnavailableError("the lead's link has ended");
    if (link == 0) return Drop(why);
    if (linked != nullptr) linked->CloseLink(link, why);
  }

 private:
  enum class State : uint8_t {
    kNone,      // Nothing is here, or it is not this link's any more.
    kReserved,  // The part has room as long as this link.
    kMaking,    // Its memory is being made.
    kLinked,    // The part is a job of the engine.
  };

  void Refuse(absl::Status why) { sink_->Send({MemberWord::Seat{.error = std::move(why)}}); }
  absl::Status Reserve(const Follow& follow);
  absl::StatusOr<std::shared_ptr<JobImpl>> Describe(const Follow& follow) const;
  // False: another job has the name, which the lead is told.
  absl::StatusOr<bool> Enter(const Follow& follow);
  void Make();
  // False: the link has ended before.
  bool Link(JobImpl& job);
  // Not on the caller's thread, because it frees the part's memory.
  void CloseAndSay(std::shared_ptr<JobImpl> job) {
    engine_.impl_->parts_under_way.Begin();
    engine_.impl_->disk_threads.Run([self = shared_from_this(), job = std::move(job)]() mutable {
      self->engine_.CloseJob(
          std::move(job),
          [self](const absl::StatusOr<bool>& closed) {
            self->Refuse(closed.status());
            self->engine_.impl_->parts_under_way.End();
          },
          /*here=*/true);
    });
  }
  // The part that is not kept yet.
  void Drop(const absl::Status& why) {
    engine_.impl_->Leave(*job_, why);
    job_.reset();
    Refuse(why);
  }

  Engine& engine_;
  const std::string principal_;
  const std::shared_ptr<WordSink<MemberWord>> sink_;
  Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kNone;
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;  // The link.
  bool is_closed_ ABSL_GUARDED_BY(mutex_) = false;  // The lead has said so.
  std::shared_ptr<JobImpl> job_;  // The part that is reserved or made. It changes with the state.
  // The part that is kept, as long as it is a job of the engine, and the link's number at it.
  std::weak_ptr<JobImpl> linked_ ABSL_GUARDED_BY(mutex_);
  uint64_t link_ ABSL_GUARDED_BY(mutex_) = 0;
};

bool Engine::Part::Link(JobImpl& job) {
  MutexLock lock(mutex_);  // Until the state says who hears what the lead answers.
  if (has_ended_) return false;
  linked_ = std::static_pointer_cast<JobImpl>(job.shared_from_this());
  link_ = job.OpenLinkToLead(sink_);
  state_ = State::kLinked;
  return true;
}

absl::StatusOr<bool> Engine::Part::Enter(const Follow& follow) {
  Impl& impl = *engine_.impl_;
  const std::string& name = follow.spec.name;
  std::shared_ptr<JobImpl> orphan;
  {
    MutexLock lock(impl.mutex);
    const auto found = impl.jobs.find(name);
    if (found == impl.jobs.end()) {
      if (impl.jobs.size() + impl.successors.size() >= kMaxJobs) {
        Refuse(absl::ResourceExhaustedError("the service has as many jobs as it may have"));
        return false;
      }
      impl.jobs[name].job = job_;
      return true;
    }
    const JobImpl& there = *found->second.job;
    const JobSpec& spec = there.spec();
    if (there.uid() == follow.uid && there.member() != follow.member) {
      Refuse(absl::InvalidArgumentError(
          absl::StrCat("the addresses ", spec.members[there.member()].address, " and ",
                       spec.members[follow.member].address, " are of one service; name it once")));
      return false;
    }
    if (!found->second.ready && !there.is_lead()) {
      return WithReason(absl::UnavailableError("an older link for a creation has not ended yet"),
                        reason::kJobBeingCreated);
    }
    // Nothing is lost with a part that its lead does not know any more, and that has no weights.
    const bool may_be_orphan =
        found->second.ready && spec.member_count() > 1 && !there.is_lead() &&
        there.lead_principal() == principal_ && there.creation() <= follow.creation &&
        there.Position().awaiting_weights &&
        spec.members[spec.lead()].address == follow.spec.members[follow.spec.lead()].address;
    // It is being closed, or is this creation's.
    if (may_be_orphan && (there.has_link_to_lead() || there.uid() == follow.uid)) {
      return WithReason(absl::UnavailableError("a part of an earlier creation is still there"),
                        reason::kJobBeingCreated);
    }
    const bool is_orphan = may_be_orphan && there.creation() < follow.creation;
    if (!is_orphan) {
      Refuse(absl::AlreadyExistsError(
          absl::StrCat("it has another job ", name, " (uid ", there.uid(), ", step ",
                       found->second.ready ? there.Position().committed_step : 0,
                       "); close that, or choose another name")));
      return false;
    }
    orphan = found->second.job;
  }
  Await<bool>([&](Done<bool> done) {
    engine_.CloseJob(orphan, std::move(done), /*here=*/true);
  }).IgnoreError();
  return WithReason(absl::UnavailableError("what an earlier creation left is closed; try again"),
                    reason::kJobBeingCreated);
}

absl::Status Engine::Part::Reserve(const Follow& follow) {
  Impl& impl = *engine_.impl_;
  absl::StatusOr<std::shared_ptr<JobImpl>> job = Describe(follow);
  if (!job.ok()) {
    Refuse(job.status());
    return absl::OkStatus();
  }
  job_ = *std::move(job);
  BALLAST_ASSIGN_OR_RETURN(const bool has_entered, Enter(follow));
  if (!has_entered) return absl::OkStatus();
  const absl::Status room = job_->Reserve();
  if (!room.ok()) impl.Leave(*job_, room);
  MutexLock lock(mutex_);
  if (room.ok()) state_ = State::kReserved;
  sink_->Send({job_->Seat(room)});
  if (!room.ok()) job_.reset();
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<JobImpl>> Engine::Part::Describe(const Follow& follow) const {
  Impl& impl = *engine_.impl_;
  if (impl.draining.load()) {
    return WithReason(absl::UnavailableError("it is stopping and takes no new jobs"),
                      reason::kStopping);
  }
  BALLAST_RETURN_IF_ERROR(Validate(follow.spec));
  if (follow.member < 0 || follow.member >= static_cast<int>(follow.spec.members.size()) ||
      follow.member == follow.spec.lead() || follow.uid.size() != kJobUidCharacters) {
    return absl::InvalidArgumentError(
        absl::StrCat("the lead of job ", follow.spec.name, " means no member by ", follow.member));
  }
  BALLAST_RETURN_IF_ERROR(CheckMayHaveMembers(follow.spec, {}));
  return JobImpl::Describe({.uid = follow.uid,
                            .spec = follow.spec,
                            .derivation = {},
                            .member = follow.member,
                            .lead_principal = principal_,
                            .creation = follow.creation},
                           impl.environment);
}

void Engine::Part::Make() {
  Impl& impl = *engine_.impl_;
  const Impl::Clock::time_point began = Impl::Clock::now();
  absl::Status status = job_->Allocate();
  {
    MutexLock lock(mutex_);
    if (status.ok() && (has_ended_ || is_closed_))
      status = absl::AbortedError("the lead has given the job up");
    if (!status.ok()) state_ = State::kNone;
  }
  if (status.ok()) status = job_->Establish();
  impl.TellOfCreation(*job_, status, Impl::Clock::now() - began);
  if (!status.ok()) return Drop(status);
  std::vector<Done<std::shared_ptr<Job>>> waiting;
  {
    MutexLock lock(impl.mutex);
    const auto entry = impl.jobs.find(job_->spec().name);
    entry->second.ready = true;
    waiting.swap(entry->second.waiting);
  }
  const std::shared_ptr<JobImpl> job = std::move(job_);
  if (!Link(*job)) {
    // The lead has not heard that it is kept.
    for (auto& each : waiting) std::move(each)(absl::AbortedError("the lead has given the job up"));
    engine_.CloseJob(
        job, [](const absl::StatusOr<bool>&) {}, /*here=*/true);
    return;
  }
  for (auto& each : waiting) std::move(each)(std::shared_ptr<Job>(job));
  // Meanwhile.
  bool is_closed = false;
  {
    MutexLock lock(mutex_);
    is_closed = is_closed_;
    if (has_ended_) job->CloseLink(link_, absl::UnavailableError("the lead's link has ended"));
  }
  if (is_closed) CloseAndSay(job);
}

absl::StatusOr<std::unique_ptr<Engine::PartLink>> Engine::FollowLead(
    const Follow& follow, const std::string& principal,
    std::shared_ptr<WordSink<MemberWord>> sink) {
  class Handle final : public PartLink {
   public:
    explicit Handle(std::shared_ptr<Part> part) : part_(std::move(part)) {}
    ~Handle() override { part_->End(); }
    void Hear(LeadWord word) override { part_->Hear(std::move(word)); }

   private:
    const std::shared_ptr<Part> part_;
  };
  auto part = std::make_shared<Part>(*this, principal, std::move(sink));
  BALLAST_RETURN_IF_ERROR(part->Begin(follow));
  return std::make_unique<Handle>(std::move(part));
}

}  // namespace ballast
