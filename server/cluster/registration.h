// This service in a cluster: its entry in etcd under a lease, and the records of the jobs that it leads.
//
// A thread renews the lease and mends the records. Nothing of a step waits for etcd. While etcd does
// not answer, no job is created here; all else goes on.
#ifndef BALLAST_SERVER_CLUSTER_REGISTRATION_H_
#define BALLAST_SERVER_CLUSTER_REGISTRATION_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/common/system/periodic_thread.h"
#include "cpu_optimizer_service/engine.h"
#include "proto/cluster/cluster.h"

namespace ballast::server {

// Thread-safe. The engine outlives it.
class Registration {
 public:
  // How long an entry stays without its service.
  static constexpr absl::Duration kLease = absl::Seconds(15);

  // `address`: as other hosts reach this service.
  Registration(Engine& engine, std::unique_ptr<cluster::Cluster> cluster, std::string address);

  // From then on the service is found, and jobs may be created: usually when this returns, and else
  // once etcd answers.
  void Begin();
  // The service stops. Without `keeps_jobs` its jobs are gone with it. Their records go, too, except
  // where other services have parts: then `ballast restore` needs it.
  void End(bool keeps_jobs);

  // The name of a new job: its record without a uid, under this service's lease.
  struct Claim {
    cluster::Cluster::Record record;
    bool is_own = false;  // False: the job is here already, or another call creates it.
  };
  // FAILED_PRECONDITION: a job of the name is led elsewhere, or was led here and is gone. UNAVAILABLE:
  // etcd does not answer.
  absl::StatusOr<Claim> Take(const JobSpec& spec);
  // The job has been created. ABORTED: its name is another service's by now, so it is to be closed.
  absl::Status Keep(const Claim& claim, const Job& job);
  // It has not been created.
  void GiveBack(const Claim& claim);
  // A job that is led here has been closed, at all its members.
  void Closed(const std::string& name, const std::string& uid);

  // "etcd at a:2379, under /ballast: registered", or why not.
  std::string ToLine() const;

 private:
  using Clock = std::chrono::steady_clock;
  using Record = cluster::Cluster::Record;

  // Of the thread.
  void Look();
  absl::Status KeepEntry();
  absl::Status KeepRecords();
  absl::Status KeepRecordOf(const std::shared_ptr<Job>& job, const Record& old);
  bool IsOver(const Record& record) const;

  void Tell(const absl::Status& status);
  absl::Status told() const;
  v1::ClusterService Facts() const;
  bool IsLedHere(const v1::ClusterJob& job) const { return job.lead() == address_; }
  // What the record says of this job, in the place of `old`.
  Record RecordOf(const Job& job, const Record& old) const;

  Engine& engine_;
  const std::unique_ptr<cluster::Cluster> cluster_;
  const std::string address_;
  std::atomic<int64_t> lease_ = 0;  // 0: none.
  std::atomic<bool> look_now_ = false;
  // Of the thread.
  int64_t entry_ = 0;            // etcd's revision when the entry was written; 0: it was not.
  std::set<std::string> asked_;  // Uids of jobs whose Supersede has been called.
  Clock::time_point due_ = {};
  mutable Mutex mutex_;
  CondVar looked_;
  std::set<std::string> had_ ABSL_GUARDED_BY(mutex_);     // Uids of jobs that this process has led.
  std::set<std::string> claims_ ABSL_GUARDED_BY(mutex_);  // Names that calls are about.
  std::set<std::string> closed_ ABSL_GUARDED_BY(mutex_);  // Uids whose records are to go.
  std::optional<absl::Status> told_ ABSL_GUARDED_BY(mutex_);
  absl::Time told_at_ ABSL_GUARDED_BY(mutex_);
  std::optional<PeriodicThread> thread_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_CLUSTER_REGISTRATION_H_
