#include "client/transport/connection.h"

#include <grpcpp/completion_queue.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "client/transport/steady_deadline.h"
#include "proto/deadline.h"

namespace ballast::client {
namespace {

// Attempts side by side: so a handshake may take this many seconds. Each one that is dropped costs
// the service a connection that it may just have accepted.
constexpr size_t kMostAttempts = 8;
constexpr absl::Duration kBetweenAttempts = absl::Seconds(1);
// How long one round of polling waits.
constexpr absl::Duration kRound = absl::Milliseconds(20);

// The deleter of a channel that can be replaced: the channel's owner can be asked for it.
struct Maker {
  void operator()(grpc::Channel*) { made.reset(); }

  std::function<std::shared_ptr<grpc::Channel>()> make;
  std::shared_ptr<grpc::Channel> made;
};

// Lets gRPC work on the connections of the channels until one changes its state, at most a round.
void Poll(const std::deque<std::shared_ptr<grpc::Channel>>& channels) {
  grpc::CompletionQueue queue;
  const gpr_timespec end = proto::Deadline(kRound);
  for (const auto& channel : channels) {
    channel->NotifyOnStateChange(channel->GetState(false), end, &queue, nullptr);
  }
  queue.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue.Next(&tag, &ok)) {
  }
}

}  // namespace

std::shared_ptr<grpc::Channel> MakeReplaceable(
    std::function<std::shared_ptr<grpc::Channel>()> make) {
  Maker maker = {.make = std::move(make), .made = nullptr};
  maker.made = maker.make();
  grpc::Channel* const channel = maker.made.get();
  return {channel, std::move(maker)};
}

Connection::Connection(std::shared_ptr<grpc::Channel> channel) : channel_(std::move(channel)) {
  if (const auto* maker = std::get_deleter<Maker>(channel_)) make_ = maker->make;
}

std::shared_ptr<grpc::Channel> Connection::channel() const {
  MutexLock lock(mutex_);
  return channel_;
}

void Connection::Begin() {
  std::erase_if(attempts_, [](const auto& attempt) {
    return attempt->GetState(false) == GRPC_CHANNEL_TRANSIENT_FAILURE;
  });
  const std::shared_ptr<grpc::Channel> last = channel();
  // A connection that was lost: gRPC has not tried again yet.
  const bool is_new = attempts_.empty() && last->GetState(false) != GRPC_CHANNEL_TRANSIENT_FAILURE;
  if (make_ == nullptr || is_new) {
    attempts_ = {last};
  } else {
    attempts_.push_back(MakeReplaceable(make_));
  }
  if (attempts_.size() > kMostAttempts) attempts_.pop_front();
  attempts_.back()->GetState(/*try_to_connect=*/true);
}

std::shared_ptr<grpc::Channel> Connection::Outcome() {
  const auto ready = std::find_if(attempts_.begin(), attempts_.end(), [](const auto& attempt) {
    return attempt->GetState(false) == GRPC_CHANNEL_READY;
  });
  std::shared_ptr<grpc::Channel> found;
  if (ready != attempts_.end()) {
    found = *ready;
    attempts_.clear();
  } else if (attempts_.back()->GetState(false) == GRPC_CHANNEL_TRANSIENT_FAILURE) {
    found = attempts_.back();
  } else {
    return nullptr;
  }
  MutexLock lock(mutex_);
  channel_ = found;
  return found;
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connection::Connected(absl::Duration limit) {
  const auto end = SteadyDeadline(limit);
  MutexLock lock(connecting_);
  const std::shared_ptr<grpc::Channel> last = channel();
  const grpc_connectivity_state state = last->GetState(false);
  // An in-process channel is always shut down.
  if (state == GRPC_CHANNEL_READY || state == GRPC_CHANNEL_SHUTDOWN) return last;
  // What the last call has seen fail is tried again at once: its caller has waited.
  if (attempts_.empty() || attempts_.back()->GetState(false) == GRPC_CHANNEL_TRANSIENT_FAILURE) {
    next_ = {};
  }
  do {
    if (std::chrono::steady_clock::now() >= next_) {
      Begin();
      next_ = SteadyDeadline(kBetweenAttempts);
    }
    if (auto found = Outcome()) return found;
    if (cancelled_) return absl::CancelledError("the session was closed");
    Poll(attempts_);
  } while (std::chrono::steady_clock::now() < end);
  return absl::UnavailableError(
      "nothing has answered there: the host is down or drops packets, or what listens there hangs");
}

}  // namespace ballast::client
