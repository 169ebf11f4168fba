#include "client/calls/restore.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/v1/jobs.pb.h"
#include "client/calls/cluster_services.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/cluster/cluster.h"
#include "proto/convert.h"

namespace ballast::client {
namespace {

using cluster::Cluster;

// What a service of the job has of it.
struct Holder {
  std::string address;
  absl::Status problem;        // OK: it has its part; NOT_FOUND: it answers, and has it no more.
  bool is_registered = false;  // Of one that does not answer: it may be back in a moment.
  v1::Job job;
};

// The newest that can be loaded: the list has the highest epoch first.
absl::StatusOr<v1::Checkpoint> NewestOf(Service& service, const std::string& job) {
  v1::ListCheckpointsRequest request;
  request.set_directory(job);
  BALLAST_ASSIGN_OR_RETURN(const auto found, service.Call<v1::ListCheckpointsResponse>(
                                                 "StateService/ListCheckpoints", request));
  for (const v1::Checkpoint& checkpoint : found.checkpoints()) {
    if (checkpoint.problem().empty()) return checkpoint;
  }
  return absl::NotFoundError("all of them are damaged");
}

absl::StatusOr<std::vector<Holder>> HoldersOf(Service& service, Cluster& cluster,
                                              const v1::ClusterJob& recorded) {
  std::vector<std::string> addresses(recorded.members().begin(), recorded.members().end());
  if (addresses.empty()) addresses.push_back(recorded.lead());
  std::vector<Holder> holders;
  for (const std::string& address : addresses) {
    Holder& holder = holders.emplace_back(Holder{.address = address});
    BALLAST_ASSIGN_OR_RETURN(const Cluster::Service entry, cluster.FindService(address));
    holder.is_registered = entry.revision != 0;
    BALLAST_ASSIGN_OR_RETURN(const auto other, service.Other(address));
    const absl::StatusOr<v1::Job> job =
        other->GetJob(std::string(proto::BareName(recorded.name())), /*with_parameters=*/false);
    holder.problem = job.status();
    if (!job.ok()) continue;
    holder.job = *job;
    if (job->uid() == recorded.uid()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(address, " has another job of this name, with uid ", job->uid(),
                     ", and the record is of ", recorded.uid(), "; try again in some seconds"));
  }
  return holders;
}

// OK: it has lost a part, and cannot go on by itself.
absl::Status CheckIsLost(const std::string& job, const std::vector<Holder>& holders, bool force) {
  std::vector<std::string> silent;
  bool is_lost = false;
  for (const Holder& holder : holders) {
    const bool answers = holder.problem.ok() || ReasonOf(holder.problem) == reason::kNoSuchJob;
    if (!answers && holder.is_registered && !force) {
      return absl::FailedPreconditionError(absl::StrCat(
          "service ", holder.address, " of job ", job, " does not answer (",
          holder.problem.message(),
          "), and was there 15 seconds ago; it may be back in a moment: wait, and try again"));
    }
    if (!answers)
      silent.push_back(absl::StrCat(holder.address, " (", holder.problem.message(), ")"));
    is_lost = is_lost || !holder.problem.ok();
  }
  if (!is_lost) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", job, " is whole, at step ", holders.front().job.committed_step(),
                     "; attach to it, or end it (ballast close ", job, ")"));
  }
  if (silent.size() < holders.size() || force) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "no service of job ", job, " answers, so it may still train: ", absl::StrJoin(silent, ", "),
      "; if their hosts are dead: ballast restore ", job, " --force"));
}

// Whether the job has saved the checkpoint, or goes back to one that has.
bool IsOf(const v1::Checkpoint& checkpoint, const std::string& uid,
          const std::vector<Holder>& holders) {
  if (checkpoint.uid() == uid) return true;
  return std::any_of(holders.begin(), holders.end(), [&](const Holder& holder) {
    const auto& ancestors = holder.job.ancestors();
    return checkpoint.uid() == holder.job.resumed_uid() ||
           std::find(ancestors.begin(), ancestors.end(), checkpoint.uid()) != ancestors.end();
  });
}

}  // namespace

absl::StatusOr<Restored> Restore(Service& service, const std::string& job, bool force) {
  if (service.cluster().empty()) {
    return absl::InvalidArgumentError(
        "a job is restored in a cluster; give --service=etcd://HOST:PORT/PREFIX");
  }
  BALLAST_ASSIGN_OR_RETURN(const auto cluster, OpenCluster(service.cluster()));
  BALLAST_ASSIGN_OR_RETURN(Cluster::Record record, cluster->FindJob(job));
  const std::string uid = record.job.uid();
  if (record.revision == 0 || uid.empty()) {
    return absl::NotFoundError(absl::StrCat("job ", job, " has no record in ", cluster->name(),
                                            ", so its name is free: start its trainers"));
  }
  // A service that is registered, and so answers: the lead may be what was lost.
  BALLAST_ASSIGN_OR_RETURN(const std::string any, FindLead(service.cluster(), ""));
  BALLAST_ASSIGN_OR_RETURN(const auto asked, service.Other(any));
  const absl::StatusOr<v1::Checkpoint> newest = NewestOf(*asked, job);
  if (!newest.ok()) {
    return absl::FailedPreconditionError(absl::StrCat("job ", job, " has no checkpoint at ", any,
                                                      " (", newest.status().message(),
                                                      "); ballast close ends it"));
  }
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Holder> holders,
                           HoldersOf(service, *cluster, record.job));
  BALLAST_RETURN_IF_ERROR(CheckIsLost(job, holders, force));
  if (!IsOf(*newest, uid, holders) && !force) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the newest checkpoint of ", job, " at ", any, " is of another job of that name: ",
        newest->directory(), "; if it is the right one: ballast restore ", job, " --force"));
  }
  Restored restored;
  for (const Holder& holder : holders) {
    BALLAST_ASSIGN_OR_RETURN(const auto part, service.Other(holder.address));
    v1::CloseJobRequest request;
    request.set_name(proto::JobName(job));
    request.set_uid(uid);
    request.set_here(true);
    const absl::Status closed =
        holder.problem.ok()
            ? part->Call<v1::CloseJobResponse>("JobService/CloseJob", request).status()
            : holder.problem;
    // One that answers and does not have it has lost its part, which is as good.
    if (closed.ok() || ReasonOf(closed) == reason::kNoSuchJob) {
      restored.ended.push_back(holder.address);
    } else {
      restored.unknown.push_back(absl::StrCat(holder.address, " (", closed.message(), ")"));
    }
  }
  if (restored.ended.empty() && !force) {
    return absl::UnavailableError(absl::StrCat(
        "no part of job ", job, " could be closed: ", absl::StrJoin(restored.unknown, ", ")));
  }
  restored.epoch =
      1 + std::max({static_cast<uint64_t>(record.now), record.job.epoch(), newest->epoch()});
  restored.checkpoint.set_directory(newest->directory());
  restored.checkpoint.set_step(newest->step());
  restored.checkpoint.set_uid(newest->uid());
  record.job.clear_uid();
  record.job.clear_lead();
  record.job.clear_members();
  record.job.clear_homes();
  record.job.set_epoch(restored.epoch);
  absl::StatusOr<int64_t> written = cluster->PutJob(record);
  // The lead may have deleted it, once its part was closed.
  if (absl::IsAborted(written.status())) {
    BALLAST_ASSIGN_OR_RETURN(const Cluster::Record again, cluster->FindJob(job));
    if (again.revision == 0) {
      record.revision = 0;
      written = cluster->PutJob(record);
    }
  }
  BALLAST_RETURN_IF_ERROR(written.status());
  return restored;
}

}  // namespace ballast::client
