// State whose elements several members of a job have: each is asked for its own, and they are put
// together. All are of one state.
#ifndef BALLAST_CLIENT_CALLS_MEMBER_READS_H_
#define BALLAST_CLIENT_CALLS_MEMBER_READS_H_

#include <grpcpp/channel.h>
#include <grpcpp/support/status.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/v1/jobs.pb.h"
#include "ballast/v1/state.pb.h"
#include "client/credentials.h"
#include "client/transport/clock.h"

namespace ballast::client {

// Which state a part is of.
struct StateVersion {
  uint64_t step = 0;
  uint64_t epoch = 0;  // Of its generation, as `count`.
  uint64_t count = 0;
  uint64_t writes = 0;
  uint64_t loads = 0;
  bool operator==(const StateVersion&) const = default;
};

// If members are at different steps, all are asked again, for a few seconds. UNAVAILABLE: they
// still are, or a member does not answer; the message names it. DATA_LOSS: no member has some
// element, or two have it.
class MemberReads {
 public:
  struct Member {
    std::string address;
    std::shared_ptr<grpc::Channel> channel;
  };

  // Each call to a member takes at most `timeout`. The clock outlives it.
  MemberReads(std::vector<Member> members, std::string uid, Credentials credentials,
              absl::Duration timeout, Clock& clock)
      : members_(std::move(members)),
        uid_(std::move(uid)),
        credentials_(std::move(credentials)),
        timeout_(timeout),
        clock_(clock) {}

  // Calls `receive` for each part of the whole, in order; its first error ends the call.
  absl::Status Read(const v1::ReadStateRequest& request,
                    const std::function<absl::Status(const v1::ReadStateResponse&)>& receive);
  // The same bits as of one service. Only sums travel.
  absl::StatusOr<v1::StateSummary> Summarize(const v1::SummarizeStateRequest& request);
  // Adds to what one member has said of the job: the ranks and the memory of the others, and what
  // the lead knows of members. If one does not answer soon, JobMember.problem says so.
  void Complete(v1::Job& job) const;

 private:
  class Pieces;

  // Asks, again and again, until the versions by member agree.
  absl::Status AskForOneState(
      const std::function<absl::StatusOr<std::vector<StateVersion>>()>& ask);
  absl::Status WhyDifferent(const std::vector<StateVersion>& versions) const;
  absl::Status Explain(const Member& member, const grpc::Status& status,
                       absl::Duration timeout) const;
  // Calls each member at once. By member.
  template <typename Response, typename Start>
  std::vector<absl::StatusOr<Response>> CallEach(absl::Duration timeout, const Start& start) const;

  const std::vector<Member> members_;
  const std::string uid_;
  const Credentials credentials_;
  const absl::Duration timeout_;
  Clock& clock_;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_CALLS_MEMBER_READS_H_
