// Numbers the messages of a stream and bounds the payload bytes that the service has not
// acknowledged.
//
// Each payload is borrowed twice: by the service until it acknowledges, and by the transport until
// it lets go. `released` runs when both have ended, or at once when nothing was sent; exactly once
// in every case, and with no lock held.
//
// Thread-safe.
#ifndef BALLAST_CLIENT_SEND_WINDOW_H_
#define BALLAST_CLIENT_SEND_WINDOW_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/mutex.h"

namespace ballast::client {

class SendWindow {
 public:
  // `send_timeout` bounds how long a Send waits for room.
  explicit SendWindow(int64_t limit_bytes, absl::Duration send_timeout = absl::InfiniteDuration());
  // Waits until the transport has let go of every payload: their owner may go away after this.
  // Without a limit of its own, because memory that the kernel still reads cannot be taken back:
  // the owner ends the stream first, which drops all but the bytes of a write in progress, and the
  // connection's keepalive ends that one (connect.h says when).
  ~SendWindow();

  // Sends a message of `bytes` payload bytes. Blocks while other bytes are unacknowledged and these
  // would pass the limit; DEADLINE_EXCEEDED, and nothing sent, if that lasts. `send` runs under the
  // window's lock, in the order of the numbers, and passes on the let_go that it gets. The status
  // given to Close, if it was closed.
  absl::Status Send(int64_t bytes, std::function<void()> released,
                    const std::function<void(std::function<void()> let_go)>& send);
  // The same for a message without payload; never blocks.
  absl::Status SendControl(const std::function<void()>& send);

  // The service holds the first `messages` messages. INTERNAL if there were not so many.
  absl::Status Acknowledge(uint64_t messages);
  // Wakes and refuses all senders with `status`, and waits for no more acknowledgements. The first
  // status stays.
  void Close(const absl::Status& status);

  int64_t unacknowledged_bytes() const;

 private:
  class Borrowed;  // Runs `released` when its last owner lets go.
  struct Lent;     // Counts payloads that somebody borrows.
  struct Entry {
    uint64_t number;
    int64_t bytes;
    std::shared_ptr<Borrowed> payload;
  };

  const int64_t limit_bytes_;
  const absl::Duration send_timeout_;
  const std::shared_ptr<Lent> lent_;
  mutable Mutex mutex_;
  CondVar room_;
  uint64_t sent_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t unacknowledged_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Entry> unacknowledged_ ABSL_GUARDED_BY(mutex_);
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SEND_WINDOW_H_
