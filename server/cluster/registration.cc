#include "server/cluster/registration.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"
#include "proto/convert.h"

namespace ballast::server {
namespace {

// A lease is renewed often enough that an endpoint may be slow, and a second one be asked.
constexpr std::chrono::seconds kLookEvery{3};
constexpr std::chrono::milliseconds kLookNow{200};
// How long a start waits for the first look.
constexpr std::chrono::milliseconds kFirstLook{1000};
// etcd keeps every version of a key for a while, so an entry is written again only for changes of
// memory of this part.
constexpr int64_t kPartOfMemory = 64;

bool Differ(const v1::ClusterService& a, const v1::ClusterService& b) {
  return a.version() != b.version() || a.memory_limit_bytes() != b.memory_limit_bytes() ||
         std::abs(a.memory_used_bytes() - b.memory_used_bytes()) >
             b.memory_limit_bytes() / kPartOfMemory;
}

}  // namespace

Registration::Registration(Engine& engine, std::unique_ptr<cluster::Cluster> cluster,
                           std::string address)
    : engine_(engine), cluster_(std::move(cluster)), address_(std::move(address)) {}

void Registration::Begin() {
  const auto until = Clock::now() + kFirstLook;
  look_now_ = true;
  thread_.emplace("cluster", kLookNow, [this] {
    if (look_now_.exchange(false) || Clock::now() >= due_) Look();
  });
  MutexLock lock(mutex_);
  while (!told_.has_value() && Clock::now() < until) looked_.WaitUntil(mutex_, until);
}

void Registration::End(bool keeps_jobs) {
  thread_.reset();
  if (!told().ok()) return;  // etcd ends the lease.
  if (const auto records = cluster_->Jobs(); !keeps_jobs && records.ok()) {
    for (const Record& record : *records) {
      if (IsOver(record)) cluster_->DeleteJob(record).IgnoreError();
    }
  }
  // With it goes the entry.
  if (lease_ != 0) cluster_->etcd().Revoke(lease_.exchange(0)).IgnoreError();
}

void Registration::Look() {
  const absl::Status entry = KeepEntry();
  // A service that is refused an entry still learns what has become of its jobs.
  Tell(absl::IsUnavailable(entry) ? entry : [&] {
    const absl::Status records = KeepRecords();
    return entry.ok() ? records : entry;
  }());
  due_ = Clock::now() + kLookEvery;
}

void Registration::Tell(const absl::Status& status) {
  {
    MutexLock lock(mutex_);
    const bool is_new = !told_.has_value() || told_->code() != status.code();
    told_ = status;
    looked_.NotifyAll();
    if (!is_new) return;
    told_at_ = absl::Now();
  }
  if (status.ok()) {
    spdlog::info("cluster: registered as {} in {}", address_, cluster_->name());
  } else {
    spdlog::warn("cluster: {}; training goes on, and no job is created here until that is mended",
                 std::string(status.message()));
  }
}

absl::Status Registration::told() const {
  MutexLock lock(mutex_);
  return told_.value_or(absl::UnavailableError(
      absl::StrCat(cluster_->name(), ": this service has not registered yet; try again")));
}

std::string Registration::ToLine() const {
  const absl::Status status = told();
  if (status.ok()) return absl::StrCat(cluster_->name(), ": registered as ", address_);
  MutexLock lock(mutex_);
  return absl::StrCat("since ", absl::FormatTime("%H:%M:%S", told_at_, absl::LocalTimeZone()), ": ",
                      status.message());
}

v1::ClusterService Registration::Facts() const {
  v1::ClusterService facts;
  facts.set_address(address_);
  facts.set_instance_id(engine_.instance_id());
  facts.set_version(BallastVersion());
  facts.set_memory_limit_bytes(engine_.memory().limit_bytes());
  facts.set_memory_used_bytes(engine_.memory().used_bytes());
  facts.set_threads(engine_.tasks().threads());
  return facts;
}

absl::Status Registration::KeepEntry() {
  if (lease_ != 0) {
    const absl::Status kept = cluster_->etcd().KeepAlive(lease_);
    if (absl::IsNotFound(kept)) {
      spdlog::warn("cluster: the lease of {} was over, and with it its entry; it registers again",
                   address_);
      lease_ = 0;
    } else if (!kept.ok()) {
      return kept;
    }
  }
  bool is_written = lease_ != 0;  // Under this lease.
  if (!is_written) {
    BALLAST_ASSIGN_OR_RETURN(lease_, cluster_->etcd().Grant(kLease));
  }
  const v1::ClusterService facts = Facts();
  BALLAST_ASSIGN_OR_RETURN(const cluster::Cluster::Service found, cluster_->FindService(address_));
  const bool is_own = found.service.instance_id() == facts.instance_id();
  if (is_own && is_written && found.revision == entry_ && !Differ(facts, found.service)) {
    return absl::OkStatus();
  }
  // An entry that an earlier process left at this address gives way, since this one listens there. One
  // that has come since is another service's.
  if (!is_own && found.revision != 0 && entry_ != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "another service, with instance id ", found.service.instance_id(), ", has registered as ",
        address_, "; give each service an --advertise of its own"));
  }
  BALLAST_ASSIGN_OR_RETURN(
      entry_, cluster_->PutService({.service = facts, .revision = found.revision}, lease_));
  return absl::OkStatus();
}

Registration::Record Registration::RecordOf(const Job& job, const Record& old) const {
  const JobSpec& spec = job.spec();
  Record record = {.job = {}, .revision = old.revision, .lease = 0, .now = old.now};
  record.job.set_name(proto::JobName(spec.name));
  record.job.set_uid(job.uid());
  record.job.set_epoch(spec.epoch);
  record.job.set_lead(address_);
  for (const MemberSpec& member : spec.members) record.job.add_members(member.address);
  record.job.mutable_homes()->Add(spec.homes.begin(), spec.homes.end());
  record.job.set_world_size(spec.layout.world_size);
  return record;
}

absl::Status Registration::KeepRecordOf(const std::shared_ptr<Job>& job, const Record& old) {
  const JobSpec& spec = job->spec();
  const bool is_others = old.revision != 0 && old.lease == 0 && old.job.uid() != job->uid();
  if (is_others && old.job.epoch() > spec.epoch) {
    // It may have to wait for a decision, and this thread renews the lease.
    if (asked_.insert(job->uid()).second) {
      job->Supersede(old.job.epoch(), [](const absl::StatusOr<bool>&) {});
    }
    return absl::OkStatus();
  }
  if (spec.member_count() > 1 && job->Status().member != spec.lead()) return absl::OkStatus();
  {
    MutexLock lock(mutex_);
    had_.insert(job->uid());
  }
  if (old.revision != 0 && old.job.uid() == job->uid()) return absl::OkStatus();
  // One of a lower epoch is older, from a backup of etcd. One of this epoch has led to this one by a
  // derivation, or is this one's, which was being created.
  if (old.revision != 0 && !IsLedHere(old.job) && old.job.epoch() >= spec.epoch) {
    return absl::AlreadyExistsError(absl::StrCat("job ", spec.name, " is recorded as led by ",
                                                 old.job.lead(), ", in epoch ", old.job.epoch(),
                                                 "; the one here, of epoch ", spec.epoch,
                                                 ", is not found by name: close one of them"));
  }
  const absl::Status written = cluster_->PutJob(RecordOf(*job, old)).status();
  return absl::IsAborted(written) ? absl::OkStatus() : written;
}

// No job is behind it any more, and no other service may have a part of one.
bool Registration::IsOver(const Record& record) const {
  MutexLock lock(mutex_);
  if (closed_.contains(record.job.uid())) return true;
  if (!IsLedHere(record.job)) return false;
  if (record.lease != 0) return record.lease == lease_ && !claims_.contains(record.job.name());
  return had_.contains(record.job.uid()) && record.job.members().empty();
}

absl::Status Registration::KeepRecords() {
  // First these: what is recorded by then, without a lease, is in the list below, or is closed.
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Record> records, cluster_->Jobs());
  std::map<std::string, Record> by_name;
  for (const Record& record : records) by_name[record.job.name()] = record;
  absl::Status status;
  for (const std::shared_ptr<Job>& job : engine_.ListJobs()) {
    const auto found = by_name.find(proto::JobName(job->spec().name));
    if (!job->is_superseded()) {
      status.Update(KeepRecordOf(job, found == by_name.end() ? Record() : found->second));
    }
    if (found != by_name.end()) by_name.erase(found);
  }
  for (const auto& [name, record] : by_name) {
    if (!IsOver(record)) continue;
    const absl::Status deleted = cluster_->DeleteJob(record);
    if (!absl::IsAborted(deleted)) status.Update(deleted);
  }
  return status;
}

absl::StatusOr<Registration::Claim> Registration::Take(const JobSpec& spec) {
  BALLAST_RETURN_IF_ERROR(told());
  BALLAST_ASSIGN_OR_RETURN(Record record, cluster_->FindJob(spec.name));
  const bool is_led_here = record.revision != 0 && IsLedHere(record.job);
  const absl::StatusOr<std::shared_ptr<Job>> here = engine_.FindJob(spec.name);
  if (here.ok() && record.revision != 0 && record.job.epoch() > (*here)->spec().epoch &&
      record.job.uid() != (*here)->uid()) {
    look_now_ = true;
    return absl::FailedPreconditionError(
        absl::StrCat("job ", spec.name, " here, of epoch ", (*here)->spec().epoch,
                     ", is over; close it (ballast "
                     "close ",
                     spec.name, " --here, with the --service of this one)"));
  }
  // Without a lead: since a restore it is nobody's.
  if (record.revision != 0 && !is_led_here && !record.job.lead().empty()) {
    // Not ALREADY_EXISTS, after which clients attach here.
    return absl::FailedPreconditionError(
        absl::StrCat("job ", spec.name, " is led by ", record.job.lead(),
                     ", and not here; attach there, or close "
                     "it (ballast close), or, if its host is lost, ballast restore ",
                     spec.name));
  }
  const int64_t lease = lease_;
  bool is_own = !here.ok();
  {
    MutexLock lock(mutex_);
    if (is_led_here && record.lease == lease) is_own = false;  // Another call creates it.
    if (is_own) is_own = claims_.insert(record.job.name()).second;
  }
  if (!is_own) return Claim{.record = std::move(record)};
  Claim claim = {.record = std::move(record), .is_own = true};
  const auto refuse = [&](absl::Status why) {
    MutexLock lock(mutex_);
    claims_.erase(claim.record.job.name());
    look_now_ = true;  // What was written without an answer goes.
    return why;
  };
  if (is_led_here && claim.record.lease == 0) {
    return refuse(absl::FailedPreconditionError(
        absl::StrCat("job ", spec.name, " of epoch ", claim.record.job.epoch(),
                     " was led here, and this service "
                     "does not have it any more; ballast restore ",
                     spec.name, " lets its name go on")));
  }
  // etcd may come back from a backup, with a lower revision.
  uint64_t epoch = std::max(static_cast<uint64_t>(claim.record.now), claim.record.job.epoch());
  if (engine_.checkpoints() != nullptr) {
    epoch =
        std::max(epoch, HighestEpoch(PosixFileSystem(), engine_.checkpoints()->PathOf(spec.name)));
  }
  v1::ClusterJob& job = claim.record.job;
  job.set_epoch(epoch + 1);
  job.clear_uid();
  job.set_lead(address_);
  job.clear_members();
  job.clear_homes();
  job.set_world_size(spec.layout.world_size);
  const absl::StatusOr<int64_t> written = cluster_->PutJob(claim.record, lease);
  if (absl::IsAborted(written.status())) {
    return refuse(absl::FailedPreconditionError(
        absl::StrCat("job ", spec.name,
                     " is being created by another service, too; attach there, or try again")));
  }
  if (absl::IsNotFound(written.status())) {
    return refuse(absl::UnavailableError("the lease in etcd was over; try again"));
  }
  if (!written.ok()) return refuse(written.status());
  claim.record.revision = *written;
  return claim;
}

absl::Status Registration::Keep(const Claim& claim, const Job& job) {
  if (!claim.is_own) return absl::OkStatus();
  const absl::StatusOr<int64_t> written = cluster_->PutJob(RecordOf(job, claim.record));
  absl::Status status;
  if (!written.ok()) {
    const absl::StatusOr<Record> now = cluster_->FindJob(job.spec().name);
    // Without an answer, or a record, the thread records it; by then its epoch says whether the name
    // is another's.
    if (now.ok() && now->revision != 0 && !IsLedHere(now->job)) {
      status = absl::AbortedError(absl::StrCat("job ", job.spec().name,
                                               " is not created here: its "
                                               "name was taken by ",
                                               now->job.lead(), " meanwhile"));
    }
  }
  MutexLock lock(mutex_);
  claims_.erase(claim.record.job.name());
  had_.insert(job.uid());
  if (!written.ok()) look_now_ = true;
  return status;
}

void Registration::GiveBack(const Claim& claim) {
  if (!claim.is_own) return;
  MutexLock lock(mutex_);
  claims_.erase(claim.record.job.name());
  look_now_ = true;  // The thread deletes it.
}

void Registration::Closed(const std::string& name, const std::string& uid) {
  {
    MutexLock lock(mutex_);
    closed_.insert(uid);
  }
  look_now_ = true;
  if (!told().ok()) return;
  // Now, so that the name is free when the caller is told.
  const absl::StatusOr<Record> record = cluster_->FindJob(name);
  if (record.ok() && record->revision != 0 && record->job.uid() == uid) {
    cluster_->DeleteJob(*record).IgnoreError();
  }
}

}  // namespace ballast::server
