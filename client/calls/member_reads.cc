#include "client/calls/member_reads.h"

#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/v1/jobs.grpc.pb.h"
#include "ballast/v1/state.grpc.pb.h"
#include "client/session/retry.h"
#include "client/transport/handshake.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/deadline.h"
#include "proto/status.h"

namespace ballast::client {
namespace {

// How long members may be at different steps. The slowest one still updates, or reaches no lead.
constexpr absl::Duration kApart = absl::Seconds(5);
// How long a member may take that is asked only for what it adds.
constexpr absl::Duration kSoon = absl::Seconds(3);

template <typename Message>
StateVersion VersionOf(const Message& message) {
  return {.step = message.step(),
          .epoch = message.generation().epoch(),
          .count = message.generation().count(),
          .writes = message.state_writes(),
          .loads = message.loads()};
}

template <typename Message>
int64_t ElementsOf(const Message& message) {
  int64_t elements = 1;
  for (const int64_t size : message.shape()) elements *= size;
  return elements;
}

absl::Status HasTwice(const std::string& name, int64_t element) {
  return absl::DataLossError(absl::StrCat("two members have element ", element, " of ", name));
}

}  // namespace

// What one member has, ascending.
class MemberReads::Pieces {
 public:
  Pieces(const MemberReads& reads, const Member& member, const v1::ReadStateRequest& request)
      : reads_(reads), member_(member), stub_(member.channel) {
    context_.set_deadline(proto::Deadline(reads.timeout_));
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
    return status.ok() ? absl::OkStatus() : reads_.Explain(member_, status, reads_.timeout_);
  }
  bool ended() const { return ended_; }
  v1::ReadStateResponse& next() { return next_; }

 private:
  const MemberReads& reads_;
  const Member& member_;
  v1::StateService::Stub stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::ReadStateResponse>> reader_;
  v1::ReadStateResponse next_;
  bool ended_ = false;
};

absl::Status MemberReads::Explain(const Member& member, const grpc::Status& status,
                                  absl::Duration timeout) const {
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    return absl::DeadlineExceededError(
        absl::StrCat("member ", member.address, " did not answer within ",
                     absl::FormatDuration(timeout), "; see its log"));
  }
  if (const std::string why = WhyHandshakeFailed(status, member.address, credentials_);
      !why.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("no connection to member ", member.address, ": ", why));
  }
  if (const std::string cause = proto::CauseOfUnreachable(status); !cause.empty()) {
    return absl::UnavailableError(
        absl::StrCat("member ", member.address, " does not answer: ", cause, "; see its log"));
  }
  return Annotate(proto::FromGrpc(status), absl::StrCat("member ", member.address));
}

absl::Status MemberReads::WhyDifferent(const std::vector<StateVersion>& versions) const {
  const auto other = std::find_if(versions.begin(), versions.end(),
                                  [&](const StateVersion& at) { return at != versions[0]; });
  if (other == versions.end()) return absl::OkStatus();
  const auto text = [&](const StateVersion& at) {
    std::string where = absl::StrCat("at step ", at.step);
    if (at.step == versions[0].step && at.step == other->step) {
      absl::StrAppend(&where, " of generation ", at.epoch, ".", at.count, " behind ", at.writes,
                      " writes of state and ", at.loads, " loads and undos");
    }
    return where;
  };
  return absl::UnavailableError(
      absl::StrCat("member ", members_[0].address, " is ", text(versions[0]), ", and member ",
                   members_[other - versions.begin()].address, " ", text(*other), "; read again"));
}

absl::Status MemberReads::AskForOneState(
    const std::function<absl::StatusOr<std::vector<StateVersion>>()>& ask) {
  Backoff backoff(clock_, clock_.Now() + kApart);
  while (true) {
    BALLAST_ASSIGN_OR_RETURN(const std::vector<StateVersion> versions, ask());
    const absl::Status different = WhyDifferent(versions);
    if (different.ok() || !backoff.Wait()) return different;
  }
}

absl::Status MemberReads::Read(
    const v1::ReadStateRequest& request,
    const std::function<absl::Status(const v1::ReadStateResponse&)>& receive) {
  v1::ReadStateRequest here = request;
  here.set_here(true);
  here.set_uid(uid_);
  std::vector<std::unique_ptr<Pieces>> members;
  BALLAST_RETURN_IF_ERROR(AskForOneState([&]() -> absl::StatusOr<std::vector<StateVersion>> {
    members.clear();
    for (const Member& member : members_) {
      members.push_back(std::make_unique<Pieces>(*this, member, here));
    }
    std::vector<StateVersion> versions;
    for (const auto& member : members) {
      BALLAST_RETURN_IF_ERROR(member->Next());
      versions.push_back(VersionOf(member->next()));
    }
    return versions;
  }));
  v1::ReadStateResponse first = members[0]->next();  // Without elements.
  first.clear_data();
  first.clear_offset();
  BALLAST_RETURN_IF_ERROR(receive(first));
  const int64_t elements = ElementsOf(first);
  for (int64_t offset = 0; offset < elements;) {
    bool found = false;
    for (const auto& member : members) {
      // A member without elements has a first message all the same.
      while (!member->ended() && (member->next().data().empty())) {
        BALLAST_RETURN_IF_ERROR(member->Next());
      }
      if (member->ended()) continue;
      if (member->next().offset() < offset)
        return HasTwice(request.name(), member->next().offset());
      if (member->next().offset() != offset) continue;
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
  for (const auto& member : members) {
    if (!member->ended() && !member->next().data().empty()) {
      return HasTwice(request.name(), member->next().offset());
    }
  }
  return absl::OkStatus();
}

template <typename Response, typename Start>
std::vector<absl::StatusOr<Response>> MemberReads::CallEach(absl::Duration timeout,
                                                            const Start& start) const {
  struct Call {
    grpc::ClientContext context;
    grpc::Status status;
    Response answer;
    std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> reader;
  };
  grpc::CompletionQueue queue;
  std::vector<Call> calls(members_.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i].context.set_deadline(proto::Deadline(timeout));
    calls[i].reader = start(members_[i].channel, &calls[i].context, &queue);
    calls[i].reader->Finish(&calls[i].answer, &calls[i].status, &calls[i]);
  }
  for (size_t ended = 0; ended < calls.size(); ++ended) {
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
  }
  std::vector<absl::StatusOr<Response>> answers;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (calls[i].status.ok()) {
      answers.emplace_back(std::move(calls[i].answer));
    } else {
      answers.emplace_back(Explain(members_[i], calls[i].status, timeout));
    }
  }
  return answers;
}

absl::StatusOr<v1::StateSummary> MemberReads::Summarize(const v1::SummarizeStateRequest& request) {
  v1::SummarizeStateRequest here = request;
  here.set_here(true);
  here.set_uid(uid_);
  std::vector<v1::StateSummary> parts;
  BALLAST_RETURN_IF_ERROR(AskForOneState([&]() -> absl::StatusOr<std::vector<StateVersion>> {
    // At once: one after the other they would find each member at a later step.
    auto answers = CallEach<v1::StateSummary>(
        timeout_, [&](const auto& channel, grpc::ClientContext* context, auto* queue) {
          return v1::StateService::NewStub(channel)->AsyncSummarizeState(context, here, queue);
        });
    parts.clear();
    std::vector<StateVersion> versions;
    for (absl::StatusOr<v1::StateSummary>& answer : answers) {
      BALLAST_RETURN_IF_ERROR(answer.status());
      versions.push_back(VersionOf(*answer));
      parts.push_back(*std::move(answer));
    }
    return versions;
  }));
  v1::StateSummary all = parts[0];
  for (int i = 0; i < all.planes_size(); ++i) {
    v1::PlaneSummary& plane = *all.mutable_planes(i);
    BALLAST_ASSIGN_OR_RETURN(const Plane which, proto::FromProto(plane.plane()));
    PlaneSummary sum;
    for (const v1::StateSummary& part : parts) {
      if (part.planes_size() != all.planes_size()) {
        return absl::InternalError("members have different planes; use the same versions");
      }
      BALLAST_ASSIGN_OR_RETURN(const PlaneSummary of_part, proto::FromProto(part.planes(i)));
      sum.Add(of_part);
    }
    const int64_t found = sum.finite() + sum.non_finite;
    if (found != ElementsOf(all)) {
      return absl::DataLossError(absl::StrCat("members have ", found, " of the ", ElementsOf(all),
                                              " elements of ", request.name()));
    }
    plane = proto::ToProto(sum, which, /*with_sums=*/false);
  }
  return all;
}

void MemberReads::Complete(v1::Job& job) const {
  v1::GetJobRequest request;
  request.set_name(job.name());
  request.set_uid(job.uid());
  const auto answers = CallEach<v1::Job>(
      std::min(timeout_, kSoon),
      [&](const auto& channel, grpc::ClientContext* context, auto* queue) {
        return v1::JobService::NewStub(channel)->AsyncGetJob(context, request, queue);
      });
  const int lead = job.homes().empty() ? 0 : job.homes(0);
  if (lead >= 0 && lead < static_cast<int>(answers.size()) && answers[lead].ok() &&
      answers[lead]->members_size() == job.members_size()) {
    *job.mutable_members() = answers[lead]->members();
    if (!answers[lead]->waits_for().empty()) job.set_waits_for(answers[lead]->waits_for());
  }
  job.clear_ranks();
  job.set_home_ranks(0);
  job.set_attached_ranks(0);
  for (int i = 0; i < static_cast<int>(answers.size()); ++i) {
    v1::JobMember& member = *job.mutable_members(i);
    if (!answers[i].ok()) {
      member.set_problem(std::string(answers[i].status().message()));
      continue;
    }
    member.set_memory_bytes(answers[i]->memory().total_bytes());
    job.mutable_ranks()->MergeFrom(answers[i]->ranks());
    job.set_home_ranks(job.home_ranks() + answers[i]->home_ranks());
    job.set_attached_ranks(job.attached_ranks() + answers[i]->attached_ranks());
  }
  std::sort(job.mutable_ranks()->begin(), job.mutable_ranks()->end(),
            [](const auto& a, const auto& b) { return a.rank() < b.rank(); });
}

}  // namespace ballast::client
