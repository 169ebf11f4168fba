// Keeps a rank's stream with the service: when it breaks, takes the rank again, opens another
// stream and sends again what the service does not hold, so that above here there is one stream.
//
// A stream that ends with a status that only the way to the service can explain (UNAVAILABLE,
// CANCELLED, UNKNOWN, INTERNAL, DEADLINE_EXCEEDED, or OK) broke. Any other status is the service's
// word, and the end. So is a rank that another process has taken, a generation that rose, and
// another instance of the service, which does not have the undecided step.
//
// Threads: the stream's own thread brings what the service says; a thread of the keeper reopens.
// Of these one at a time calls the user, except for OnEnded.
#ifndef BALLAST_CLIENT_SESSION_STREAM_KEEPER_H_
#define BALLAST_CLIENT_SESSION_STREAM_KEEPER_H_

#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/session/retry.h"
#include "client/session/send_log.h"
#include "client/transport/clock.h"
#include "client/transport/transport.h"
#include "cpu_optimizer_service/common/mutex.h"

namespace ballast::client {

class StreamKeeper final : private TrainListener {
 public:
  class User {
   public:
    virtual ~User() = default;
    // What the service says, besides Opened and acknowledgements. An error is the end.
    virtual absl::Status OnMessage(const v1::TrainResponse& message, PayloadPieces payload) = 0;
    // The stream broke, and the rank is attached again. Nothing more comes of what the old stream
    // has not brought. Returns within `limit`. An error with one of the statuses above is tried
    // again; any other is the end.
    virtual absl::Status OnAttachedAgain(const v1::AttachWorkerResponse& attached,
                                         absl::Duration limit) = 0;
    // The end, once: nothing comes any more. From any thread of the keeper.
    virtual void OnEnded(const absl::Status& status) = 0;
    virtual std::string Context() const = 0;  // For lines in the log.
  };

  struct Settings {
    v1::OpenTrain open;
    std::string instance_id;      // Of the service that the rank attached to,
    uint64_t committed_step = 0;  // which stood there.
    absl::Duration reconnect_timeout;
  };

  // Borrows everything.
  StreamKeeper(Transport& transport, Clock& clock, SendLog& log, User& user, Settings settings);
  // Ends the stream, and the transport's calls, so that it waits for nobody. The user may still
  // hear something before this returns, not after it.
  ~StreamKeeper() override;

  // The first time. An error is final, and OnEnded is not called. UNAVAILABLE also if the service
  // has left the step at which it stood.
  absl::Status Open(absl::Duration limit);
  // Reopens nothing any more, and passes no message on. Does not wait.
  void Stop();

 private:
  void OnMessage(const v1::TrainResponse& message, PayloadPieces payload) override;
  void OnClosed(const absl::Status& status) override;
  // True if it is to be tried again.
  bool MayHeal(const absl::Status& status) const;
  void End(const absl::Status& status);

  void Run();
  bool AwaitBreak();
  void Reopen();
  absl::Status TryToReopen(absl::Duration limit);
  absl::StatusOr<v1::AttachWorkerResponse> AttachAgain(absl::Duration limit);
  absl::StatusOr<v1::Opened> OpenStream(absl::Duration limit);
  void DropStream();
  // False if the keeper was stopped meanwhile.
  bool Sleep(absl::Duration duration);

  Transport& transport_;
  Clock& clock_;
  SendLog& log_;
  User& user_;
  const Settings settings_;

  // Of whoever opens: the owner's thread at first, then the keeper's.
  std::unique_ptr<TrainCall> stream_;
  // One outage lasts until the service has taken something on a new stream, or that has stood for a
  // while, so that what breaks every stream is not tried for ever.
  std::optional<Backoff> outage_;
  absl::Time open_since_;  // The stream.

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status why_stopping_ ABSL_GUARDED_BY(mutex_) =
      absl::CancelledError("the session was closed");  // Unless the stream ended.
  bool outage_is_over_ ABSL_GUARDED_BY(mutex_) = true;
  std::optional<v1::Opened> opened_ ABSL_GUARDED_BY(mutex_);    // Of the stream.
  std::optional<absl::Status> closed_ ABSL_GUARDED_BY(mutex_);  // How it ended.

  std::thread thread_;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_STREAM_KEEPER_H_
