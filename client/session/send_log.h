// The log of a rank's messages in a step that the service has not acknowledged: control messages
// and gradients, in order. It numbers the messages of a stream; each gradient counts as one, even
// if one message carries several. It bounds the unacknowledged payload bytes. On a new stream it
// resends what the service lacks.
//
// Each payload is borrowed twice: until the service has it, and until the transport no longer uses
// it. `released` runs when both have ended, or at once if nothing was logged. It always runs
// exactly once, however often the payload was sent, without a lock.
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
#include "ballast/v1/train.pb.h"
#include "client/transport/transport.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {

class SendLog {
 public:
  // `send_timeout` bounds how long SendGradient waits for room.
  explicit SendLog(int64_t limit_bytes, absl::Duration send_timeout = absl::InfiniteDuration());
  // Waits until the transport no longer uses any payload; after that their owner may be destroyed.
  // The wait has no limit of its own, because memory that the kernel still reads cannot be taken
  // back. The owner ends the stream first, which drops everything except the bytes of a write in
  // progress, and the connection's keepalive ends that write (client/connect.h).
  ~SendLog();

  // Logs a message, and sends it if there is a stream. Never blocks. After Close: Close's status.
  absl::Status Send(v1::TrainRequest message);
  // The same for a gradient. Blocks while other bytes are unacknowledged and these would exceed the
  // limit. DEADLINE_EXCEEDED, and nothing is logged, if that lasts for `send_timeout`.
  absl::Status SendGradient(const v1::GradientHeader& header, absl::Span<const std::byte> payload,
                            std::function<void()> released);

  // The same for a gradient in shared memory, at `place`. It needs no room, and only the service
  // borrows it. Never blocks, unless SharesNothing.
  absl::Status SendSharedGradient(const v1::GradientHeader& header,
                                  absl::Span<const std::byte> place,
                                  std::function<void()> released);
  // The service has lost the shared memory: from now on, and on the next stream, all gradients are
  // sent. Call it while there is no stream.
  void SharesNothing();

  // The service has the first `messages` messages of the stream, including the open message.
  // INTERNAL if the stream carried fewer.
  absl::Status Acknowledge(uint64_t messages);
  // A seal is kept after its acknowledgement, because its answer may be lost with the stream. It is
  // kept until it is refused, discarded, or the step is decided. A vote and a discard are kept
  // likewise.
  void SealRefused(StepAttempt at);
  // The same for a vote, including a vote in a seal. Later votes say that they know of it.
  void VoteRefused(StepAttempt at);
  // The answer to a discard: the service has handled everything logged before, and has dropped it.
  // Until then the caller logs nothing of the next attempt.
  void Discarded();
  // The service has everything that was logged, acknowledged or not, because it has accepted
  // every rank's seal.
  void StepDecided();

  // From now on messages are only logged. The caller passes on no later acknowledgement of the old
  // stream.
  void Detach();
  // Uses `stream`, which has carried its open message, from now on. Sends again every logged
  // message that the answer, `opened`, does not show to have arrived. `stream` lives until Detach.
  struct Resumed {
    int64_t sent = 0;
    int64_t arrived = 0;  // Removed from the log; their payloads are released.
  };
  Resumed Resume(TrainCall& stream, const v1::Opened& opened);

  // Wakes all senders and refuses them with `status`; expects no more acknowledgements. The first
  // status stays.
  void Close(const absl::Status& status);

  int64_t unacknowledged_bytes() const;

 private:
  class Borrowed;  // Runs `released` when its last owner is gone.
  struct Lent;     // Counts the payloads that are borrowed.
  struct Entry {
    uint64_t number = 0;       // In the stream; 0: not sent on it.
    v1::TrainRequest message;  // For a gradient, only its header.
    absl::Span<const std::byte> payload;
    std::shared_ptr<Borrowed> borrowed;  // Null for a control message.
    absl::Span<const std::byte> shared;  // A gradient's place in shared memory.
  };

  void LogAndSend(Entry entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendOnStream(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The service needs none of them any more. They are destroyed by the caller, without the lock.
  std::deque<Entry> TakeAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t limit_bytes_;
  const absl::Duration send_timeout_;
  const std::shared_ptr<Lent> lent_;
  mutable Mutex mutex_;
  CondVar room_;
  TrainCall* stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  uint64_t sent_ ABSL_GUARDED_BY(mutex_) = 1;  // On the stream, with the open message.
  int64_t unacknowledged_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  bool shares_nothing_ ABSL_GUARDED_BY(mutex_) = false;
  // The last ones, unanswered.
  std::optional<v1::TrainRequest> seal_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::TrainRequest> vote_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::TrainRequest> discard_ ABSL_GUARDED_BY(mutex_);
  VoteRefusals vote_refusals_ ABSL_GUARDED_BY(mutex_);  // That the stream has brought.
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_SEND_LOG_H_
