#include "client/calls/member_reads.h"

#include <grpcpp/client_context.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/v1/state.grpc.pb.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/deadline.h"
#include "proto/status.h"

namespace ballast::client {
namespace {

// What one member has, ascending.
class Pieces {
 public:
  Pieces(std::string address, const std::shared_ptr<grpc::Channel>& channel,
         const v1::ReadStateRequest& request, absl::Duration timeout)
      : address_(std::move(address)), stub_(channel) {
    context_.set_deadline(proto::Deadline(timeout));
    reader_ = stub_.ReadState(&context_, request);
  }
  // A call has to be finished before it is destroyed.
  ~Pieces() {
    if (ended_) return;
    context_.TryCancel();
    reader_->Finish();
  }

  absl::Status Next() {
    next_.Clear();
    if (reader_->Read(&next_)) return absl::OkStatus();
    ended_ = true;
    const grpc::Status status = reader_->Finish();
    return status.ok() ? absl::OkStatus()
                       : Annotate(proto::FromGrpc(status), absl::StrCat("member ", address_));
  }
  bool ended() const { return ended_; }
  v1::ReadStateResponse& next() { return next_; }
  const std::string& address() const { return address_; }

 private:
  const std::string address_;
  v1::StateService::Stub stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::ReadStateResponse>> reader_;
  v1::ReadStateResponse next_;
  bool ended_ = false;
};

}  // namespace

absl::Status ReadFromMembers(
    const MemberChannels& channels, absl::Duration timeout, const v1::ReadStateRequest& request,
    const std::function<absl::Status(const v1::ReadStateResponse&)>& receive) {
  v1::ReadStateRequest here = request;
  here.set_here(true);
  std::vector<std::unique_ptr<Pieces>> members;
  for (const auto& [address, channel] : channels) {
    members.push_back(std::make_unique<Pieces>(address, channel, here, timeout));
  }
  v1::ReadStateResponse first;  // Without elements.
  int64_t elements = 1;
  for (const auto& member : members) {
    BALLAST_RETURN_IF_ERROR(member->Next());
    if (member == members[0]) {
      first = member->next();
      first.clear_data();
      first.clear_offset();
      for (const int64_t size : first.shape()) elements *= size;
    }
    if (member->next().step() != first.step()) {
      return absl::UnavailableError(absl::StrCat(
          "member ", member->address(), " is at step ", member->next().step(), ", and member ",
          members[0]->address(), " at step ", first.step(), "; read when no step is in progress"));
    }
  }
  BALLAST_RETURN_IF_ERROR(receive(first));
  for (int64_t offset = 0; offset < elements;) {
    bool found = false;
    for (const auto& member : members) {
      // A member without elements has a first message all the same.
      while (!member->ended() && (member->next().data().empty())) {
        BALLAST_RETURN_IF_ERROR(member->Next());
      }
      if (member->ended() || member->next().offset() != offset) continue;
      v1::ReadStateResponse part;
      part.set_offset(offset);
      part.set_data(std::move(*member->next().mutable_data()));
      offset += static_cast<int64_t>(part.data().size() / sizeof(float));
      BALLAST_RETURN_IF_ERROR(receive(part));
      BALLAST_RETURN_IF_ERROR(member->Next());
      found = true;
      break;
    }
    if (!found) {
      return absl::DataLossError(
          absl::StrCat("no member has element ", offset, " of ", request.name()));
    }
  }
  return absl::OkStatus();
}

}  // namespace ballast::client
