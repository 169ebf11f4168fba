// The log of what a rank has sent in a step and the service has not acknowledged: control messages
// and gradients, in order. It numbers the messages of a stream (each gradient counts as one, also
// where several go in one), bounds the payload bytes that are unacknowledged, and sends again on a
// new stream what the service does not hold.
//
// Each payload is borrowed twice: by the service until it holds it, and by the transport until it
// lets go. `released` runs when both have ended, or at once when nothing was logged; exactly once
// in every case, however often the payload was sent, and with no lock held.
//
// Thread-safe.
#ifndef BALLAST_CLIENT_SESSION_SEND_LOG_H_
#define BALLAST_CLIENT_SESSION_SEND_LOG_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/v1/ballast.pb.h"
#include "client/transport/transport.h"
#include "cpu_optimizer_service/common/mutex.h"

namespace ballast::client {

class SendLog {
 public:
  // `send_timeout` bounds how long SendGradient waits for room.
  explicit SendLog(int64_t limit_bytes, absl::Duration send_timeout = absl::InfiniteDuration());
  // Waits until the transport has let go of every payload: their owner may go away after this.
  // Without a limit of its own, because memory that the kernel still reads cannot be taken back:
  // the owner ends the stream first, which drops all but the bytes of a write in progress, and the
  // connection's keepalive ends that one (connect.h says when).
  ~SendLog();

  // Logs a message, and sends it if there is a stream. Never blocks. The status given to Close, if
  // it was closed.
  absl::Status Send(v1::TrainRequest message);
  // The same for a gradient. Blocks while other bytes are unacknowledged and these would pass the
  // limit; DEADLINE_EXCEEDED, and nothing logged, if that lasts.
  absl::Status SendGradient(const v1::GradientHeader& header, absl::Span<const std::byte> payload,
                            std::function<void()> released);

  // The same for a gradient in shared memory, which takes no room and is lent to the service alone.
  // Never blocks.
  absl::Status SendSharedGradient(const v1::GradientHeader& header, std::function<void()> released);

  // The service holds the first `messages` messages of the stream, whose open message is the first.
  // INTERNAL if there were not so many.
  absl::Status Acknowledge(uint64_t messages);
  // A seal is kept beyond its acknowledgement, because its answer may be lost with the stream:
  // until it was refused, or the step decided.
  void SealRefused();
  // The service holds all that was logged, acknowledged or not: every rank's seal was taken.
  void StepDecided();

  // From now on messages are only logged. No acknowledgement of the old stream comes after this.
  void Detach();
  // Sends again, on a stream that has carried its open message, what its answer does not show to be
  // held, and all later messages on it. `stream` lives until Detach.
  struct Resumed {
    int64_t sent = 0;
    int64_t held = 0;  // Forgotten, and their payloads given back.
  };
  Resumed Resume(TrainCall& stream, const v1::Opened& opened);

  // Wakes and refuses all senders with `status`, and waits for no more acknowledgements. The first
  // status stays.
  void Close(const absl::Status& status);

  int64_t unacknowledged_bytes() const;

 private:
  class Borrowed;  // Runs `released` when its last owner lets go.
  struct Lent;     // Counts payloads that somebody borrows.
  struct Entry {
    uint64_t number = 0;       // On the stream; 0: not sent on it.
    v1::TrainRequest message;  // Of a gradient, the header.
    absl::Span<const std::byte> payload;
    std::shared_ptr<Borrowed> borrowed;  // Null for a control message.
    bool shared = false;                 // A gradient in shared memory.
  };

  void LogAndSend(Entry entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendOnStream(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t limit_bytes_;
  const absl::Duration send_timeout_;
  const std::shared_ptr<Lent> lent_;
  mutable Mutex mutex_;
  CondVar room_;
  TrainCall* stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  uint64_t sent_ ABSL_GUARDED_BY(mutex_) = 1;  // On the stream, the open message included.
  int64_t unacknowledged_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::TrainRequest> seal_ ABSL_GUARDED_BY(mutex_);  // The last one, not answered.
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_SEND_LOG_H_
