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

using MemberChannels = std::map<std::string, std::shared_ptr<grpc::Channel>>;  // By address.

// Reads from all members at once, each for at most `timeout`, and calls `receive` for each part of
// the whole, in order; its first error ends the call. UNAVAILABLE: members were at different steps;
// read again. DATA_LOSS: no member has some element.
absl::Status ReadFromMembers(
    const MemberChannels& channels, absl::Duration timeout, const v1::ReadStateRequest& request,
    const std::function<absl::Status(const v1::ReadStateResponse&)>& receive);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_CALLS_MEMBER_READS_H_
