#include "server/members/member_links.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ballast/v1/members.grpc.pb.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/members/words.h"
#include "cpu_optimizer_service/job/members/words_codec.h"
#include "proto/convert.h"
#include "proto/status.h"
#include "server/members/outgoing_words.h"
#include "server/transport_settings.h"

namespace ballast::server {
namespace {

using Clock = std::chrono::steady_clock;

// How often links are looked at.
constexpr std::chrono::milliseconds kLinksEvery{50};
// Until a link that has ended is opened again: the first time, and at most.
constexpr std::chrono::milliseconds kFirstReconnect{50};
constexpr std::chrono::milliseconds kLongestReconnect{1000};
// How long a link may take to end by itself.
constexpr std::chrono::seconds kHangUpTimeout{5};
// How often the round trip of a link is measured: by a call that every service answers at once.
constexpr std::chrono::seconds kMeasureEvery{2};
constexpr std::chrono::seconds kMeasureTimeout{10};
constexpr char kMeasureBy[] = "/grpc.health.v1.Health/Check";

}  // namespace

// To one member of one job; of several calls, one after the other.
class MemberLinks::Link : public std::enable_shared_from_this<Link> {
 public:
  Link(MemberLinks& links, const std::shared_ptr<Job>& job, int member)
      : links_(links),
        address_(job->spec().members[member].address),
        name_(job->spec().name),
        member_(member),
        job_(job) {}

  void OpenIfDue() {
    {
      MutexLock lock(mutex_);
      if (hangs_up_ || is_open_ || Clock::now() < due_) return;
      is_open_ = true;
      opened_at_ = Clock::now();
    }
    const std::shared_ptr<Job> job = job_.lock();
    job != nullptr ? Open(*job) : Close();
  }
  void MeasureIfDue() {
    std::shared_ptr<Measure> measure;
    {
      MutexLock lock(mutex_);
      if (call_ == nullptr || !call_->is_answered || is_measuring_) return;
      if (hangs_up_ || Clock::now() < measure_due_) return;
      measure = measure_ = std::make_shared<Measure>(call_);
      is_measuring_ = true;
      measure_due_ = Clock::now() + kMeasureEvery;
    }
    // gRPC keeps no reference to it.
    measure->stub.UnaryCall(&measure->context, kMeasureBy, {}, &measure->request,
                            &measure->response, [measure = measure.get()](grpc::Status status) {
                              measure->call->link->Measured(*measure, status.ok());
                            });
  }
  void HangUp() {
    std::shared_ptr<Call> call;
    {
      MutexLock lock(mutex_);
      hangs_up_ = true;
      hung_up_at_ = Clock::now();
      call = call_;
    }
    if (call == nullptr) return;
    // What a member is not there to hear does not come to it later.
    call->is_answered ? call->words->End() : call->context.TryCancel();
  }
  void Cancel() {
    MutexLock lock(mutex_);
    hangs_up_ = true;
    if (call_ != nullptr) call_->context.TryCancel();
  }
  void AwaitEnd() {
    MutexLock lock(mutex_);
    while (is_open_ || is_measuring_) ended_.Wait(mutex_);
  }
  // It has ended for good. If it takes too long, it is cancelled.
  bool HasEnded() {
    MutexLock lock(mutex_);
    if (!is_open_ && !is_measuring_) return true;
    if (call_ != nullptr && Clock::now() > hung_up_at_ + kHangUpTimeout) call_->context.TryCancel();
    return false;
  }

 private:
  // One call. gRPC uses it until OnDone.
  struct Call final : grpc::ClientBidiReactor<v1::FollowRequest, v1::FollowResponse> {
    explicit Call(std::shared_ptr<Link> of) : link(std::move(of)) {}

    void OnReadDone(bool ok) override {
      if (ok) wrong = link->Hear(*this, response.word());
      if (ok && wrong.ok()) return StartRead(&response);
      if (ok) context.TryCancel();
      words->Close();  // From here on nothing begins outside of gRPC's calls back.
      RemoveHold();
    }
    void OnWriteDone(bool ok) override {
      if (ok) words->Written();
    }
    void OnDone(const grpc::Status& status) override {
      link->Ended(wrong.ok() ? proto::FromGrpc(status) : wrong);
    }

    const std::shared_ptr<Link> link;
    std::shared_ptr<grpc::Channel> channel;
    std::unique_ptr<v1::MemberService::Stub> stub;
    grpc::ClientContext context;
    v1::FollowRequest request;
    v1::FollowResponse response;
    std::shared_ptr<OutgoingWords<LeadWord>> words;
    std::optional<uint64_t> number;  // The job's for this link; once the member has answered.
    std::atomic<bool> is_answered = false;
    absl::Status wrong;
  };

  // One round trip on the call's connection. gRPC uses it until it is Measured.
  struct Measure {
    explicit Measure(std::shared_ptr<Call> of) : call(std::move(of)), stub(call->channel) {
      context.set_deadline(std::chrono::system_clock::now() + kMeasureTimeout);
    }

    const std::shared_ptr<Call> call;
    grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub;
    grpc::ClientContext context;
    const grpc::Slice nothing;
    grpc::ByteBuffer request = grpc::ByteBuffer(&nothing, 1);
    grpc::ByteBuffer response;
    const Clock::time_point begin = Clock::now();
  };

  void Measured(const Measure& measure, bool ok) {
    const std::chrono::duration<double> took = Clock::now() - measure.begin;
    // Not on one of gRPC's own threads, as Ended says.
    links_.threads_.Run([self = shared_from_this(), ok, took] {
      std::shared_ptr<Measure> measured;
      {
        MutexLock lock(self->mutex_);
        measured = std::move(self->measure_);
      }
      if (const std::shared_ptr<Job> job = self->job_.lock(); ok && job != nullptr) {
        job->NoteRoundTrip(*measured->call->number, took.count());
      }
      measured.reset();
      MutexLock lock(self->mutex_);
      self->is_measuring_ = false;
      self->ended_.NotifyAll();
    });
  }

  void Open(Job& job) {
    std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
    if (!absl::StartsWith(address_, "unix:")) {
      if (!links_.credentials_.ok()) {
        job.CannotReach(member_, links_.credentials_.status());
        return Close();
      }
      credentials = *links_.credentials_;
    }
    auto call = std::make_shared<Call>(shared_from_this());
    call->channel = grpc::CreateCustomChannel(address_, credentials, MemberChannelArguments());
    call->stub = v1::MemberService::NewStub(call->channel);
    call->words = std::make_shared<OutgoingWords<LeadWord>>(
        [this](std::function<void()> task) { links_.threads_.Run(std::move(task)); },
        [call = call.get()](std::string bytes) {
          call->request.set_word(std::move(bytes));
          call->StartWrite(&call->request);
        },
        [call = call.get()] { call->StartWritesDone(); });
    call->request.mutable_open()->set_name(proto::JobName(name_));
    call->request.mutable_open()->set_format(kWordsFormat);
    call->request.mutable_open()->set_follow(Encode(job.FollowOf(member_)));
    call->stub->async()->Follow(&call->context, call.get());
    call->words->Begin();
    call->AddHold();
    {
      MutexLock lock(mutex_);
      call_ = call;
    }
    call->StartWrite(&call->request);
    call->StartRead(&call->response);
    call->StartCall();
    MutexLock lock(mutex_);
    if (hangs_up_) call->words->End();
  }

  absl::Status Hear(Call& call, const std::string& bytes) {
    const std::shared_ptr<Job> job = job_.lock();
    if (job == nullptr) return absl::CancelledError("the job is gone");
    BALLAST_ASSIGN_OR_RETURN(MemberWord word, DecodeMemberWord(bytes, job->spec()));
    if (!call.number.has_value()) {
      call.number = job->OpenLinkToMember(member_, call.words);
      call.is_answered = true;
      MutexLock lock(mutex_);
      told_ = "";
    }
    job->HearMember(member_, *call.number, std::move(word));
    return absl::OkStatus();
  }

  void Ended(const absl::Status& status) {
    std::shared_ptr<Call> call;
    {
      MutexLock lock(mutex_);
      call = std::move(call_);
      if (measure_ != nullptr) measure_->context.TryCancel();
    }
    const absl::Status why = status.ok() ? absl::UnavailableError("it has ended the link") : status;
    if (const std::shared_ptr<Job> job = job_.lock(); job != nullptr) {
      call->number.has_value() ? job->CloseLink(*call->number, why)
                               : job->CannotReach(member_, why);
    }
    Tell(why);
    // gRPC 1.51 aborts if one of its own threads destroys the last channel.
    links_.threads_.Run([self = shared_from_this(), call = std::move(call)]() mutable {
      call.reset();
      self->Close();
    });
  }
  // The log has each reason once.
  void Tell(const absl::Status& why) {
    MutexLock lock(mutex_);
    if (hangs_up_ || told_ == why.message()) return;
    told_ = std::string(why.message());
    spdlog::warn("job {} has no link to member {}: {}", name_, address_, told_);
  }
  void Close() {
    MutexLock lock(mutex_);
    call_.reset();
    is_open_ = false;
    const bool was_short = Clock::now() - opened_at_ < kLongestReconnect;
    pause_ = was_short ? std::min(2 * pause_, kLongestReconnect) : kFirstReconnect;
    due_ = Clock::now() + pause_;
    ended_.NotifyAll();
  }

  MemberLinks& links_;
  const std::string address_;
  const std::string name_;
  const int member_;
  const std::weak_ptr<Job> job_;  // The engine keeps it until it hangs up.
  Mutex mutex_;
  CondVar ended_;
  std::shared_ptr<Call> call_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Measure> measure_ ABSL_GUARDED_BY(mutex_);
  bool is_measuring_ ABSL_GUARDED_BY(mutex_) = false;
  Clock::time_point measure_due_ ABSL_GUARDED_BY(mutex_);
  bool is_open_ ABSL_GUARDED_BY(mutex_) = false;
  bool hangs_up_ ABSL_GUARDED_BY(mutex_) = false;
  Clock::time_point hung_up_at_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point opened_at_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point due_ ABSL_GUARDED_BY(mutex_);
  std::chrono::milliseconds pause_ ABSL_GUARDED_BY(mutex_) = kFirstReconnect;
  std::string told_ ABSL_GUARDED_BY(mutex_);
};

void MemberLinks::Dial(std::shared_ptr<Job> job) {
  std::vector<std::shared_ptr<Link>> made;
  for (int member = 0; member < job->spec().member_count(); ++member) {
    if (member != job->spec().lead()) made.push_back(std::make_shared<Link>(*this, job, member));
  }
  {
    MutexLock lock(mutex_);
    if (stopped_ || !links_.try_emplace(job->uid(), made).second) return;
    if (thread_ == nullptr) {
      thread_ = std::make_unique<PeriodicThread>("member-links", kLinksEvery, [this] { Look(); });
    }
  }
  for (const auto& link : made) link->OpenIfDue();
}

void MemberLinks::HangUp(const Job& job) {
  MutexLock lock(mutex_);
  auto found = links_.extract(job.uid());
  if (found.empty()) return;
  for (const auto& link : found.mapped()) {
    link->HangUp();
    ending_.push_back(link);
  }
}

void MemberLinks::Look() {
  std::vector<std::shared_ptr<Link>> all;
  {
    MutexLock lock(mutex_);
    for (const auto& [uid, links] : links_) all.insert(all.end(), links.begin(), links.end());
    std::erase_if(ending_, [](const auto& link) { return link->HasEnded(); });
  }
  for (const auto& link : all) {
    link->OpenIfDue();
    link->MeasureIfDue();
  }
}

void MemberLinks::Stop() {
  std::unique_ptr<PeriodicThread> thread;
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    thread.swap(thread_);
  }
  thread.reset();
  std::vector<std::shared_ptr<Link>> all;
  {
    MutexLock lock(mutex_);
    all = std::move(ending_);
    for (const auto& [uid, links] : links_) all.insert(all.end(), links.begin(), links.end());
  }
  for (const auto& link : all) link->Cancel();
  for (const auto& link : all) link->AwaitEnd();
}

}  // namespace ballast::server
