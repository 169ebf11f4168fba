#include "client/join.h"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::client {

absl::Duration Backoff::Next() {
  const absl::Duration wait = std::max(absl::ZeroDuration(), std::min(next_, left()));
  next_ = std::min(2 * next_, absl::Seconds(1));
  return wait;
}

bool Backoff::Wait() {
  const absl::Duration wait = Next();
  if (wait == absl::ZeroDuration()) return false;
  clock_.SleepFor(wait);
  return true;
}

const std::string& DefaultProcessId() {
  static const std::string id = [] {
    char host[256] = "unknown-host";
    gethostname(host, sizeof(host) - 1);
    std::random_device random;
    const uint64_t bits = (uint64_t{random()} << 32) | random();
    return absl::StrCat(host, ":", getpid(), ":", absl::Hex(bits, absl::kZeroPad16));
  }();
  return id;
}

absl::StatusOr<v1::AttachWorkerResponse> Join(Transport& transport, Clock& clock,
                                              const SessionOptions& options, absl::Time deadline) {
  v1::AttachWorkerRequest attach;
  attach.set_name(proto::JobName(options.job.name));
  attach.set_rank(options.rank);
  attach.set_process_id(options.process_id);
  attach.set_rejoin(options.rejoin);
  *attach.mutable_job() = proto::ToProto(options.job);
  if (options.rank == 0) {
    v1::CreateJobRequest create;
    *create.mutable_job() = attach.job();
    const absl::Status created = transport.CreateJob(create).status();
    // If it is there, attaching compares the descriptions.
    if (!created.ok() && !absl::IsAlreadyExists(created)) return created;
  }
  Backoff backoff(clock, deadline);
  for (;;) {
    absl::StatusOr<v1::AttachWorkerResponse> attached =
        transport.AttachWorker(attach, absl::InfiniteDuration());
    if (options.rank == 0 || !absl::IsNotFound(attached.status())) return attached;
    if (!backoff.Wait()) {
      return absl::DeadlineExceededError(absl::StrCat(
          "rank 0 has not created the job within ", absl::FormatDuration(options.join_timeout),
          "; start rank 0, or check that all ranks use the same service and job name"));
    }
  }
}

absl::Status AwaitFirstWeights(Transport& transport, Clock& clock, const SessionOptions& options) {
  v1::GetJobRequest request;
  request.set_name(proto::JobName(options.job.name));
  Backoff backoff(clock, clock.Now() + options.join_timeout);
  for (;;) {
    BALLAST_ASSIGN_OR_RETURN(const v1::Job job, transport.GetJob(request));
    if (job.phase() != v1::AWAITING_WEIGHTS) return absl::OkStatus();
    if (backoff.Wait()) continue;
    std::vector<int> absent;
    for (const v1::RankProgress& rank : job.ranks()) {
      if (!rank.attached()) absent.push_back(rank.rank());
    }
    return absl::DeadlineExceededError(absl::StrCat(
        "not all first weights have come within ", absl::FormatDuration(options.join_timeout), "; ",
        absent.empty() ? "all ranks are attached, and one has not uploaded its weights"
                       : absl::StrCat("not attached: rank ", absl::StrJoin(absent, ", "))));
  }
}

}  // namespace ballast::client
