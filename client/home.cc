#include "client/home.h"

#include <grpcpp/client_context.h>
#include <sys/utsname.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ballast/v1/jobs.grpc.pb.h"
#include "client/calls/cluster_services.h"
#include "client/connect.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/deadline.h"
#include "proto/status.h"

namespace ballast::client {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(10);

absl::StatusOr<v1::ListJobsResponse> ListJobs(const std::shared_ptr<grpc::Channel>& channel,
                                              const std::string& token) {
  grpc::ClientContext context;
  context.set_deadline(proto::Deadline(kCallTimeout));
  v1::ListJobsRequest request;
  request.set_page_token(token);
  v1::ListJobsResponse page;
  BALLAST_RETURN_IF_ERROR(
      proto::FromGrpc(v1::JobService::NewStub(channel)->ListJobs(&context, request, &page)));
  return page;
}

std::vector<std::string> Sorted(const std::vector<MemberSpec>& members) {
  std::vector<std::string> addresses;
  for (const MemberSpec& member : members) addresses.push_back(member.address);
  std::sort(addresses.begin(), addresses.end());
  return addresses;
}

std::string NameOfHost() {
  utsname names = {};
  uname(&names);
  return names.nodename;
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectHome(const std::string& services, int rank,
                                                           JobSpec& job, absl::Duration timeout,
                                                           const Credentials& credentials) {
  if (cluster::IsAddress(services)) {
    BALLAST_ASSIGN_OR_RETURN(const std::string found, rank == 0
                                                          ? FindServices(services, job, credentials)
                                                          : AwaitServices(services, job, timeout));
    return ConnectHome(found, rank, job, timeout, credentials);
  }
  const bool has_members = !job.members.empty();
  if (!has_members) {
    BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> addresses, ParseServices(services));
    // Session::Open checks the rank.
    if (addresses.size() == 1) return Connect(addresses[0], timeout, credentials);
    BALLAST_RETURN_IF_ERROR(SpreadRanks(addresses, job));
  } else {
    BALLAST_RETURN_IF_ERROR(Validate(job));
  }
  // All ranks get the same error, also those with another home.
  for (const MemberSpec& member : job.members) {
    BALLAST_RETURN_IF_ERROR(CheckAddress(member.address));
  }
  if (rank < 0 || rank >= job.layout.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " is not in a world of size ", job.layout.world_size));
  }
  const std::string& home = job.members[job.home(rank)].address;
  return Connect(has_members && !services.empty() ? services : home, timeout, credentials);
}

absl::StatusOr<NodeService> IdentifyService(const std::shared_ptr<grpc::Channel>& channel) {
  BALLAST_ASSIGN_OR_RETURN(const v1::ListJobsResponse page, ListJobs(channel, ""));
  return NodeService{
      .node = NameOfHost(), .id = page.instance_id(), .address = page.advertised_address()};
}

absl::Status TakeRecordedHomes(const std::shared_ptr<grpc::Channel>& channel, JobSpec& job) {
  std::string token;
  do {
    BALLAST_ASSIGN_OR_RETURN(const v1::ListJobsResponse page, ListJobs(channel, token));
    for (const v1::Job& found : page.jobs()) {
      std::vector<MemberSpec> members;
      for (const v1::JobMember& member : found.members()) {
        members.push_back({.address = member.address()});
      }
      if (found.name() != proto::JobName(job.name) || found.world_size() != job.layout.world_size ||
          Sorted(members) != Sorted(job.members)) {
        continue;
      }
      job.members = std::move(members);
      job.homes.assign(found.homes().begin(), found.homes().end());
      return absl::OkStatus();
    }
    token = page.next_page_token();
  } while (!token.empty());
  return absl::OkStatus();
}

}  // namespace ballast::client
