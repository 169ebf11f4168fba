#include "client/send_window.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/steady_deadline.h"

namespace ballast::client {

struct SendWindow::Lent {
  Mutex mutex;
  CondVar returned;
  int64_t payloads ABSL_GUARDED_BY(mutex) = 0;
};

class SendWindow::Borrowed {
 public:
  Borrowed(std::shared_ptr<Lent> lent, std::function<void()> released)
      : lent_(std::move(lent)), released_(std::move(released)) {
    MutexLock lock(lent_->mutex);
    ++lent_->payloads;
  }
  ~Borrowed() {
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

SendWindow::SendWindow(int64_t limit_bytes, absl::Duration send_timeout)
    : limit_bytes_(limit_bytes), send_timeout_(send_timeout), lent_(std::make_shared<Lent>()) {}

SendWindow::~SendWindow() {
  Close(absl::CancelledError("the session was closed"));
  MutexLock lock(lent_->mutex);
  while (lent_->payloads > 0) lent_->returned.Wait(lent_->mutex);
}

absl::Status SendWindow::Send(int64_t bytes, std::function<void()> released,
                              const std::function<void(std::function<void()> let_go)>& send) {
  // Before the lock, so that it is destroyed after it.
  auto payload = std::make_shared<Borrowed>(lent_, std::move(released));
  const auto deadline = SteadyDeadline(send_timeout_);
  MutexLock lock(mutex_);
  bool in_time = true;
  // A payload larger than the whole window passes alone.
  while (closed_.ok() && unacknowledged_bytes_ > 0 &&
         unacknowledged_bytes_ + bytes > limit_bytes_) {
    if (!in_time) {
      return absl::DeadlineExceededError(absl::StrCat("the service left ", unacknowledged_bytes_,
                                                      " payload bytes unacknowledged for ",
                                                      absl::FormatDuration(send_timeout_)));
    }
    in_time = room_.WaitUntil(mutex_, deadline);
  }
  if (!closed_.ok()) return closed_;
  unacknowledged_.push_back({++sent_, bytes, payload});
  unacknowledged_bytes_ += bytes;
  send([payload]() mutable { payload.reset(); });
  return absl::OkStatus();
}

absl::Status SendWindow::SendControl(const std::function<void()>& send) {
  MutexLock lock(mutex_);
  if (!closed_.ok()) return closed_;
  ++sent_;
  send();
  return absl::OkStatus();
}

absl::Status SendWindow::Acknowledge(uint64_t messages) {
  std::vector<Entry> done;  // Destroyed after the lock: `released` may call back.
  MutexLock lock(mutex_);
  if (messages > sent_) {
    return absl::InternalError(absl::StrCat("the service acknowledged ", messages,
                                            " messages of a stream that carried ", sent_));
  }
  while (!unacknowledged_.empty() && unacknowledged_.front().number <= messages) {
    unacknowledged_bytes_ -= unacknowledged_.front().bytes;
    done.push_back(std::move(unacknowledged_.front()));
    unacknowledged_.pop_front();
  }
  room_.NotifyAll();
  return absl::OkStatus();
}

void SendWindow::Close(const absl::Status& status) {
  std::deque<Entry> dropped;  // Destroyed after the lock.
  MutexLock lock(mutex_);
  if (!closed_.ok()) return;
  closed_ = status;
  dropped.swap(unacknowledged_);
  unacknowledged_bytes_ = 0;
  room_.NotifyAll();
}

int64_t SendWindow::unacknowledged_bytes() const {
  MutexLock lock(mutex_);
  return unacknowledged_bytes_;
}

}  // namespace ballast::client
