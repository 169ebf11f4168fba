#include "client/session/join.h"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/session/log.h"
#include "client/session/retry.h"
#include "cpu_optimizer_service/common/status.h"
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

absl::StatusOr<v1::AttachWorkerResponse> Join(Transport& transport, Clock& clock,
                                              const SessionOptions& options, absl::Time deadline) {
  v1::AttachWorkerRequest attach;
  attach.set_name(proto::JobName(options.job.name));
  attach.set_rank(options.rank);
  attach.set_process_id(options.process_id);
  attach.set_rejoin(options.rejoin);
  attach.set_uid(options.job_uid);
  attach.set_shared_memory(options.shared_memory == SharedMemoryUse::kAuto);
  *attach.mutable_job() = proto::ToProto(options.job);
  // The last call, at the deadline, has enough time to return a reason.
  const auto left = [&] { return std::max(deadline - clock.Now(), absl::Seconds(1)); };
  // If a certain job is wanted, a new and empty one must not take its place.
  const bool creates = options.rank == 0 && options.job_uid.empty();
  if (creates) {
    v1::CreateJobRequest create;
    *create.mutable_job() = attach.job();
    const absl::StatusOr<v1::Job> created = transport.CreateJob(create, left());
    // If the job exists, attaching compares the descriptions.
    if (!created.ok() && !absl::IsAlreadyExists(created.status())) return created.status();
    // A session that takes no steps may be about to load it.
    if (created.ok() && created->has_found_checkpoint() && options.takes_steps) {
      Log().warn(
          "job {} begins again; the service has a checkpoint of an earlier one at step {}, in {}, "
          "which `ballast load {} {}` loads",
          options.job.name, created->found_checkpoint().step(),
          created->found_checkpoint().directory(), options.job.name, options.job.name);
    }
  }
  Backoff backoff(clock, deadline);
  for (;;) {
    absl::StatusOr<v1::AttachWorkerResponse> attached = transport.AttachWorker(attach, left());
    // Only a rank that waits for rank 0 expects NOT_FOUND.
    if (creates || !options.job_uid.empty() || !absl::IsNotFound(attached.status())) {
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
  BALLAST_ASSIGN_OR_RETURN(v1::Job job, transport.GetJob(request));
  if (job.uid() != uid) {
    return absl::NotFoundError(absl::StrCat("job ", name, " has uid ", job.uid(), ", not ", uid,
                                            ": it was closed, and created again"));
  }
  return job;
}

absl::StatusOr<v1::Job> AwaitFirstWeights(const std::function<absl::StatusOr<v1::Job>()>& get_job,
                                          Clock& clock, const SessionOptions& options) {
  Backoff backoff(clock, clock.Now() + options.join_timeout);
  for (;;) {
    BALLAST_ASSIGN_OR_RETURN(v1::Job job, get_job());
    if (job.phase() != v1::AWAITING_WEIGHTS) return job;
    if (backoff.Wait()) continue;
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
