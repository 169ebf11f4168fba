#include "client/session/send_log.h"

#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "client/transport/steady_deadline.h"

namespace ballast::client {
namespace {

// What the service has of the step that the rank has begun, as a new stream's answer shows it.
class ArrivedAtService {
 public:
  explicit ArrivedAtService(const v1::Opened& opened)
      : step_(opened.open_step()),
        at_(opened.committed_step() + 1, opened.attempt()),
        micro_steps_ended_(opened.micro_steps_ended()) {
    for (const v1::ChunkCount& count : opened.delivered()) {
      next_micro_step_[count.chunk()] = count.next_micro_step();
    }
  }

  bool Has(const v1::TrainRequest& message) const {
    if (IsDiscarded(message)) return true;
    switch (message.kind_case()) {
      case v1::TrainRequest::kBeginStep:
        return message.begin_step().step() == step_;
      // Also one in shared memory, which is logged with the same header.
      case v1::TrainRequest::kGradient: {
        const v1::GradientHeader& header = message.gradient().header();
        const auto next = next_micro_step_.find(header.chunk());
        return header.step() == step_ && next != next_micro_step_.end() &&
               next->second >= header.micro_step_end();
      }
      case v1::TrainRequest::kEndMicroStep:
        return message.end_micro_step().step() == step_ &&
               message.end_micro_step().micro_step() < micro_steps_ended_;
      default:
        return false;
    }
  }

 private:
  template <typename Message>
  bool IsDiscarded(const Message& message) const {
    return message.step() == at_.step && message.attempt() < at_.attempt;
  }
  bool IsDiscarded(const v1::TrainRequest& message) const {
    switch (message.kind_case()) {
      case v1::TrainRequest::kBeginStep:
        return IsDiscarded(message.begin_step());
      case v1::TrainRequest::kGradient:
        return IsDiscarded(message.gradient().header());
      case v1::TrainRequest::kEndMicroStep:
        return IsDiscarded(message.end_micro_step());
      default:
        return false;
    }
  }

  const uint64_t step_;  // That the rank has begun in this attempt:
  const StepAttempt at_;
  const uint32_t micro_steps_ended_;
  absl::flat_hash_map<uint32_t, uint32_t> next_micro_step_;  // By chunk.
};

}  // namespace

// Shared by all Borrowed, because the last one still unlocks it when ~SendLog may return.
struct SendLog::Lent {
  Mutex mutex;
  CondVar returned;
  int64_t payloads ABSL_GUARDED_BY(mutex) = 0;
};

class SendLog::Borrowed {
 public:
  Borrowed(std::shared_ptr<Lent> lent, std::function<void()> released)
      : lent_(std::move(lent)), released_(std::move(released)) {
    MutexLock lock(lent_->mutex);
    ++lent_->payloads;
  }
  ~Borrowed() {
    // Before the count, so that ~SendLog returns after the last of these calls.
    if (released_) released_();
    MutexLock lock(lent_->mutex);
    --lent_->payloads;
    lent_->returned.NotifyAll();
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

 private:
  const std::shared_ptr<Lent> lent_;
  const std::function<void()> released_;
};

SendLog::SendLog(int64_t limit_bytes, absl::Duration send_timeout)
    : limit_bytes_(limit_bytes), send_timeout_(send_timeout), lent_(std::make_shared<Lent>()) {}

SendLog::~SendLog() {
  Close(absl::CancelledError("the session was closed"));
  MutexLock lock(lent_->mutex);
  while (lent_->payloads > 0) lent_->returned.Wait(lent_->mutex);
}

void SendLog::SendOnStream(Entry& entry) {
  entry.number = ++sent_;
  if (entry.borrowed == nullptr) {
    stream_->Send(entry.message);
  } else if (!entry.shared.empty()) {
    stream_->SendSharedGradient(entry.message.gradient().header());
  } else {
    // Two owners: the entry until the service has the bytes, the stream until it lets go of them.
    stream_->SendGradient(entry.message.gradient().header(), entry.payload,
                          [borrowed = entry.borrowed]() mutable { borrowed.reset(); });
  }
}

void SendLog::LogAndSend(Entry entry) {
  if (entry.message.has_vote()) {
    v1::CastVote& cast = *entry.message.mutable_vote();
    cast.mutable_vote()->set_refusals(vote_refusals_.Of({cast.step(), cast.attempt()}));
  } else if (entry.message.seal().has_vote()) {
    v1::Seal& seal = *entry.message.mutable_seal();
    seal.mutable_vote()->set_refusals(vote_refusals_.Of({seal.step(), seal.attempt()}));
  }
  // Logged before it is sent: a stream that drops the payload at once must not be its last owner,
  // because `released` may not run while the lock is held.
  entries_.push_back(std::move(entry));
  if (stream_ != nullptr) SendOnStream(entries_.back());
}

absl::Status SendLog::Send(v1::TrainRequest message) {
  MutexLock lock(mutex_);
  if (!closed_.ok()) return closed_;
  if (message.has_seal()) seal_ = message;
  if (message.has_vote()) vote_ = message;
  if (message.has_discard()) {
    seal_.reset();  // Of what is discarded.
    vote_.reset();
    discard_ = message;
  }
  LogAndSend({.message = std::move(message)});
  return absl::OkStatus();
}

absl::Status SendLog::SendGradient(const v1::GradientHeader& header,
                                   absl::Span<const std::byte> payload,
                                   std::function<void()> released) {
  // Constructed before the lock is taken, so that it is destroyed after the lock is released.
  auto borrowed = std::make_shared<Borrowed>(lent_, std::move(released));
  const auto bytes = static_cast<int64_t>(payload.size());
  const auto deadline = SteadyDeadline(send_timeout_);
  MutexLock lock(mutex_);
  bool in_time = true;
  // A payload larger than the whole window is sent alone.
  while (closed_.ok() && unacknowledged_bytes_ > 0 &&
         unacknowledged_bytes_ + bytes > limit_bytes_) {
    // Looked at after the condition, which may have come true with the deadline.
    if (!in_time) {
      return absl::DeadlineExceededError(absl::StrCat("the service left ", unacknowledged_bytes_,
                                                      " payload bytes unacknowledged for ",
                                                      absl::FormatDuration(send_timeout_)));
    }
    in_time = room_.WaitUntil(mutex_, deadline);
  }
  if (!closed_.ok()) return closed_;
  Entry entry{.payload = payload, .borrowed = borrowed};
  *entry.message.mutable_gradient()->mutable_header() = header;
  unacknowledged_bytes_ += bytes;
  LogAndSend(std::move(entry));
  return absl::OkStatus();
}

absl::Status SendLog::SendSharedGradient(const v1::GradientHeader& header,
                                         absl::Span<const std::byte> place,
                                         std::function<void()> released) {
  {
    // Declared before the lock is taken, so that it is destroyed after the lock is released.
    std::shared_ptr<Borrowed> borrowed;
    MutexLock lock(mutex_);
    // Tested under the lock under which it is logged: SharesNothing turns what is logged before it
    // into gradients with bytes, and nothing may be logged as shared after it.
    if (!shares_nothing_) {
      borrowed = std::make_shared<Borrowed>(lent_, std::move(released));
      if (!closed_.ok()) return closed_;
      Entry entry{.borrowed = borrowed, .shared = place};
      *entry.message.mutable_gradient()->mutable_header() = header;
      LogAndSend(std::move(entry));
      return absl::OkStatus();
    }
  }
  // Without the lock, because this may wait for room.
  return SendGradient(header, place, std::move(released));
}

void SendLog::SharesNothing() {
  MutexLock lock(mutex_);
  shares_nothing_ = true;
  for (Entry& entry : entries_) {
    // They may exceed the window, which then only holds back later gradients.
    unacknowledged_bytes_ += static_cast<int64_t>(entry.shared.size());
    if (!entry.shared.empty()) entry.payload = std::exchange(entry.shared, {});
  }
}

absl::Status SendLog::Acknowledge(uint64_t messages) {
  std::vector<Entry> done;  // Destroyed without the lock: `released` may call back.
  MutexLock lock(mutex_);
  // A count beyond this would release payloads that the service does not have.
  if (messages > sent_) {
    return absl::InternalError(absl::StrCat("the service acknowledged ", messages,
                                            " messages of a stream that carried ", sent_));
  }
  // Entries with number 0 were not sent on this stream, so the count does not include them.
  while (!entries_.empty() && entries_.front().number != 0 && entries_.front().number <= messages) {
    unacknowledged_bytes_ -= static_cast<int64_t>(entries_.front().payload.size());
    done.push_back(std::move(entries_.front()));
    entries_.pop_front();
  }
  room_.NotifyAll();
  return absl::OkStatus();
}

void SendLog::SealRefused(StepAttempt at) {
  MutexLock lock(mutex_);
  if (!seal_.has_value()) return;
  // The refusal of an older attempt's may come late.
  if (StepAttempt(seal_->seal().step(), seal_->seal().attempt()) != at) return;
  // A vote was on the norm of this seal, and is void with it.
  seal_.reset();
  vote_.reset();
}

void SendLog::VoteRefused(StepAttempt at) {
  MutexLock lock(mutex_);
  vote_refusals_.Add(at);
  if (seal_.has_value() && StepAttempt(seal_->seal().step(), seal_->seal().attempt()) == at) {
    // Sent again on a new stream, the seal would otherwise cast the void vote once more.
    seal_->mutable_seal()->clear_vote();
  }
  if (vote_.has_value() && StepAttempt(vote_->vote().step(), vote_->vote().attempt()) == at) {
    vote_.reset();
  }
}

std::deque<SendLog::Entry> SendLog::TakeAll() {
  seal_.reset();
  vote_.reset();
  discard_.reset();
  unacknowledged_bytes_ = 0;
  room_.NotifyAll();
  return std::exchange(entries_, {});
}

void SendLog::Discarded() {
  std::deque<Entry> done;  // Destroyed without the lock.
  MutexLock lock(mutex_);
  done = TakeAll();
}

void SendLog::StepDecided() {
  // Also for entries that were not acknowledged: the service decides only when it has all of them.
  std::deque<Entry> done;  // Destroyed without the lock.
  MutexLock lock(mutex_);
  done = TakeAll();
}

void SendLog::Detach() {
  MutexLock lock(mutex_);
  stream_ = nullptr;
  sent_ = 1;  // The open message of the next stream, which does not go through the log.
  vote_refusals_ = {};
  for (Entry& entry : entries_) entry.number = 0;
}

SendLog::Resumed SendLog::Resume(TrainCall& stream, const v1::Opened& opened) {
  const ArrivedAtService arrived(opened);
  std::deque<Entry> before;  // Destroyed without the lock.
  Resumed resumed;
  MutexLock lock(mutex_);
  if (!closed_.ok()) return resumed;
  stream_ = &stream;
  // LogAndSend appends to entries_: what is sent again is logged anew, in its old order.
  before.swap(entries_);
  for (Entry& entry : before) {
    // The last ones are sent below.
    const v1::TrainRequest& message = entry.message;
    if (message.has_seal() || message.has_vote() || message.has_discard()) continue;
    if (arrived.Has(entry.message)) {
      ++resumed.arrived;
      unacknowledged_bytes_ -= static_cast<int64_t>(entry.payload.size());
    } else {
      ++resumed.sent;
      LogAndSend(std::move(entry));
    }
  }
  // After the gradients, and in this order: a seal is refused before what it seals is there, and a
  // vote before its seal.
  // A seal of a step that is over is not sent again.
  if (seal_.has_value() && seal_->seal().step() > opened.committed_step()) {
    ++resumed.sent;
    LogAndSend({.message = *seal_});
  }
  if (vote_.has_value() && vote_->vote().step() > opened.committed_step()) {
    ++resumed.sent;
    LogAndSend({.message = *vote_});
  }
  // Also if the service has it: the answer may be lost.
  if (discard_.has_value() && discard_->discard().step() > opened.committed_step()) {
    ++resumed.sent;
    LogAndSend({.message = *discard_});
  }
  room_.NotifyAll();
  return resumed;
}

void SendLog::Close(const absl::Status& status) {
  std::deque<Entry> dropped;  // Destroyed without the lock.
  MutexLock lock(mutex_);
  if (!closed_.ok()) return;
  closed_ = status;
  // What the transport is still reading stays borrowed until it lets go.
  dropped.swap(entries_);
  unacknowledged_bytes_ = 0;
  room_.NotifyAll();
}

int64_t SendLog::unacknowledged_bytes() const {
  MutexLock lock(mutex_);
  return unacknowledged_bytes_;
}

}  // namespace ballast::client
