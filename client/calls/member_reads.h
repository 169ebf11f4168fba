// A plane of a parameter whose elements several members of a job have.
#ifndef BALLAST_CLIENT_CALLS_MEMBER_READS_H_
#define BALLAST_CLIENT_CALLS_MEMBER_READS_H_

#include <grpcpp/channel.h>

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ballast/v1/state.pb.h"

namespace ballast::client {

class MemberReads {
 public:
  using Channels = std::map<std::string, std::shared_ptr<grpc::Channel>>;  // By address.

  // `timeout`: of each call.
  MemberReads(const Channels& channels, absl::Duration timeout)
      : channels_(channels), timeout_(timeout) {}

  // Reads from all members at once, and calls `receive` for each part of the whole, in order; its
  // first error ends the call. UNAVAILABLE: members were at different steps; read again. DATA_LOSS:
  // no member has some element.
  absl::Status Read(const v1::ReadStateRequest& request,
                    const std::function<absl::Status(const v1::ReadStateResponse&)>& receive) const;

 private:
  const Channels& channels_;
  const absl::Duration timeout_;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_CALLS_MEMBER_READS_H_
