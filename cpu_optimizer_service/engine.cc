#include "cpu_optimizer_service/engine.h"

#include <atomic>
#include <chrono>
#include <map>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {
namespace {

// Saves and loads at once, of all jobs; further ones queue. A disk that hangs holds up these
// threads only.
constexpr size_t kDiskThreads = 4;

std::string MakeInstanceId() {
  std::random_device random;
  return absl::StrFormat("%08x%08x", random(), random());
}

}  // namespace

struct Engine::Impl {
  explicit Impl(const EngineOptions& options)
      : budget(options.memory_limit_bytes),
        own_arenas(MakeAnonymousArenaFactory(&tasks, options.warn)),
        tasks(options.threads),
        environment{.budget = &budget,
                    .tasks = &tasks,
                    .disk_threads = &disk_threads,
                    .arenas = options.arenas != nullptr ? options.arenas : own_arenas.get(),
                    .file_system =
                        options.file_system != nullptr ? options.file_system : &PosixFileSystem(),
                    .draining = &draining} {}

  const std::string instance_id = MakeInstanceId();
  MemoryBudget budget;
  // Ends after the last task, which may still ask for memory, and until then only keeps the address
  // of `tasks`.
  std::unique_ptr<ArenaFactory> own_arenas;
  std::atomic<bool> draining = false;
  TaskPool tasks;
  HelperThreads disk_threads{kDiskThreads};
  const JobEnvironment environment;
  mutable Mutex mutex;
  // Null while the job is being created.
  std::map<std::string, std::shared_ptr<JobImpl>> jobs ABSL_GUARDED_BY(mutex);
};

Engine::Engine(const EngineOptions& options) : impl_(std::make_unique<Impl>(options)) {}

Engine::~Engine() {
  for (const std::shared_ptr<Job>& job : ListJobs()) CloseJob(job->spec().name).IgnoreError();
}

absl::StatusOr<std::shared_ptr<Job>> Engine::CreateJob(JobSpec spec) {
  if (impl_->draining.load()) {
    return WithReason(absl::UnavailableError("the service is stopping and takes no new jobs"),
                      reason::kStopping);
  }
  const std::string name = spec.name;
  {
    MutexLock lock(impl_->mutex);
    if (!impl_->jobs.emplace(name, nullptr).second) {
      return absl::AlreadyExistsError(
          absl::StrCat("job ", name, " exists; attach to it, close it, or choose another name"));
    }
  }
  absl::StatusOr<std::shared_ptr<JobImpl>> job =
      JobImpl::Create({.uid = MakeJobUid(), .spec = std::move(spec)}, impl_->environment);
  MutexLock lock(impl_->mutex);
  if (!job.ok()) {
    impl_->jobs.erase(name);
    return job.status();
  }
  impl_->jobs[name] = *job;
  return *job;
}

absl::StatusOr<std::shared_ptr<Job>> Engine::FindJob(const std::string& name) const {
  MutexLock lock(impl_->mutex);
  const auto found = impl_->jobs.find(name);
  if (found == impl_->jobs.end() || found->second == nullptr) {
    return WithReason(absl::NotFoundError(absl::StrCat("there is no job ", name)),
                      reason::kNoSuchJob);
  }
  return found->second;
}

std::vector<std::shared_ptr<Job>> Engine::ListJobs() const {
  std::vector<std::shared_ptr<Job>> jobs;
  MutexLock lock(impl_->mutex);
  for (const auto& [name, job] : impl_->jobs) {
    if (job != nullptr) jobs.push_back(job);
  }
  return jobs;
}

Pending Engine::CloseJob(const std::string& name, Done<bool> done) {
  absl::StatusOr<std::shared_ptr<Job>> job = FindJob(name);
  if (!job.ok()) {
    std::move(done)(job.status());
    return {};
  }
  auto& closing = static_cast<JobImpl&>(**job);
  return closing.Close([this, name, job = *std::move(job),
                        done = std::move(done)](absl::StatusOr<bool> closed) mutable {
    if (closed.ok()) {
      MutexLock lock(impl_->mutex);
      const auto found = impl_->jobs.find(name);
      if (found != impl_->jobs.end() && found->second == job) impl_->jobs.erase(found);
    }
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
  const auto all_between_steps = [&] {
    for (const std::shared_ptr<Job>& job : ListJobs()) {
      if (!static_cast<const JobImpl&>(*job).IsBetweenSteps()) return false;
    }
    return true;
  };
  while (!all_between_steps()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

const std::string& Engine::instance_id() const { return impl_->instance_id; }
const MemoryBudget& Engine::memory() const { return impl_->budget; }

}  // namespace ballast
