// Keeps a rank's stream with the service. When the stream breaks, the keeper takes the rank again,
// opens another stream and resends what the service lacks. Its user sees one stream.
//
// A stream is broken if it ended with a status that a problem on the way to the service can explain
// (UNAVAILABLE, CANCELLED, UNKNOWN, INTERNAL, DEADLINE_EXCEEDED, or OK). Any other status is the
// service's own and ends the session. The session also ends if another process has taken the rank,
// or the generation has risen. A new instance of the service with the job, by its uid, has it as
// the crashed one left it, with everything given to the step in progress.
//
// Threads: the stream's own thread delivers messages; a thread of the keeper reopens. Only one of
// the two calls the user at a time, except for OnEnded.
#ifndef BALLAST_CLIENT_SESSION_STREAM_KEEPER_H_
#define BALLAST_CLIENT_SESSION_STREAM_KEEPER_H_

#include <atomic>
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
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {

class StreamKeeper final : private TrainListener {
 public:
  class User {
   public:
    virtual ~User() = default;
    // A message of the service other than Opened and acknowledgements. An error ends the session.
    virtual absl::Status OnMessage(const v1::TrainResponse& message, PayloadPieces payload) = 0;
    // The stream broke, and the rank is attached again. Messages that the old stream has not
    // delivered are lost. Returns within `limit`. After an error with one of the statuses above it
    // is called again; any other error ends the session.
    virtual absl::Status OnAttachedAgain(const v1::AttachWorkerResponse& attached,
                                         absl::Duration limit) = 0;
    // The stream is open, after the attachment before it. Errors as above.
    virtual absl::Status OnOpened(const v1::Opened& opened, absl::Duration limit) = 0;
    // The end: called once, and no message is delivered after it. From any thread of the keeper.
    virtual void OnEnded(const absl::Status& status) = 0;
    virtual std::string Context() const = 0;  // For lines in the log.
  };

  struct Settings {
    v1::OpenTrain open;
    std::string instance_id;      // The instance of the service that the rank attached to.
    uint64_t committed_step = 0;  // The committed step at that time.
    absl::Duration reconnect_timeout;
  };

  // Borrows everything.
  StreamKeeper(Transport& transport, Clock& clock, SendLog& log, User& user, Settings settings);
  // Ends the stream and the transport's calls, so that it does not wait for the service. The user
  // may still be called before this returns, but not after it.
  ~StreamKeeper() override;

  // Opens the first stream. An error is final, and OnEnded is not called. UNAVAILABLE also if the
  // service is no longer at the committed step of the settings.
  absl::Status Open(absl::Duration limit);
  // From now on no stream is reopened and no message is delivered. Does not wait.
  void Stop();
  // Whether the service, as far as is known, has the memory that it shares with this rank. From any
  // thread.
  bool shares_memory() const { return shares_memory_; }

 private:
  void OnMessage(const v1::TrainResponse& message, PayloadPieces payload) override;
  void OnClosed(const absl::Status& status) override;
  // True if another attempt may succeed.
  bool MayHeal(const absl::Status& status) const;
  void End(const absl::Status& status);

  void Run();
  bool AwaitBreak();
  void Reopen();
  absl::Status TryToReopen(absl::Duration limit);
  void DoWithoutSharedMemory(const v1::Job& job);
  absl::StatusOr<v1::AttachWorkerResponse> AttachAgain(absl::Duration limit);
  absl::StatusOr<v1::Opened> OpenStream(uint64_t attached_step, absl::Duration limit);
  void DropStream();
  // False if the keeper was stopped during the sleep.
  bool Sleep(absl::Duration duration);

  Transport& transport_;
  Clock& clock_;
  SendLog& log_;
  User& user_;

  // Used by the thread that opens streams: first the owner's, then the keeper's.
  Settings settings_;
  std::atomic<bool> shares_memory_;
  std::unique_ptr<TrainCall> stream_;
  std::string instance_id_;  // The instance that the rank attached to last.
  bool restarting_ = false;  // The service announced a restart on the last stream.
  // An outage lasts until the service has acknowledged something on a new stream, or that stream
  // has lasted for a while. So a cause that breaks every stream is not retried forever.
  std::optional<Backoff> outage_;
  absl::Time open_since_;  // When the stream was opened.

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool opening_ ABSL_GUARDED_BY(mutex_) = true;  // Open has not returned OK.
  absl::Status why_stopping_ ABSL_GUARDED_BY(mutex_) =
      absl::CancelledError("the session was closed");  // Unless it ended.
  bool outage_is_over_ ABSL_GUARDED_BY(mutex_) = true;
  std::optional<v1::Opened> opened_ ABSL_GUARDED_BY(mutex_);    // The stream's.
  uint64_t attached_step_ ABSL_GUARDED_BY(mutex_) = 0;          // Before the stream was opened.
  std::optional<absl::Status> closed_ ABSL_GUARDED_BY(mutex_);  // The stream's end.

  std::thread thread_;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_STREAM_KEEPER_H_
