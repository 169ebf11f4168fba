#include "client/calls/cluster_services.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/v1/jobs.grpc.pb.h"
#include "client/connect.h"
#include "cpu_optimizer_service/common/plan/homes.h"
#include "cpu_optimizer_service/common/plan/memory_need.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/amounts.h"
#include "proto/convert.h"
#include "proto/deadline.h"
#include "proto/status.h"

namespace ballast::client {
namespace {

using cluster::Cluster;

constexpr absl::Duration kAskTimeout = absl::Seconds(3);
constexpr absl::Duration kLookForRecord = absl::Milliseconds(200);
// Beside what NeedOf counts, a service keeps a few words of each chunk, and pages of records.
constexpr int64_t kMoreBytes = int64_t{2} << 20;

// A service of the cluster that answers, with what it says now.
struct Host {
  std::string address;
  int64_t free_bytes = 0;
  int64_t limit_bytes = 0;
  std::optional<v1::Job> job;  // The one of the wanted name, if it has that.
};

absl::StatusOr<Host> Ask(const std::string& address, const std::string& job,
                         const Credentials& credentials) {
  BALLAST_ASSIGN_OR_RETURN(const auto channel, NewChannel(address, credentials));
  const auto stub = v1::JobService::NewStub(channel);
  Host host = {.address = address};
  v1::ListJobsRequest request;
  do {
    grpc::ClientContext context;
    context.set_deadline(proto::Deadline(kAskTimeout));
    v1::ListJobsResponse page;
    BALLAST_RETURN_IF_ERROR(proto::FromGrpc(stub->ListJobs(&context, request, &page)));
    host.limit_bytes = page.memory_limit_bytes();
    host.free_bytes = page.memory_limit_bytes() - page.memory_used_bytes();
    for (v1::Job& found : *page.mutable_jobs()) {
      if (found.name() == proto::JobName(job)) host.job = std::move(found);
    }
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  return host;
}

absl::Status NoService(const Cluster& cluster) {
  return absl::NotFoundError(
      absl::StrCat("no service is registered in ", cluster.name(),
                   "; start ballastd with --cluster, or correct the address"));
}

// Those that answer, the one with the most free memory first.
absl::StatusOr<std::vector<Host>> Ask(const std::vector<Cluster::Service>& services,
                                      const std::string& job, const Credentials& credentials) {
  std::vector<Host> hosts;
  absl::Status problem;
  for (const Cluster::Service& each : services) {
    absl::StatusOr<Host> host = Ask(each.service.address(), job, credentials);
    problem.Update(host.status());
    if (host.ok()) hosts.push_back(*std::move(host));
  }
  if (hosts.empty()) return problem;
  std::sort(hosts.begin(), hosts.end(), [](const Host& a, const Host& b) {
    return std::pair(-a.free_bytes, a.address) < std::pair(-b.free_bytes, b.address);
  });
  return hosts;
}

std::vector<std::string> AddressesOf(const std::vector<Host>& hosts, int count) {
  std::vector<std::string> addresses;
  for (int i = 0; i < count; ++i) addresses.push_back(hosts[i].address);
  return addresses;
}

// By member.
absl::StatusOr<std::vector<int64_t>> NeedsOn(const std::vector<std::string>& services,
                                             JobSpec job) {
  job.members.clear();
  job.homes.clear();
  BALLAST_RETURN_IF_ERROR(SpreadRanks(services, job));
  std::vector<int64_t> needs;
  for (int member = 0; member < job.member_count(); ++member) {
    BALLAST_ASSIGN_OR_RETURN(const Layout layout,
                             Layout::CreateForRanks(job.layout, job.RanksOf(member)));
    needs.push_back(NeedOf(job, layout).total_bytes() + kMoreBytes);
  }
  return needs;
}

std::string TextOf(const std::vector<Host>& hosts) {
  std::vector<std::string> words;
  for (const Host& host : hosts) {
    words.push_back(absl::StrCat(host.address, " ", FormatBytes(host.free_bytes), " of ",
                                 FormatBytes(host.limit_bytes)));
  }
  return absl::StrJoin(words, ", ");
}

// For a new job.
absl::StatusOr<std::vector<std::string>> Choose(const std::vector<Host>& hosts, int members,
                                                const JobSpec& job) {
  if (hosts.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("all services have an old job ", job.name,
                                                      "; close it there (ballast close ", job.name,
                                                      " --here --service=HOST:PORT)"));
  }
  const int most = std::min(static_cast<int>(hosts.size()), job.layout.world_size);
  if (members > static_cast<int>(hosts.size())) {
    return absl::FailedPreconditionError(absl::StrCat("job ", job.name, " is to have ", members,
                                                      " services, and the cluster has ",
                                                      hosts.size(), ": ", TextOf(hosts)));
  }
  if (members != 0) return AddressesOf(hosts, members < 0 ? most : members);
  int64_t least = 0;
  for (int count = 1; count <= most; ++count) {
    const std::vector<std::string> services = AddressesOf(hosts, count);
    BALLAST_ASSIGN_OR_RETURN(const std::vector<int64_t> needs, NeedsOn(services, job));
    bool has_room = true;
    for (int member = 0; member < count; ++member) {
      has_room = has_room && needs[member] <= hosts[member].free_bytes;
    }
    if (has_room) return services;
    least = *std::max_element(needs.begin(), needs.end());
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("job ", job.name, " has no room: on ", most,
                   most == 1 ? " service" : " services", " it needs ", FormatBytes(least),
                   most == 1 ? "" : " on each", ", and free are: ", TextOf(hosts)));
}

// The lead first.
template <typename Addresses>
std::vector<std::string> LeadFirst(const std::string& lead, const Addresses& members) {
  std::vector<std::string> services = {lead};
  for (const std::string& member : members) {
    if (member != lead) services.push_back(member);
  }
  return services;
}
std::vector<std::string> ServicesOf(const v1::ClusterJob& job) {
  return LeadFirst(job.lead(), job.members());
}

// Somebody leads it. Without a uid it is being created, and without a lead its name is free.
bool IsRecorded(const Cluster::Record& record) {
  return !record.job.uid().empty() && !record.job.lead().empty();
}

// Those of the job that are registered, as many as the ranks can have.
absl::StatusOr<std::string> Registered(const std::vector<std::string>& of_job,
                                       const std::vector<Cluster::Service>& there,
                                       const JobSpec& job) {
  std::vector<std::string> services;
  for (const std::string& service : of_job) {
    const bool is_there = std::any_of(there.begin(), there.end(), [&](const auto& each) {
      return each.service.address() == service;
    });
    if (!is_there && services.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("job ", job.name, " is led by ", service,
                       ", which is not registered now; wait "
                       "for it, or, if its host is lost: ballast restore ",
                       job.name));
    }
    if (is_there && static_cast<int>(services.size()) < job.layout.world_size) {
      services.push_back(service);
    }
  }
  return absl::StrJoin(services, ",");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Cluster>> OpenCluster(absl::string_view address) {
  BALLAST_ASSIGN_OR_RETURN(const cluster::Address parsed, cluster::ParseAddress(address));
  return Cluster::Open(parsed, cluster::Etcd::Access::FromEnvironment());
}

absl::StatusOr<std::string> FindServices(absl::string_view address, const JobSpec& job,
                                         const Credentials& credentials) {
  BALLAST_ASSIGN_OR_RETURN(const cluster::Address parsed, cluster::ParseAddress(address));
  BALLAST_ASSIGN_OR_RETURN(const auto cluster,
                           Cluster::Open(parsed, cluster::Etcd::Access::FromEnvironment()));
  BALLAST_ASSIGN_OR_RETURN(const Cluster::Record record, cluster->FindJob(job.name));
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Cluster::Service> there, cluster->Services());
  if (there.empty()) return NoService(*cluster);
  if (IsRecorded(record)) return Registered(ServicesOf(record.job), there, job);
  BALLAST_ASSIGN_OR_RETURN(std::vector<Host> hosts, Ask(there, job.name, credentials));
  // One that has the job all the same: its record is still to come, or it is an old part of it, and
  // another one of the name cannot be there.
  for (const Host& host : hosts) {
    if (!host.job.has_value() || host.job->phase() == v1::BROKEN || record.revision != 0) continue;
    std::vector<std::string> members;
    for (const v1::JobMember& member : host.job->members()) members.push_back(member.address());
    const std::string& lead = members.empty() ? host.address : members[host.job->homes(0)];
    return absl::StrJoin(LeadFirst(lead, members), ",");
  }
  std::erase_if(hosts, [](const Host& host) { return host.job.has_value(); });
  BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> services,
                           Choose(hosts, parsed.members, job));
  return absl::StrJoin(services, ",");
}

absl::StatusOr<std::string> AwaitServices(absl::string_view address, const JobSpec& job,
                                          absl::Duration timeout) {
  BALLAST_ASSIGN_OR_RETURN(const auto cluster, OpenCluster(address));
  const absl::Time end = absl::Now() + timeout;
  while (true) {
    BALLAST_ASSIGN_OR_RETURN(const Cluster::Record record, cluster->FindJob(job.name));
    if (!record.job.uid().empty() && record.job.world_size() == job.layout.world_size) {
      return absl::StrJoin(ServicesOf(record.job), ",");
    }
    if (absl::Now() >= end) {
      return absl::DeadlineExceededError(
          absl::StrCat("job ", job.name, " has no record in ", cluster->name(), " after ",
                       absl::FormatDuration(timeout), "; rank 0 creates it"));
    }
    absl::SleepFor(kLookForRecord);
  }
}

absl::StatusOr<std::string> FindLead(absl::string_view address, const std::string& job) {
  BALLAST_ASSIGN_OR_RETURN(const auto cluster, OpenCluster(address));
  if (!job.empty()) {
    BALLAST_ASSIGN_OR_RETURN(const Cluster::Record record, cluster->FindJob(job));
    if (!record.job.lead().empty()) return record.job.lead();
  }
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Cluster::Service> services, cluster->Services());
  if (services.empty()) return NoService(*cluster);
  return services.front().service.address();
}

}  // namespace ballast::client
