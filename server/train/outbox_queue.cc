#include "server/train/outbox_queue.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace ballast::server {
namespace {

// Beyond one step's weights: decisions, refusals, reminders.
constexpr size_t kQueueSlack = 64;
// Of such messages, which may name parameters. A queue with more takes what the engine gives, but
// the stream is not read.
constexpr size_t kQueueBytes = size_t{1} << 20;
// A message costs both ends tens of microseconds, a good part of a chunk's update. So a step's
// weights in place are announced in about this many messages.
constexpr size_t kSharedMessages = 32;
// A rank of many chunks gets more messages, so that the worker's copies to its device keep pace.
constexpr size_t kLargestSharedBatch = 32;

const OutgoingWeights* WeightsIn(const OutboxQueue::Item& item) {
  return std::get_if<OutgoingWeights>(&item);
}

const v1::TrainResponse* MessageIn(const OutboxQueue::Item& item) {
  const auto* message = std::get_if<std::unique_ptr<v1::TrainResponse>>(&item);
  return message == nullptr ? nullptr : message->get();
}

size_t BytesOf(const OutboxQueue::Item& item) {
  const v1::TrainResponse* const message = MessageIn(item);
  return message == nullptr ? 0 : message->ByteSizeLong();
}

// Whether one message can announce both.
bool GoTogether(const OutgoingWeights& one, const OutgoingWeights& other) {
  return one.buffer.in_place() && other.buffer.in_place() && one.step == other.step &&
         one.provisional == other.provisional;
}

}  // namespace

void OutboxQueue::Open(size_t chunks, v1::TrainResponse opened) {
  bound_ = chunks + kQueueSlack;
  shared_batch_ = std::clamp<size_t>(chunks / kSharedMessages, 1, kLargestSharedBatch);
  queue_.emplace_front(std::make_unique<v1::TrainResponse>(std::move(opened)));
  bytes_ += BytesOf(queue_.front());
}

void OutboxQueue::Push(v1::TrainResponse message) {
  if (message.has_seal_refused() || message.has_discarded()) sealing_step_ = 0;
  if (message.has_waiting()) {
    std::erase_if(queue_, [this](const Item& item) {
      const v1::TrainResponse* const earlier = MessageIn(item);
      if (earlier == nullptr || !earlier->has_waiting()) return false;
      bytes_ -= BytesOf(item);
      return true;
    });
  }
  queue_.emplace_back(std::make_unique<v1::TrainResponse>(std::move(message)));
  bytes_ += BytesOf(queue_.back());
}

bool OutboxQueue::HasRoom() const {
  return !bound_.has_value() || (queue_.size() < *bound_ && bytes_ < kQueueBytes);
}

size_t OutboxQueue::SharedRun(size_t most) const {
  const OutgoingWeights* const first = WeightsIn(queue_.front());
  size_t run = 0;
  while (first != nullptr && run < std::min(most, queue_.size())) {
    const OutgoingWeights* const weights = WeightsIn(queue_[run]);
    if (weights == nullptr || !GoTogether(*weights, *first)) break;
    ++run;
  }
  return run;
}

bool OutboxQueue::HoldsBack() const {
  const OutgoingWeights* const first = WeightsIn(queue_.front());
  const bool awaited = first != nullptr && first->provisional && first->step == sealing_step_;
  // Anything else in the queue makes the run at its head shorter than the queue, and then nothing
  // is held back. A head that is not weights in place has a run of 0.
  return !awaited && queue_.size() < shared_batch_ && SharedRun(shared_batch_) == queue_.size();
}

std::optional<OutboxQueue::Batch> OutboxQueue::Next(bool flush) {
  const bool has_item = !queue_.empty() && (flush || !HoldsBack());
  Batch batch;
  if (acknowledged_ < done_ && !(acknowledged_last_ && has_item)) {
    acknowledged_last_ = true;
    acknowledged_ = done_;
    auto message = std::make_unique<v1::TrainResponse>();
    message->mutable_acknowledged()->set_messages(done_);
    batch.emplace_back(std::move(message));
    return batch;
  }
  if (!has_item) return std::nullopt;
  acknowledged_last_ = false;
  // The whole run, also beyond a batch: more may have come while another write was under way.
  const size_t count = std::max<size_t>(SharedRun(/*most=*/std::numeric_limits<size_t>::max()), 1);
  bytes_ -= BytesOf(queue_.front());  // Only one that is alone has any.
  for (size_t i = 0; i < count; ++i) {
    batch.push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
  return batch;
}

std::deque<OutboxQueue::Item> OutboxQueue::Drop() {
  bytes_ = 0;
  return std::exchange(queue_, {});
}

}  // namespace ballast::server
