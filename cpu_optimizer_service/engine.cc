#include "cpu_optimizer_service/engine.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <new>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/memory_guard.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/common/text/amounts.h"
#include "cpu_optimizer_service/common/text/checkpoint_name.h"
#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {
namespace {

// Saves and loads at once, and planes that are saved at once beside steps; further ones queue. A
// disk that hangs holds up these threads only.
constexpr size_t kDiskThreads = 16;

constexpr char kWasClosed[] = "; it was closed";
constexpr char kOvertaken[] =
    "; the one that it was to be derived from has gone on since: derive it again";

// Looks at checkpoints at once. Each has one of kDiskThreads for as long as its disk takes, or
// hangs. The others stay for loads, and for saves that hold back steps.
constexpr int kMostLooks = 4;

absl::Status OutOfMemory(const std::string& job) {
  return absl::ResourceExhaustedError(
      absl::StrCat("the system has no memory for the tables of job ", job,
                   "; see the limits of the service's process (ulimit -v)"));
}

absl::Status RestartingError() {
  return WithReason(
      absl::UnavailableError("the service's process ends as planned; the next one goes on "
                             "with its jobs"),
      reason::kRestarting);
}

absl::Status BeingDerived(const std::string& name) {
  return WithReason(
      absl::UnavailableError(absl::StrCat("job ", name, " is being derived; try again")),
      reason::kJobBeingCreated);
}

std::string MakeInstanceId() {
  std::random_device random;
  return absl::StrCat(absl::Hex(random(), absl::kZeroPad8), absl::Hex(random(), absl::kZeroPad8));
}

}  // namespace

struct Engine::Impl {
  explicit Impl(const EngineOptions& options)
      : goes_on(options.goes_on),
        budget(options.memory_limit_bytes),
        own_arenas(MakeAnonymousArenaFactory(&tasks, options.warn)),
        tasks(options.threads),
        environment{
            .budget = &budget,
            .tasks = &tasks,
            .disk_threads = &disk_threads,
            .saving_threads = &saving_threads,
            .writing_threads = &writing_threads,
            .arenas = options.arenas != nullptr ? options.arenas : own_arenas.get(),
            .file_system =
                options.file_system != nullptr ? options.file_system : &PosixFileSystem(),
            .checkpoints = options.checkpoints,
            .checkpoint_uses = &checkpoint_uses,
            .draining = &draining,
            .warn = options.warn,
            .tell = options.tell,
            .activities = &activities,
            .named_memory = options.named_memory,
            .take_place =
                [this](std::shared_ptr<JobImpl> derived) {
                  TakePlace(std::move(derived), [](const absl::Status&) {});
                },
            .moved =
                [this](const std::shared_ptr<JobImpl>& origin) { GiveUpSuccessorOf(*origin); }} {
    if (options.named_memory != nullptr) options.named_memory->UseTasks(&tasks);
  }
  ~Impl() {
    // It outlives the tasks.
    if (environment.named_memory != nullptr) environment.named_memory->UseTasks(nullptr);
  }

  // For the message that there is no such job.
  std::string WhatBecameOf(const std::string& name, absl::string_view uid) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::string text;
    const auto end = std::find_if(ended.begin(), ended.end(), [&](const Ended& one) {
      return absl::string_view(one.uid.data(), one.uid.size()) == uid;
    });
    if (end != ended.end()) {
      text = end->how;
    } else if (!uid.empty() && lost.count(std::string(uid)) > 0) {
      text = "; it was lost when the service's process ended: see the service's log";
    } else if (!uid.empty() && !goes_on && !has_taken_over) {
      // Its caller has had the job, and this process has not.
      const auto age = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - began);
      text = absl::StrCat("; this service began ",
                          age.count() == 0
                              ? "just now"
                              : absl::StrCat(absl::FormatDuration(absl::FromChrono(age)), " ago"),
                          ", and what an earlier one had not saved is lost");
    }
    if (environment.checkpoints == nullptr) return text;
    const std::optional<CheckpointFacts> saved = environment.checkpoints->Find(name);
    if (!saved.has_value()) return text;
    return absl::StrCat(text, "; saved was step ", saved->step, ", in ", saved->directory, ": ",
                        HowToResume(name));
  }

  // "; go on from ...", of the job with that uid.
  std::string LastCheckpointOf(const std::string& uid) const {
    if (environment.checkpoints != nullptr) return environment.checkpoints->LastOf(uid);
    return "; go on from a checkpoint";
  }

  std::atomic<int> looks = 0;  // Under way.
  using FoundOrNot = absl::StatusOr<std::vector<FoundCheckpoint>>;
  FoundOrNot Look(const LookRequest& request) const;
  // Without those that have been deleted meanwhile.
  FoundOrNot Verify(std::vector<FoundCheckpoint> found, const std::function<bool()>& wanted);
  FoundOrNot Delete(const DeleteRequest& request, absl::Span<const std::shared_ptr<Job>> jobs);
  // `work` on a disk thread, unless kMostLooks have one. It is asked whether it is still `wanted`.
  Pending OnDisk(std::function<FoundOrNot(const std::function<bool()>& wanted)> work,
                 Done<std::vector<FoundCheckpoint>> done);

  using Clock = std::chrono::steady_clock;
  const Clock::time_point began = Clock::now();
  const bool goes_on;
  const std::string instance_id = MakeInstanceId();
  Activities activities;
  CheckpointUses checkpoint_uses;
  MemoryBudget budget;
  // Ends after the last task, which may still ask for memory, and until then only keeps the address
  // of `tasks`.
  std::unique_ptr<ArenaFactory> own_arenas;
  std::atomic<bool> draining = false;
  std::atomic<bool> restarting = false;
  TaskPool tasks;
  // They end in the reverse of this order. A saving thread waits for parts that writing threads
  // write, and would wait for ever if those ended first. What runs on all three may still start
  // tasks.
  HelperThreads writing_threads{kDiskThreads, HelperThreads::Priority::kLowest};
  HelperThreads saving_threads{kDiskThreads};
  HelperThreads disk_threads{kDiskThreads};
  const JobEnvironment environment;
  struct Entry {
    std::shared_ptr<JobImpl> job;
    bool ready = false;  // It has its memory.
    // Of a successor: its origin gives way, or not. Until then it is nobody else's to give up.
    bool takes_place = false;
    // Until then: who else wants it.
    std::vector<Done<std::shared_ptr<Job>>> waiting;
  };
  // Enters a job that is not ready, or says why not. One of the same description that is being
  // created takes `done` to tell it.
  enum class Entered : uint8_t { kIsNew, kWaits };
  absl::StatusOr<Entered> Enter(const std::shared_ptr<JobImpl>& job,
                                Done<std::shared_ptr<Job>>& done);
  static bool IsSame(const JobImpl& one, const JobImpl& other) {
    return one.derivation() == other.derivation() &&
           FirstDifference(one.spec(), other.spec()).empty();
  }
  absl::Status OtherJob(const Job& job, absl::string_view uid) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // The job of which `job` is to take the place; null: of none.
  absl::StatusOr<std::shared_ptr<JobImpl>> OriginOf(const JobImpl& job) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // A job that has all its first weights takes its origin's place, or is closed.
  void TakePlace(std::shared_ptr<JobImpl> derived,
                 absl::AnyInvocable<void(const absl::Status&)> done);
  // A derived job comes to nothing. The caller closes it.
  std::shared_ptr<JobImpl> TakeSuccessor(const std::string& name, const char* how)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  static void CloseQuietly(const std::shared_ptr<JobImpl>& job) {
    if (job != nullptr) job->Close(std::nullopt, [](const absl::StatusOr<bool>&) {});
  }
  // The job has gone on without it.
  void GiveUpSuccessorOf(const JobImpl& origin);
  // All that are ready.
  std::vector<std::shared_ptr<JobImpl>> AllJobs() const;
  // Its caller may have gone, so the log says it, too.
  void TellOfCreation(const Job& job, const absl::Status& status, Clock::duration took) const;

  mutable Mutex mutex;
  std::map<std::string, Entry> jobs ABSL_GUARDED_BY(mutex);
  // Those that are to take the place of the job of the same name, which is ready.
  std::map<std::string, Entry> successors ABSL_GUARDED_BY(mutex);
  // Uids, for WhatBecameOf: of jobs that an earlier process had, and of the last that have ended.
  bool has_taken_over ABSL_GUARDED_BY(mutex) = false;
  std::set<std::string> lost ABSL_GUARDED_BY(mutex);
  struct Ended {
    std::array<char, kJobUidCharacters> uid = {};
    const char* how = "";
  };
  std::array<Ended, 64> ended ABSL_GUARDED_BY(mutex) = {};
  uint64_t ends ABSL_GUARDED_BY(mutex) = 0;
  void NoteEnd(const Job& job, const char* how) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Ended& end = ended[ends++ % ended.size()];
    job.uid().copy(end.uid.data(), end.uid.size());
    end.how = how;
  }
};

Engine::Engine(const EngineOptions& options) : impl_(std::make_unique<Impl>(options)) {
  (void)OutOfMemoryError();  // Made while there is memory for it.
}

Engine::~Engine() {
  for (const std::shared_ptr<Job>& job : ListJobs()) CloseJob(job->spec().name).IgnoreError();
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
                                                         " jobs, as many as it takes; close one"));
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
  NoteEnd(*job, how);
  return job;
}

void Engine::Impl::GiveUpSuccessorOf(const JobImpl& origin) {
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
        NoteEnd(*origin, "; a job that was derived from it has taken its place");
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
  (void)RunsInMemory([&] {
    if (!status.ok()) {
      return environment.tell(
          {.job = spec.name, .text = absl::StrCat("not created: ", status.message())});
    }
    int64_t elements = 0;
    for (const Chunk& chunk : job.layout().chunks()) elements += chunk.elements;
    environment.tell(
        {.job = spec.name,
         .text = absl::StrCat(
             "created for ", Counted(spec.layout.world_size, "rank"), ": ",
             Counted(static_cast<int64_t>(spec.layout.parameters.size()), "parameter"), ", ",
             Counted(elements, "trainable element"), ", ",
             FormatBytes(job.Status().memory.total_bytes()), ", in ",
             std::round(10 * std::chrono::duration<double>(took).count()) / 10, " s")});
  });
}

void Engine::CreateJob(JobSpec spec, Derivation derivation, Done<std::shared_ptr<Job>> done) {
  if (impl_->draining.load()) {
    return std::move(done)(
        WithReason(absl::UnavailableError("the service is stopping and takes no new jobs"),
                   reason::kStopping));
  }
  const std::string name = spec.name;
  auto job = [&]() -> absl::StatusOr<std::shared_ptr<JobImpl>> {
    try {
      return JobImpl::Describe(
          {.uid = MakeJobUid(), .spec = std::move(spec), .derivation = std::move(derivation)},
          impl_->environment);
    } catch (const std::bad_alloc&) {
      return OutOfMemory(name);
    }
  }();
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
    try {
      std::shared_ptr<JobImpl> origin;
      {
        MutexLock lock(impl_->mutex);
        BALLAST_ASSIGN_OR_RETURN(origin, impl_->OriginOf(**job));
      }
      return (*job)->Allocate(origin.get());
    } catch (const std::bad_alloc&) {
      return OutOfMemory(name);
    }
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
      job = OrOutOfMemory([&] { return JobImpl::TakeOver(uid, impl_->environment, story); });
    }
    if (absl::IsResourceExhausted(job.status())) {
      // The end of the loop, which forgets what is left of the job, is passed over.
      taken.left.emplace_back(job.status().message());
      continue;
    }
    MutexLock lock(impl_->mutex);
    impl_->has_taken_over = true;
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
        taken.lost.push_back(absl::StrCat("there are two jobs ", name, ", and the one at step ",
                                          (*job)->Position().committed_step, " (uid ", uid,
                                          ") is not taken over; the other one, at step ",
                                          kept.Position().committed_step, " (uid ", kept.uid(),
                                          "), is", impl_->LastCheckpointOf(uid)));
        impl_->lost.insert(uid);
      }
    } else if (!absl::IsNotFound(job.status())) {
      taken.lost.push_back(
          absl::StrCat(job.status().message(), " (uid ", uid, ")", impl_->LastCheckpointOf(uid)));
      impl_->lost.insert(uid);
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

Pending Engine::CloseJob(std::shared_ptr<Job> job, Done<bool> done) {
  return Close(std::move(job), std::nullopt, std::move(done));
}

Pending Engine::CloseUnusedJob(std::shared_ptr<Job> job, const Job::Use& unused, Done<bool> done) {
  return Close(std::move(job), unused, std::move(done));
}

Pending Engine::Close(std::shared_ptr<Job> job, std::optional<Job::Use> unused, Done<bool> done) {
  auto& closing = static_cast<JobImpl&>(*job);
  return closing.Close(unused, [this, job = std::move(job),
                                done = std::move(done)](absl::StatusOr<bool> closed) mutable {
    std::shared_ptr<JobImpl> successor;
    if (closed.ok()) {
      MutexLock lock(impl_->mutex);
      const auto found = impl_->jobs.find(job->spec().name);
      // Two calls may close one job. When the second one's turn comes, the name may be another
      // job's.
      if (found != impl_->jobs.end() && found->second.job == job) {
        impl_->jobs.erase(found);
        impl_->NoteEnd(*job, kWasClosed);
        successor = impl_->TakeSuccessor(job->spec().name, kWasClosed);
      }
    }
    Impl::CloseQuietly(successor);
    successor.reset();
    job.reset();  // Its memory is free when the caller is told, unless a reader has it.
    std::move(done)(std::move(closed));
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

Engine::Impl::FoundOrNot Engine::Impl::Look(const LookRequest& request) const {
  FileSystem& files = *environment.file_system;
  if (!request.path.empty()) return FindCheckpoints(files, request.path);
  if (environment.checkpoints == nullptr) {
    return absl::FailedPreconditionError(
        "the service has no --checkpoint-dir; start ballastd with one, or give an absolute path on "
        "its host");
  }
  std::vector<FoundCheckpoint> all;
  BALLAST_ASSIGN_OR_RETURN(std::vector<std::string> names,
                           files.List(environment.checkpoints->path()));
  // from_folder relies on this order: the next call goes on where this one stops.
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    if (!IsJobName(name) || name < request.from_folder) continue;
    if (request.wanted != nullptr && !request.wanted(name)) continue;
    absl::StatusOr<std::vector<FoundCheckpoint>> found =
        ListCheckpoints(files, environment.checkpoints->PathOf(name));
    if (!found.ok()) continue;  // A file, say, or one that is gone by now.
    all.insert(all.end(), found->begin(), found->end());
    if (all.size() >= request.enough) break;
  }
  return all;
}

namespace {

// One that waits for the disk, until it is answered.
class DiskCall {
 public:
  explicit DiskCall(Done<std::vector<FoundCheckpoint>> done) : done_(std::move(done)) {}
  bool answered() const { return answered_; }
  void Answer(absl::StatusOr<std::vector<FoundCheckpoint>> found) {
    // The disk thread and a Cancel may both come to this; the Done is called by the first.
    if (!answered_.exchange(true)) std::move(done_)(std::move(found));
  }

 private:
  std::atomic<bool> answered_ = false;
  Done<std::vector<FoundCheckpoint>> done_;
};

}  // namespace

Engine::Impl::FoundOrNot Engine::Impl::Verify(std::vector<FoundCheckpoint> found,
                                              const std::function<bool()>& wanted) {
  FileSystem& files = *environment.file_system;
  std::vector<FoundCheckpoint> verified;
  for (FoundCheckpoint& each : found) {
    if (!wanted()) return absl::CancelledError("the caller is gone");
    if (each.problem.ok()) {
      const std::string& directory = each.facts.directory;
      const CheckpointUses::Use use = checkpoint_uses.Read(directory);
      if (use == nullptr || !files.Exists(IndexPath(directory))) continue;
      each.problem = OrOutOfMemory(
          [&] { return Checkpoint::Open(files, directory, kMostForeignIndexBytes).status(); });
    }
    verified.push_back(std::move(each));
  }
  return verified;
}

Engine::Impl::FoundOrNot Engine::Impl::Delete(const DeleteRequest& request,
                                              absl::Span<const std::shared_ptr<Job>> jobs) {
  const std::filesystem::path path(request.path);
  const std::string folder = path.parent_path().string();
  const std::optional<uint64_t> step = StepNamed(path.filename().string());
  // Before the checkpoints are looked for: one whose save has ended since is found then.
  for (const std::shared_ptr<Job>& job : jobs) {
    if (!step.has_value() || (!request.uid.empty() && job->uid() != request.uid)) continue;
    for (const SaveProgress& save : job->Status().saves) {
      if (save.step != *step || save.directory != folder) continue;
      return absl::FailedPreconditionError(
          absl::StrCat(request.path, " is in use: job ", job->spec().name,
                       " is being saved there at this step; delete it when that has ended "
                       "(ballast job ",
                       job->spec().name, " shows it)"));
    }
  }
  FoundOrNot deleted = ballast::DeleteCheckpoints(*environment.file_system, checkpoint_uses,
                                                  request.path, request.uid);
  if (environment.checkpoints != nullptr) {
    environment.checkpoints->ForgetMissing(*environment.file_system, folder);
  }
  if (!deleted.ok() || !environment.tell) return deleted;
  for (const FoundCheckpoint& each : *deleted) {
    environment.tell({.job = path.parent_path().filename().string(),
                      .text = absl::StrCat("deleted step ", each.facts.step, " in ",
                                           each.facts.directory, ", as a call asked")});
  }
  return deleted;
}

Pending Engine::Impl::OnDisk(std::function<FoundOrNot(const std::function<bool()>& wanted)> work,
                             Done<std::vector<FoundCheckpoint>> done) {
  // The threads are for saves first of all.
  // Counted first and compared then, so that two calls cannot both take the last place.
  if (looks.fetch_add(1) >= kMostLooks) {
    --looks;
    std::move(done)(absl::ResourceExhaustedError(
        absl::StrCat(kMostLooks,
                     " calls list, verify or delete checkpoints already; try again "
                     "when one has ended")));
    return {};
  }
  std::shared_ptr<DiskCall> call;
  try {
    call = std::make_shared<DiskCall>(std::move(done));
    disk_threads.Run([this, work = std::move(work), call] {
      FoundOrNot found = OrOutOfMemory([&]() -> FoundOrNot {
        if (call->answered()) return absl::CancelledError("the caller is gone");
        return work([&] { return !call->answered(); });
      });
      // Here, and not where the call is cancelled: until now it has had a thread.
      --looks;
      call->Answer(std::move(found));
    });
  } catch (...) {
    --looks;  // Without memory to begin it has no thread, and takes no other look's place.
    throw;
  }
  return Pending([call] { call->Answer(absl::CancelledError("the caller is gone")); });
}

Pending Engine::LookForCheckpoints(LookRequest request, Done<std::vector<FoundCheckpoint>> done) {
  const auto progress = request.verified
                            ? impl_->activities.Begin({.kind = ActivityKind::kVerifyingCheckpoint,
                                                       .job = request.job,
                                                       .directory = request.path})
                            : std::make_shared<Progress>();
  return impl_->OnDisk(
      [impl = impl_.get(), request = std::move(request),
       progress](const std::function<bool()>& wanted) -> Impl::FoundOrNot {
        BALLAST_ASSIGN_OR_RETURN(std::vector<FoundCheckpoint> found, impl->Look(request));
        if (!request.verified) return found;
        if (found.size() > kMostVerified) {
          return absl::FailedPreconditionError(absl::StrCat(
              request.path, " has ", found.size(), " checkpoints, of which ", kMostVerified,
              " are verified at once; verify them by step: ", request.path, "/step-STEP"));
        }
        const CountsIn here(*progress);
        return impl->Verify(std::move(found), wanted);
      },
      std::move(done));
}

Pending Engine::DeleteCheckpoints(DeleteRequest request, Done<std::vector<FoundCheckpoint>> done) {
  return impl_->OnDisk(
      [this, request = std::move(request)](const std::function<bool()>&) {
        return impl_->Delete(request, ListJobs());
      },
      std::move(done));
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
