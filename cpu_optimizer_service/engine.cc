#include "cpu_optimizer_service/engine.h"

#include <chrono>
#include <cmath>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/common/text/amounts.h"
#include "cpu_optimizer_service/common/text/checkpoint_name.h"
#include "cpu_optimizer_service/engine_impl.h"

namespace ballast {
namespace {

constexpr char kWasClosed[] = "; it was closed";
constexpr char kOvertaken[] = "; the job to derive from has advanced since: derive it again";

absl::Status RestartingError() {
  return WithReason(
      absl::UnavailableError("the service's process ends as planned; the next one goes on "
                             "with its jobs"),
      reason::kRestarting);
}

uint64_t CreationNow() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

absl::Status BeingDerived(const std::string& name) {
  return WithReason(
      absl::UnavailableError(absl::StrCat("job ", name, " is being derived; try again")),
      reason::kJobBeingCreated);
}

}  // namespace

Engine::Engine(const EngineOptions& options) : impl_(std::make_unique<Impl>(options)) {}

Engine::~Engine() {
  impl_->parts_under_way.Await();
  for (const std::shared_ptr<Job>& job : ListJobs()) {
    Await<bool>([&](Done<bool> done) {
      CloseJob(job, std::move(done), /*here=*/true);
    }).IgnoreError();
  }
}

std::string Engine::Impl::WhatBecameOf(const std::string& name, absl::string_view uid) const {
  const std::string text = past.WhatBecameOf(uid, /*begins_anew=*/!goes_on);
  if (environment.checkpoints == nullptr) return text;
  const std::optional<CheckpointFacts> saved = environment.checkpoints->Find(name);
  if (!saved.has_value()) return text;
  return absl::StrCat(text, "; its last save is step ", saved->step, ", in ", saved->directory,
                      ": ", HowToResume(name));
}

absl::StatusOr<std::shared_ptr<JobImpl>> Engine::Impl::OriginOf(const JobImpl& job) const {
  const std::string& uid = job.derivation().uid;
  if (uid.empty()) return nullptr;
  const std::string& name = job.spec().name;
  const auto found = jobs.find(name);
  if (found == jobs.end() || !found->second.ready) {
    return WithReason(absl::NotFoundError(absl::StrCat("there is no job ", name, " to derive from",
                                                       WhatBecameOf(name, uid))),
                      reason::kNoSuchJob);
  }
  const std::shared_ptr<JobImpl>& origin = found->second.job;
  if (origin->uid() == uid) return origin;
  if (!IsSame(*origin, job)) return OtherJob(*origin, uid);
  return absl::AlreadyExistsError(
      absl::StrCat("job ", name, " was derived from uid ", uid, " already; attach to it"));
}

absl::Status Engine::Impl::OtherJob(const Job& job, absl::string_view uid) const {
  const std::string& name = job.spec().name;
  return WithReason(
      absl::NotFoundError(absl::StrCat("job ", name, " has uid ", job.uid(), ", not '", uid, "'",
                                       WhatBecameOf(name, uid), "; attach to it again")),
      reason::kOtherJob);
}

absl::StatusOr<Engine::Impl::Entered> Engine::Impl::Enter(const std::shared_ptr<JobImpl>& job,
                                                          Done<std::shared_ptr<Job>>& done) {
  const std::string& name = job->spec().name;
  std::shared_ptr<JobImpl> given_up;
  const auto enter = [&]() -> absl::StatusOr<Entered> {
    MutexLock lock(mutex);
    BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<JobImpl> origin, OriginOf(*job));
    std::map<std::string, Entry>& entries = origin == nullptr ? jobs : successors;
    auto found = entries.find(name);
    const auto successor = successors.find(name);
    if (successor != successors.end() && successor->second.takes_place) {
      return BeingDerived(name);
    }
    if (found != entries.end() && origin != nullptr && found->second.ready &&
        !IsSame(*found->second.job, *job)) {
      given_up = TakeSuccessor(name, "; another one was derived in its place");
      found = entries.end();
    }
    if (found == entries.end()) {
      // Jobs that are being created count, too: otherwise calls at the same time would exceed the
      // bound.
      if (jobs.size() + successors.size() >= kMaxJobs) {
        return absl::ResourceExhaustedError(absl::StrCat("the service has ",
                                                         jobs.size() + successors.size(),
                                                         " jobs, which is the limit; close one"));
      }
      entries[name].job = job;
      return Entered::kIsNew;
    }
    if (found->second.ready && !job->derivation().is_from_nothing() &&
        !IsSame(*found->second.job, *job)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "job ", name, " exists, and is not derived from ", job->derivation().checkpoint,
          "; close it, or give its uid, so that the new one takes its place"));
    }
    if (found->second.ready && found->second.job->is_closing()) {
      return absl::UnavailableError(
          absl::StrCat("job ", name, " is being closed, and ", found->second.job->WhoHasNotClosed(),
                       " has not answered; try again, or close what is here alone"));
    }
    if (found->second.ready) {
      return absl::AlreadyExistsError(
          absl::StrCat("job ", name, " exists; attach to it, close it, or choose another name"));
    }
    if (!(found->second.job->spec() == job->spec() &&
          found->second.job->derivation() == job->derivation())) {
      return absl::AlreadyExistsError(
          absl::StrCat("job ", name,
                       " is being created with another description; close it when it "
                       "exists, or choose another name"));
    }
    // A caller whose first call ran out of time asks again, for example. It gets the first call's
    // answer, and nothing is allocated twice.
    found->second.waiting.push_back(std::move(done));
    return Entered::kWaits;
  };
  absl::StatusOr<Entered> entered = enter();
  CloseQuietly(given_up);
  return entered;
}

std::shared_ptr<JobImpl> Engine::Impl::TakeSuccessor(const std::string& name, const char* how) {
  const auto found = successors.find(name);
  if (found == successors.end() || !found->second.ready || found->second.takes_place)
    return nullptr;
  std::shared_ptr<JobImpl> job = std::move(found->second.job);
  successors.erase(found);
  past.AddEnded(*job, how);
  return job;
}

void Engine::Impl::GiveUpSuccessorOf(const Job& origin) {
  std::shared_ptr<JobImpl> given_up;
  {
    MutexLock lock(mutex);
    const auto found = successors.find(origin.spec().name);
    if (found == successors.end() || found->second.job->derivation().uid != origin.uid()) return;
    given_up = TakeSuccessor(origin.spec().name, kOvertaken);
  }
  CloseQuietly(given_up);
}

void Engine::Impl::TakePlace(std::shared_ptr<JobImpl> derived,
                             absl::AnyInvocable<void(const absl::Status&)> done) {
  const std::string name = derived->spec().name;
  std::shared_ptr<JobImpl> origin;
  {
    MutexLock lock(mutex);
    const auto found = successors.find(name);
    const auto now = jobs.find(name);
    // It has come to nothing meanwhile, and is closed by whoever said so; or this is under way.
    if (found == successors.end() || found->second.job != derived || found->second.takes_place ||
        now == jobs.end()) {
      return done(absl::AbortedError(absl::StrCat("job ", name, " was derived again, or closed")));
    }
    found->second.takes_place = true;
    origin = now->second.job;
  }
  origin->GiveWayTo(derived, [this, name, origin, derived,
                              done = std::move(done)](const absl::StatusOr<bool>& gave) mutable {
    std::shared_ptr<JobImpl> given_up;
    {
      MutexLock lock(mutex);
      const auto found = successors.find(name);  // Nobody else takes it away meanwhile.
      found->second.takes_place = false;
      if (gave.ok() && *gave) {
        // Whoever has closed the old one at the same time has closed that alone.
        jobs[name] = std::move(found->second);
        successors.erase(found);
        past.AddEnded(*origin, "; a job derived from it has replaced it");
      } else if (!gave.ok()) {
        given_up = TakeSuccessor(name, kOvertaken);
      }
    }
    CloseQuietly(given_up);
    origin.reset();  // Its memory is free when the caller is told, unless a reader has it.
    done(gave.status());
  });
}

std::vector<std::shared_ptr<JobImpl>> Engine::Impl::AllJobs() const {
  std::vector<std::shared_ptr<JobImpl>> all;
  MutexLock lock(mutex);
  for (const auto* entries : {&jobs, &successors}) {
    for (const auto& [name, entry] : *entries) {
      if (entry.ready) all.push_back(entry.job);
    }
  }
  return all;
}

void Engine::Impl::TellOfCreation(const Job& job, const absl::Status& status,
                                  Clock::duration took) const {
  if (!environment.tell) return;
  const JobSpec& spec = job.spec();
  if (!status.ok()) {
    return environment.tell(
        {.job = spec.name, .text = absl::StrCat("not created: ", status.message())});
  }
  int64_t elements = 0;
  for (const Chunk& chunk : job.layout().chunks()) elements += chunk.elements;
  environment.tell({.job = spec.name,
                    .text = absl::StrCat(
                        "created for ", Counted(spec.layout.world_size, "rank"), ": ",
                        Counted(static_cast<int64_t>(spec.layout.parameters.size()), "parameter"),
                        ", ", Counted(elements, "trainable element"), ", ",
                        FormatBytes(job.Status().memory.total_bytes()), ", in ",
                        std::round(10 * std::chrono::duration<double>(took).count()) / 10, " s")});
}

void Engine::CreateJob(JobSpec spec, Derivation derivation, Done<std::shared_ptr<Job>> done) {
  if (impl_->draining.load()) {
    return std::move(done)(
        WithReason(absl::UnavailableError("the service is stopping and takes no new jobs"),
                   reason::kStopping));
  }
  const std::string name = spec.name;
  const int lead = spec.lead();
  const absl::StatusOr<std::shared_ptr<JobImpl>> job =
      JobImpl::Describe({.uid = MakeJobUid(),
                         .spec = std::move(spec),
                         .derivation = std::move(derivation),
                         .member = lead,
                         .creation = CreationNow()},
                        impl_->environment);
  if (!job.ok()) return std::move(done)(job.status());
  // The name is taken before memory is allocated, so that of two calls for one name only one
  // allocates.
  const absl::StatusOr<Impl::Entered> entered = impl_->Enter(*job, done);
  if (!entered.ok()) return std::move(done)(entered.status());
  if (*entered == Impl::Entered::kWaits) return;
  // Without the lock: to touch all pages of a large job takes long, and other jobs are found
  // meanwhile.
  const Impl::Clock::time_point began = Impl::Clock::now();
  absl::Status status = [&]() -> absl::Status {
    std::shared_ptr<JobImpl> origin;
    {
      MutexLock lock(impl_->mutex);
      BALLAST_ASSIGN_OR_RETURN(origin, impl_->OriginOf(**job));
    }
    if ((*job)->spec().member_count() > 1) return impl_->CreateOverMembers(*job);
    BALLAST_RETURN_IF_ERROR((*job)->Allocate(origin.get()));
    return (*job)->Establish();
  }();
  impl_->TellOfCreation(**job, status, Impl::Clock::now() - began);
  std::vector<Done<std::shared_ptr<Job>>> waiting;
  const bool takes_place = !(*job)->derivation().uid.empty();
  {
    // The list is taken in the section that makes the job ready or removes it: a later call must
    // not put itself on a list that nobody reads any more.
    MutexLock lock(impl_->mutex);
    std::map<std::string, Impl::Entry>& entries = takes_place ? impl_->successors : impl_->jobs;
    const auto entry = entries.find(name);
    waiting.swap(entry->second.waiting);
    if (status.ok()) status = impl_->OriginOf(**job).status();  // Which may have been closed.
    entry->second.ready = status.ok();
    if (!status.ok()) entries.erase(entry);
  }
  waiting.push_back(std::move(done));
  auto tell = [job = *job, waiting = std::move(waiting)](const absl::Status& created) mutable {
    // Without the lock, since a Done may call the engine.
    for (auto& each : waiting) {
      std::move(each)(created.ok() ? absl::StatusOr<std::shared_ptr<Job>>(job) : created);
    }
  };
  // One without new parameters has all that it needs.
  if (status.ok() && takes_place && (*job)->has_all_first_weights()) {
    return impl_->TakePlace(*job, std::move(tell));
  }
  std::move(tell)(status);
}

absl::StatusOr<std::shared_ptr<Job>> Engine::CreateJob(JobSpec spec, Derivation derivation) {
  return Await<std::shared_ptr<Job>>([&](Done<std::shared_ptr<Job>> done) {
    CreateJob(std::move(spec), std::move(derivation), std::move(done));
  });
}

Engine::TakenOver Engine::TakeOverJobs() {
  TakenOver taken;
  NamedMemory* const memory = impl_->environment.named_memory;
  if (memory == nullptr) return taken;
  std::set<std::string> uids;
  std::map<std::string, std::string> stories;  // By name.
  for (const std::string& name : memory->Left()) {
    // Other names are of other things that outlive the process: sockets that are listened on, for
    // example.
    const size_t slash = name.find('/');
    if (slash == kJobUidCharacters) uids.insert(name.substr(0, slash));
  }
  for (const std::string& uid : uids) {
    std::string story;
    absl::StatusOr<std::shared_ptr<JobImpl>> job = absl::UnknownError("");
    {
      // An attempt that fails destroys its mappings, which would drop the memory. Where only room
      // is missing the memory must stay, for another process.
      const NamedMemory::PutsBack puts_back(*memory, absl::StrCat(uid, "/"));
      job = JobImpl::TakeOver(uid, impl_->environment, story);
    }
    if (absl::IsResourceExhausted(job.status())) {
      // The end of the loop, which forgets what is left of the job, is passed over.
      taken.left.emplace_back(job.status().message());
      continue;
    }
    MutexLock lock(impl_->mutex);
    impl_->past.SetTakenOver();
    if (job.ok()) {
      const std::string name = (*job)->spec().name;
      const auto [entry, is_new] = impl_->jobs.try_emplace(name);
      if (is_new) {
        entry->second.job = *std::move(job);
        entry->second.ready = true;
        stories[name] = story;
      } else if (const Job& other = *entry->second.job; other.derivation().uid == uid) {
        Impl::CloseQuietly(*job);  // Its end had begun: the other one has taken its place.
      } else if ((*job)->derivation().uid == other.uid()) {
        Impl::CloseQuietly(std::exchange(entry->second.job, *std::move(job)));
        stories[name] = story;
      } else {
        // Nothing says which is newer: uids are random, and each job has generations of its own.
        const Job& kept = *entry->second.job;
        taken.lost.push_back(absl::StrCat(
            "two kept jobs are named ", name, "; the one at step ", kept.Position().committed_step,
            " (uid ", kept.uid(), ") goes on; the one at step ", (*job)->Position().committed_step,
            " (uid ", uid, ") is lost", impl_->LastCheckpointOf(uid)));
        impl_->past.AddLost(uid);
      }
    } else if (!absl::IsNotFound(job.status())) {
      taken.lost.push_back(
          absl::StrCat(job.status().message(), " (uid ", uid, ")", impl_->LastCheckpointOf(uid)));
      impl_->past.AddLost(uid);
    }
    // Of a job that was never whole, or whose end had begun; or of what this version does not use.
    for (const std::string& name : memory->Left()) {
      if (name.substr(0, uid.size() + 1) == absl::StrCat(uid, "/")) memory->Forget(name);
    }
  }
  for (const auto& [name, story] : stories) taken.back.push_back(story);
  return taken;
}

absl::StatusOr<std::shared_ptr<Job>> Engine::FindJob(const std::string& name,
                                                     absl::string_view uid) const {
  if (impl_->restarting.load()) return RestartingError();
  MutexLock lock(impl_->mutex);
  const auto successor = impl_->successors.find(name);
  if (!uid.empty() && successor != impl_->successors.end() && successor->second.ready &&
      successor->second.job->uid() == uid) {
    return successor->second.job;
  }
  const auto found = impl_->jobs.find(name);
  if (found == impl_->jobs.end()) {
    return WithReason(
        absl::NotFoundError(absl::StrCat("there is no job ", name, impl_->WhatBecameOf(name, uid))),
        reason::kNoSuchJob);
  }
  if (!found->second.ready) {
    return WithReason(absl::UnavailableError(absl::StrCat(
                          "job ", name, " is being created; try again when it has its memory")),
                      reason::kJobBeingCreated);
  }
  const std::shared_ptr<JobImpl>& job = found->second.job;
  // A job that was closed and created again has the same name, and none of the state that the
  // caller knows of.
  if (!uid.empty() && job->uid() != uid) return impl_->OtherJob(*job, uid);
  return job;
}

absl::StatusOr<std::shared_ptr<Job>> Engine::FindDerived(const std::string& name,
                                                         absl::string_view from_uid) const {
  if (impl_->restarting.load()) return RestartingError();
  MutexLock lock(impl_->mutex);
  for (const auto* entries : {&impl_->successors, &impl_->jobs}) {
    const auto found = entries->find(name);
    if (found == entries->end() || found->second.job->derivation().uid != from_uid) continue;
    if (found->second.ready) return found->second.job;
    return BeingDerived(name);
  }
  return WithReason(absl::NotFoundError(absl::StrCat(
                        "no job ", name, " is derived from the one with uid ", from_uid)),
                    reason::kNoSuchJob);
}

std::vector<std::shared_ptr<Job>> Engine::ListJobs() const {
  std::vector<std::shared_ptr<Job>> jobs;
  MutexLock lock(impl_->mutex);
  for (const auto& [name, entry] : impl_->jobs) {
    if (entry.ready) jobs.push_back(entry.job);
  }
  return jobs;
}

std::vector<std::shared_ptr<const Job>> Engine::JobsBeingCreated() const {
  std::vector<std::shared_ptr<const Job>> jobs;
  MutexLock lock(impl_->mutex);
  for (const auto& [name, entry] : impl_->jobs) {
    if (!entry.ready) jobs.push_back(entry.job);
  }
  return jobs;
}

std::vector<Activity> Engine::ListActivities() const { return impl_->activities.List(); }

Pending Engine::CloseJob(const std::string& name, Done<bool> done) {
  absl::StatusOr<std::shared_ptr<Job>> job = FindJob(name);
  if (!job.ok()) {
    std::move(done)(job.status());
    return {};
  }
  return CloseJob(*std::move(job), std::move(done));
}

Pending Engine::CloseJob(std::shared_ptr<Job> job, Done<bool> done, bool here) {
  return Close(std::move(job), std::nullopt, here, std::move(done));
}

Pending Engine::CloseUnusedJob(std::shared_ptr<Job> job, const Job::Use& unused, Done<bool> done) {
  return Close(std::move(job), unused, /*here=*/false, std::move(done));
}

Pending Engine::Close(std::shared_ptr<Job> job, std::optional<Job::Use> unused, bool here,
                      Done<bool> done) {
  auto& closing = static_cast<JobImpl&>(*job);
  // A caller that goes is told so, and the job is closed all the same.
  const auto caller = std::make_shared<Impl::Caller>(std::move(done));
  auto pending = std::make_shared<Pending>(closing.Close(
      unused, here, [this, job = std::move(job), caller](absl::StatusOr<bool> closed) mutable {
        std::shared_ptr<JobImpl> successor;
        if (closed.ok()) {
          MutexLock lock(impl_->mutex);
          const auto found = impl_->jobs.find(job->spec().name);
          // Two calls may close one job. When the second one's turn comes, the name may be another
          // job's.
          if (found != impl_->jobs.end() && found->second.job == job) {
            impl_->jobs.erase(found);
            impl_->past.AddEnded(*job, kWasClosed);
            successor = impl_->TakeSuccessor(job->spec().name, kWasClosed);
          }
        }
        Impl::CloseQuietly(successor);
        successor.reset();
        if (closed.ok()) impl_->HangUp(static_cast<const JobImpl&>(*job));
        job.reset();  // Its memory is free when the caller is told, unless a reader has it.
        caller->Tell(std::move(closed));
      }));
  return Pending([pending, caller] {
    pending->Cancel();
    caller->Tell(absl::CancelledError("the caller does not wait any longer"));
  });
}

absl::Status Engine::CloseJob(const std::string& name) {
  return Await<bool>([&](Done<bool> done) { CloseJob(name, std::move(done)); }).status();
}

bool Engine::Drain(double seconds) {
  impl_->draining.store(true);
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                            std::chrono::duration<double>(seconds));
  for (;;) {
    // This has to ask again and again, because no job tells the engine of its commits.
    bool between_steps = true;
    bool waits = false;
    for (const std::shared_ptr<Job>& job : ListJobs()) {
      const auto& draining = static_cast<const JobImpl&>(*job);
      if (draining.IsBetweenSteps()) continue;
      between_steps = false;
      // A step that no rank is there to finish would use up the time for nothing.
      if (!draining.IsAbandoned()) waits = true;
    }
    if (!waits || std::chrono::steady_clock::now() >= deadline) return between_steps;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void Engine::SayFarewell() {
  impl_->restarting.store(true);
  for (const std::shared_ptr<JobImpl>& job : impl_->AllJobs()) job->TellStreams(RestartingError());
}

void Engine::EndDrain() { impl_->draining.store(false); }

Pending Engine::LookForCheckpoints(LookRequest request, Done<std::vector<FoundCheckpoint>> done) {
  return impl_->checkpoint_calls.Look(std::move(request), std::move(done));
}

Pending Engine::DeleteCheckpoints(DeleteRequest request, Done<std::vector<FoundCheckpoint>> done) {
  return impl_->checkpoint_calls.Delete(
      std::move(request), [this] { return ListJobs(); }, std::move(done));
}

absl::StatusOr<MemoryBudget::Reservation> Engine::Reserve(int64_t bytes, absl::string_view what) {
  return impl_->budget.Reserve(bytes, what);
}

const std::string& Engine::instance_id() const { return impl_->instance_id; }
const MemoryBudget& Engine::memory() const { return impl_->budget; }

const TaskPool& Engine::tasks() const { return impl_->tasks; }
const CheckpointDirectory* Engine::checkpoints() const { return impl_->environment.checkpoints; }
NamedMemory* Engine::named_memory() const { return impl_->environment.named_memory; }

}  // namespace ballast
