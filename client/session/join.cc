#include "client/session/join.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/session/log.h"
#include "client/session/retry.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/activity.h"
#include "proto/convert.h"

namespace ballast::client {

const std::string& DefaultProcessId() {
  static const std::string id = [] {
    char host[256] = "unknown-host";
    // One byte less than there is: a name that is cut may come without a zero at its end.
    gethostname(host, sizeof(host) - 1);
    std::random_device random;
    const uint64_t bits = (uint64_t{random()} << 32) | random();
    return absl::StrCat(host, ":", getpid(), ":", absl::Hex(bits, absl::kZeroPad16));
  }();
  return id;
}

absl::Duration TimeForMemory(const JobSpec& job) {
  // 16 bytes each, at a quarter of a GiB a second: a slow machine that does something else, too.
  constexpr double kElementsPerSecond = 16 << 20;
  // As long as the longest limit of a call (client/transport/grpc_transport.cc).
  constexpr double kMostSeconds = 3600;
  // In double: the shapes may not have been checked yet, and integers could overflow.
  double elements = 0;
  for (const ParameterSpec& parameter : job.layout.parameters) {
    double product = 1;
    for (const int64_t size : parameter.shape) product *= static_cast<double>(size);
    elements += std::max(product, 0.0);
  }
  return absl::Seconds(static_cast<int64_t>(std::min(elements / kElementsPerSecond, kMostSeconds)));
}

namespace {

// So long a call that creates a job is waited for, before a look at how far the service is.
constexpr absl::Duration kFirstLook = absl::Seconds(5);
constexpr absl::Duration kLookEvery = absl::Seconds(1);
constexpr absl::Duration kLineEvery = absl::Seconds(10);

// Of an earlier job of the same name. A session that takes no steps may be about to load it.
void WarnOfCheckpoint(const v1::Job& job, const SessionOptions& options) {
  const v1::SavedCheckpoint& found = job.found_checkpoint();
  if (!job.has_found_checkpoint() || job.phase() != v1::AWAITING_WEIGHTS) return;
  if (!options.takes_steps || !options.derive_from_checkpoint.empty()) return;
  Log().warn(
      "job {} begins again; the service has a checkpoint of an earlier one at step {}, in {}, "
      "which `ballast load {} {}` loads",
      options.job.name, found.step(), found.directory(), options.job.name, options.job.name);
}

// Waits while the service makes the job's memory.
class CreationWatch {
 public:
  CreationWatch(Transport& transport, Clock& clock, const SessionOptions& options,
                absl::Time& deadline)
      : transport_(transport), clock_(clock), options_(options), deadline_(deadline) {}

  // Until that has ended, well or not; or its last sign of life is longer ago than the session
  // waits, or nothing is known of it: DEADLINE_EXCEEDED and the error of the look.
  absl::Status Await() {
    v1::GetJobRequest request;
    request.set_name(proto::JobName(options_.job.name));
    for (;;) {
      const absl::StatusOr<v1::Job> job = transport_.GetJob(request);
      if (absl::IsNotFound(job.status())) return absl::OkStatus();
      BALLAST_RETURN_IF_ERROR(job.status());
      if (job->phase() != v1::CREATING) return absl::OkStatus();
      const absl::Time now = clock_.Now();
      std::optional<Activity> making;
      for (const v1::Activity& each : job->activities()) {
        if (each.kind() != v1::MAKING_MEMORY) continue;
        making = proto::FromProto(each);
        // From its last sign of life there is as much time as from the beginning.
        deadline_ = std::max(
            deadline_, now - absl::Seconds(making->seconds_since_progress) + options_.join_timeout);
      }
      const std::string doing = making.has_value() ? ToLine(*making)
                                : job->waits_for().empty()
                                    ? "creating the job"
                                    : absl::StrCat("creating the job: ", job->waits_for());
      if (now >= deadline_) {
        return absl::DeadlineExceededError(absl::StrCat("the service is ", doing, "; see its log"));
      }
      if (now - told_ >= kLineEvery) {
        Log().info("job {}: the service is {}", options_.job.name, doing);
        told_ = now;
      }
      clock_.SleepFor(kLookEvery);
      // Another call gets the result.
      if (!making.has_value()) return absl::OkStatus();
    }
  }

 private:
  Transport& transport_;
  Clock& clock_;
  const SessionOptions& options_;
  absl::Time& deadline_;
  absl::Time told_ = absl::InfinitePast();
};

}  // namespace

absl::StatusOr<v1::AttachWorkerResponse> Join(Transport& transport, Clock& clock,
                                              const SessionOptions& options, absl::Time& deadline) {
  v1::AttachWorkerRequest attach;
  attach.set_name(proto::JobName(options.job.name));
  attach.set_rank(options.rank);
  attach.set_process_id(options.process_id);
  attach.set_rejoin(options.rejoin);
  attach.set_uid(options.job_uid);
  const bool derives = options.job_uid.empty() && !options.derive_from_uid.empty();
  if (derives) attach.set_derived_from(options.derive_from_uid);
  attach.set_shared_memory(options.shared_memory == SharedMemoryUse::kAuto);
  *attach.mutable_job() = proto::ToProto(options.job);
  // The last call, at the deadline, has enough time to return a reason.
  const auto left = [&] { return std::max(deadline - clock.Now(), absl::Seconds(1)); };
  // If a certain job is wanted, a new and empty one must not take its place.
  const bool creates = options.rank == 0 && options.job_uid.empty();
  CreationWatch creation(transport, clock, options, deadline);
  // Doubled each time: a large description may take long to send.
  for (absl::Duration look = kFirstLook; creates; look *= 2) {
    v1::CreateJobRequest create;
    *create.mutable_job() = attach.job();
    create.mutable_derive_from()->set_uid(options.derive_from_uid);
    create.mutable_derive_from()->set_checkpoint(options.derive_from_checkpoint);
    const absl::Status created = transport.CreateJob(create, std::min(left(), look)).status();
    // If the job exists, attaching compares the descriptions.
    if (created.ok() || absl::IsAlreadyExists(created)) break;
    if (!absl::IsDeadlineExceeded(created)) return created;
    // The service may be making its memory, whether this call waits for that or not. Once it has,
    // the job exists; and if it could not, another call says why.
    const absl::Status awaited = creation.Await();
    if (clock.Now() >= deadline) return awaited.ok() ? created : awaited;
  }
  Backoff backoff(clock, deadline);
  for (;;) {
    absl::StatusOr<v1::AttachWorkerResponse> attached = transport.AttachWorker(attach, left());
    if (ReasonOf(attached.status()) == reason::kJobBeingCreated) {
      BALLAST_RETURN_IF_ERROR(creation.Await());
      continue;
    }
    if (attached.ok() && creates) WarnOfCheckpoint(attached->job(), options);
    // Only a rank that waits for rank 0 expects NOT_FOUND.
    // What an earlier try has left is derived otherwise, until rank 0 does it again.
    const bool is_old = derives && ReasonOf(attached.status()) == reason::kOtherDescription;
    if (creates || !options.job_uid.empty() || !(absl::IsNotFound(attached.status()) || is_old)) {
      return attached;
    }
    if (!backoff.Wait()) {
      return absl::DeadlineExceededError(absl::StrCat(
          "rank 0 has not created the job within ", absl::FormatDuration(options.join_timeout),
          "; start rank 0, or check that all ranks use the same service and job name"));
    }
  }
}

absl::StatusOr<v1::Job> GetJob(Transport& transport, const std::string& name,
                               const std::string& uid) {
  v1::GetJobRequest request;
  request.set_name(proto::JobName(name));
  request.set_uid(uid);
  return transport.GetJob(request);
}

absl::StatusOr<v1::Job> AwaitFirstWeights(const std::function<absl::StatusOr<v1::Job>()>& get_job,
                                          Clock& clock, const SessionOptions& options) {
  std::optional<Backoff> backoff;
  int64_t last_done_bytes = -1;
  for (;;) {
    BALLAST_ASSIGN_OR_RETURN(v1::Job job, get_job());
    if (job.phase() != v1::AWAITING_WEIGHTS) return job;
    int64_t done_bytes = 0;
    for (const v1::Activity& activity : job.activities()) {
      if (activity.kind() == v1::TAKING_FIRST_WEIGHTS) done_bytes = activity.done_bytes();
    }
    // As long as weights of any rank arrive, they are waited for.
    if (std::exchange(last_done_bytes, done_bytes) != done_bytes) {
      backoff.emplace(clock, clock.Now() + options.join_timeout);
    }
    if (backoff->Wait()) continue;
    std::vector<int> absent;
    for (const v1::RankProgress& rank : job.ranks()) {
      if (!rank.attached()) absent.push_back(rank.rank());
    }
    return absl::DeadlineExceededError(absl::StrCat(
        "not all first weights arrived within ", absl::FormatDuration(options.join_timeout), "; ",
        absent.empty() ? "all ranks are attached, and one has not uploaded its weights"
                       : absl::StrCat("not attached: rank ", absl::StrJoin(absent, ", "))));
  }
}

}  // namespace ballast::client
