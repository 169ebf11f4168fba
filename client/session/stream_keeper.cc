#include "client/session/stream_keeper.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/session/log.h"
#include "client/transport/steady_deadline.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::client {
namespace {

// The error for the user of a stream that ended.
absl::Status WhyItEnded(const absl::Status& status) {
  return status.ok() ? absl::UnavailableError("the service ended the stream") : status;
}

// The service may notice the end of a stream late, and detach the rank then. Attaching once more shows
// whether the rank is lost.
absl::Status AttachIfDetached(const absl::Status& status) {
  if (!absl::IsAborted(status) || ReasonOf(status) == reason::kRankReplaced) return status;
  return absl::UnavailableError(status.message());
}

// A stream that lasted this long was sound.
constexpr absl::Duration kSound = absl::Seconds(1);

}  // namespace

StreamKeeper::StreamKeeper(Transport& transport, Clock& clock, SendLog& log, User& user,
                           Settings settings)
    : transport_(transport),
      clock_(clock),
      log_(log),
      user_(user),
      settings_(std::move(settings)),
      shares_memory_(settings_.open.weights_in_shared_memory()),
      instance_id_(settings_.instance_id) {}

StreamKeeper::~StreamKeeper() {
  Stop();
  if (thread_.joinable()) {
    transport_.CancelCalls();  // The thread may be in a call that a silent service does not answer.
    thread_.join();
  }
  // Only now, because the thread may have been opening another one.
  stream_.reset();
}

void StreamKeeper::Stop() {
  MutexLock lock(mutex_);
  stopping_ = true;
  changed_.NotifyAll();
}

void StreamKeeper::End(const absl::Status& status) {
  {
    MutexLock lock(mutex_);
    if (std::exchange(stopping_, true)) return;
    why_stopping_ = status;
    changed_.NotifyAll();
  }
  user_.OnEnded(status);  // Without the lock: the user may call back, or wake threads that do.
}

bool StreamKeeper::MayHeal(const absl::Status& status) const {
  if (settings_.reconnect_timeout <= absl::ZeroDuration() || !transport_.CanReconnect())
    return false;
  switch (status.code()) {
    case absl::StatusCode::kOk:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kDeadlineExceeded:
      return true;
    default:
      return false;
  }
}

// ---------------------------------------------------------------- the stream's thread

void StreamKeeper::OnMessage(const v1::TrainResponse& message, PayloadPieces payload) {
  {
    MutexLock lock(mutex_);
    // After an error, later messages must not touch the trainer's memory.
    if (stopping_) return;
    if (message.has_opened()) {
      opened_ = message.opened();
      changed_.NotifyAll();
      return;
    }
    // A stream that is to be dropped: it may bring the end of a step whose decision is not known here.
    if (opened_.has_value() && opened_->committed_step() != attached_step_) return;
    // The acknowledgement of the open message shows only that a stream can be opened.
    if (message.has_acknowledged() && message.acknowledged().messages() > 1) {
      outage_is_over_ = true;
    }
  }
  // Without the lock: the log runs `released`, and the user the trainer's callbacks.
  const absl::Status status = message.has_acknowledged()
                                  ? log_.Acknowledge(message.acknowledged().messages())
                                  : user_.OnMessage(message, payload);
  if (!status.ok()) End(status);
}

void StreamKeeper::OnClosed(const absl::Status& status) {
  const bool may_heal = MayHeal(status);
  {
    MutexLock lock(mutex_);
    if (stopping_) return;
    if (opening_ || !opened_.has_value() || may_heal) {
      // The thread that opens or reopens the stream handles this.
      closed_ = status;
      changed_.NotifyAll();
      return;
    }
  }
  End(WhyItEnded(status));
}

// ---------------------------------------------------------------- opening, and again

absl::Status StreamKeeper::Open(absl::Duration limit) {
  BALLAST_ASSIGN_OR_RETURN(const v1::Opened opened, OpenStream(settings_.committed_step, limit));
  // The owner has read the trainer's state and the last record at the step of the settings.
  // Attaching again gets those of the newer one.
  if (opened.committed_step() != settings_.committed_step) {
    return absl::UnavailableError(
        absl::StrCat("the service went from step ", settings_.committed_step, " to ",
                     opened.committed_step(), " while the stream was being opened"));
  }
  BALLAST_RETURN_IF_ERROR(user_.OnOpened(opened, limit));
  {
    MutexLock lock(mutex_);
    // It may have ended since it opened. That is an error of this call, not of the session: the
    // owner may try again with the same log and the same trainer's calls.
    if (closed_.has_value() && !MayHeal(*closed_)) return WhyItEnded(*closed_);
    opening_ = false;
  }
  open_since_ = clock_.Now();
  log_.Resume(*stream_, opened);
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

absl::StatusOr<v1::Opened> StreamKeeper::OpenStream(uint64_t attached_step, absl::Duration limit) {
  {
    MutexLock lock(mutex_);
    attached_step_ = attached_step;
  }
  stream_ = transport_.OpenTrainCall(*this);
  v1::TrainRequest request;
  *request.mutable_open() = settings_.open;
  stream_->Send(request);
  const auto deadline = SteadyDeadline(limit);
  MutexLock lock(mutex_);
  bool in_time = true;
  for (;;) {
    if (stopping_) return why_stopping_;
    if (opened_.has_value()) return *opened_;
    if (closed_.has_value()) return WhyItEnded(*closed_);
    if (!in_time) {
      return absl::DeadlineExceededError(
          absl::StrCat("the answer to the opening of the stream did not arrive within ",
                       absl::FormatDuration(limit)));
    }
    in_time = changed_.WaitUntil(mutex_, deadline);
  }
}

void StreamKeeper::DropStream() {
  log_.Detach();  // First, because the log sends on the stream.
  stream_.reset();
  // After the stream's end, because its last call, OnClosed, sets closed_.
  MutexLock lock(mutex_);
  opened_.reset();
  closed_.reset();
}

void StreamKeeper::Run() {
  while (AwaitBreak()) Reopen();
}

bool StreamKeeper::AwaitBreak() {
  MutexLock lock(mutex_);
  while (!stopping_ && !closed_.has_value()) changed_.Wait(mutex_);
  return !stopping_;
}

bool StreamKeeper::Sleep(absl::Duration duration) {
  const absl::Time end = clock_.Now() + duration;
  MutexLock lock(mutex_);
  for (;;) {
    if (stopping_) return false;
    const absl::Duration left = end - clock_.Now();
    if (left <= absl::ZeroDuration()) return true;
    clock_.WaitFor(mutex_, changed_, left);
  }
}

void StreamKeeper::Reopen() {
  absl::Status broke;
  {
    MutexLock lock(mutex_);
    broke = WhyItEnded(*closed_);
    if (std::exchange(outage_is_over_, false)) outage_.reset();
  }
  if (clock_.Now() - open_since_ >= kSound) outage_.reset();
  restarting_ = ReasonOf(broke) == reason::kRestarting;
  Log().log(restarting_ ? spdlog::level::info : spdlog::level::warn, "{}: {}, and is reopened: {}",
            user_.Context(),
            restarting_ ? "the service restarts, so the stream has ended" : "the stream broke",
            broke.ToString());
  if (!outage_.has_value()) outage_.emplace(clock_, clock_.Now() + settings_.reconnect_timeout);
  absl::Status last = broke;  // If there is no time for an attempt.
  for (;;) {
    // It also waits before the first attempt, so that no cause can make this loop spin.
    const absl::Duration wait = outage_->Next();
    if (wait == absl::ZeroDuration()) break;
    if (!Sleep(wait)) return;
    // The last attempt, at the deadline, has enough time to return a reason.
    last = TryToReopen(std::max(outage_->left(), absl::Seconds(1)));
    if (last.ok()) return;
    if (!MayHeal(last)) return End(last);
  }
  End(absl::UnavailableError(absl::StrCat(
      "the stream broke (", broke.ToString(), ") and could not be reopened within ",
      absl::FormatDuration(settings_.reconnect_timeout), "; the last attempt: ", last.ToString(),
      "; check that the service runs and can be reached, then open the session again")));
}

absl::Status StreamKeeper::TryToReopen(absl::Duration limit) {
  // First: only when the old stream's thread has ended may this thread call the user.
  DropStream();
  const absl::Time deadline = clock_.Now() + limit;
  const auto left = [&] { return std::max(deadline - clock_.Now(), absl::ZeroDuration()); };
  BALLAST_ASSIGN_OR_RETURN(const v1::AttachWorkerResponse attached, AttachAgain(left()));
  // While the log has no stream, and before the next one's open message, which says it.
  DoWithoutSharedMemory(attached.job());
  // Before the log sends again: if the step was decided meanwhile, the user empties the log.
  BALLAST_RETURN_IF_ERROR(user_.OnAttachedAgain(attached, left()));
  const absl::StatusOr<v1::Opened> opened = OpenStream(attached.committed_step(), left());
  BALLAST_RETURN_IF_ERROR(AttachIfDetached(opened.status()));
  if (opened->committed_step() != attached.committed_step()) {
    // This rank had sealed, and the others have sealed since: the step is over. Attaching once more
    // returns its record.
    return absl::UnavailableError("the step was committed while the stream was being reopened");
  }
  BALLAST_RETURN_IF_ERROR(AttachIfDetached(user_.OnOpened(*opened, left())));
  open_since_ = clock_.Now();
  const SendLog::Resumed resumed = log_.Resume(*stream_, *opened);
  Log().info("{}: the stream is back: {} messages sent again, {} had arrived", user_.Context(),
             resumed.sent, resumed.arrived);
  return absl::OkStatus();
}

// If the service has lost it. What the trainer has of it stays: only the service no longer looks.
void StreamKeeper::DoWithoutSharedMemory(const v1::Job& job) {
  if (!settings_.open.weights_in_shared_memory()) return;
  for (const v1::RankProgress& rank : job.ranks()) {
    if (rank.rank() != settings_.open.rank() || rank.shared_memory()) continue;
    Log().warn(
        "{}: the memory shared with the service was lost with its process; gradients and "
        "weights go through the connection until the session is opened again",
        user_.Context());
    settings_.open.set_weights_in_shared_memory(false);
    shares_memory_ = false;
    log_.SharesNothing();
    return;
  }
}

absl::StatusOr<v1::AttachWorkerResponse> StreamKeeper::AttachAgain(absl::Duration limit) {
  v1::AttachWorkerRequest request;
  request.set_name(settings_.open.name());
  request.set_rank(settings_.open.rank());
  request.set_process_id(settings_.open.process_id());
  request.set_uid(settings_.open.uid());
  // With these two the service never takes the rank from a process that has replaced this one.
  *request.mutable_generation() = settings_.open.generation();
  request.set_rejoin(true);
  BALLAST_ASSIGN_OR_RETURN(v1::AttachWorkerResponse attached,
                           transport_.AttachWorker(request, limit));
  if (attached.instance_id() != instance_id_) {
    // The job's uid is in the request, so it is the same job with all that it was: another process
    // of the service has taken over its memory. Without a farewell the one before has crashed, or did
    // not wait for this rank.
    Log().log(restarting_ ? spdlog::level::info : spdlog::level::warn, "{}: {}", user_.Context(),
              restarting_ ? "the service has restarted as planned, and goes on with the job"
                          : "another process of the service has taken over the job");
    instance_id_ = attached.instance_id();
  }
  const Generation expected = proto::FromProto(settings_.open.generation());
  const Generation found = proto::FromProto(attached.generation());
  // The service compares them, too. What is logged here must not meet another generation.
  if (found != expected) {
    return WithReason(
        absl::AbortedError(absl::StrCat("the job is at generation ", ToString(found), ", not ",
                                        ToString(expected), "; open the session again")),
        reason::kOlderGeneration);
  }
  return attached;
}

}  // namespace ballast::client
