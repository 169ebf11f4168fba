#include "server/train/rank_outbox.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "cpu_optimizer_service/common/reason.h"
#include "proto/frame.h"
#include "server/call_guard.h"
#include "server/train/weight_message.h"

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

// `chunk`: in the job; the header has its number on the wire.
absl::StatusOr<grpc::ByteBuffer> SerializeWeights(Job& job, Generation generation, int chunk,
                                                  const v1::WeightHeader& header,
                                                  WeightBuffer buffer) {
  if (buffer) {
    // The pool gets its buffer back when gRPC no longer needs the bytes.
    const auto kept = std::make_shared<WeightBuffer>(std::move(buffer));
    return proto::SerializeTrainWeights(header, kept->bytes(), [kept] {});
  }
  absl::StatusOr<OwnedWeights> read = ReadWeights(job, generation, header.step(), chunk);
  if (!read.ok()) return read.status();
  return proto::SerializeTrainWeights(header, read->bytes(), [memory = read->memory] {});
}

v1::ErrorReason ReasonMessage(const absl::Status& status) {
  v1::ErrorReason reason = v1::ERROR_REASON_UNSPECIFIED;
  (void)v1::ErrorReason_Parse(ReasonOf(status), &reason);
  return reason;
}

}  // namespace

void RankOutbox::MessageBegins() {
  MutexLock lock(mutex_);
  ++messages_in_progress_;
}

void RankOutbox::MessageDone(uint64_t messages) {
  RankWire* reader = nullptr;
  {
    MutexLock lock(mutex_);
    messages_done_ += messages;
    if (!end_) {
      // A stream that is not read holds its worker back, by the flow control of HTTP/2.
      reading_paused_ = !HasRoom();
      if (!reading_paused_) reader = wire_;
    }
  }
  // Read before this message is counted off, so for a moment two may be in progress.
  // The message in progress keeps the stream, and so the wire, alive.
  if (reader != nullptr) reader->Read();
  {
    MutexLock lock(mutex_);
    --messages_in_progress_;
  }
  Advance();
}

void RankOutbox::MessageFailed(const absl::Status& status) {
  {
    MutexLock lock(mutex_);
    --messages_in_progress_;
  }
  EndWith(status);
}

void RankOutbox::NoMoreMessages() {
  {
    MutexLock lock(mutex_);
    --messages_in_progress_;
    if (!end_) {
      end_ = absl::OkStatus();
      // Before Opened there is nothing that may be sent.
      draining_ = job_ != nullptr;
    }
  }
  Advance();
}

void RankOutbox::Opened(std::shared_ptr<Job> job, int rank, const RankPosition& position) {
  auto message = std::make_unique<v1::TrainResponse>();
  v1::Opened& opened = *message->mutable_opened();
  opened.set_committed_step(position.committed_step);
  opened.set_open_step(position.open_step);
  opened.set_attempt(position.attempt);
  opened.set_micro_steps_ended(position.micro_steps_ended);
  const int first_on_wire = job->layout().first_on_wire(rank);
  for (const ChunkProgress& progress : position.delivered) {
    v1::ChunkCount& count = *opened.add_delivered();
    count.set_chunk(static_cast<uint32_t>(progress.chunk - first_on_wire));
    count.set_next_micro_step(progress.next_micro_step);
  }
  {
    MutexLock lock(mutex_);
    const size_t chunks = job->layout().chunks_of_rank(rank).size();
    queue_bound_ = chunks + kQueueSlack;
    shared_batch_ = std::clamp<size_t>(chunks / kSharedMessages, 1, kLargestSharedBatch);
    if (wire_ != nullptr) job_ = std::move(job);
    generation_ = position.generation;
    queue_bytes_ += message->ByteSizeLong();
    first_on_wire_ = first_on_wire;
    queue_.emplace_front(std::move(message));  // The engine may have called the listener already.
  }
  Advance();
}

void RankOutbox::WriteDone(bool ok) {
  // While `writing_` is set no other thread touches the buffer.
  write_buffer_.Clear();
  if (ok) RecordSent();
  {
    MutexLock lock(mutex_);
    writing_ = false;
  }
  if (ok) {
    Advance();
  } else {
    // gRPC fails a write only where the call is broken.
    Cancelled();
  }
}

void RankOutbox::RecordSent() {
  const int64_t since_ns = std::exchange(sending_since_ns_, 0);
  if (since_ns == 0) return;
  std::shared_ptr<Job> job;
  {
    MutexLock lock(mutex_);
    job = job_;
  }
  if (job == nullptr) return;
  for (const int chunk : sending_chunks_) {
    job->trace().Record(TraceEventKind::kSent, sending_step_, chunk, since_ns);
  }
}

void RankOutbox::Cancelled() { EndWith(GoneError("worker")); }

absl::Status RankOutbox::end() {
  MutexLock lock(mutex_);
  return end_.value_or(absl::OkStatus());
}

void RankOutbox::Close() {
  // Before the lock, so that it is given up after it: it may be the last reference to the job.
  std::shared_ptr<Job> job;
  MutexLock lock(mutex_);
  job = std::move(job_);
}

void RankOutbox::OnWaiting(uint64_t step, const std::vector<int>& ranks) {
  v1::TrainResponse message;
  message.mutable_waiting()->set_step(step);
  message.mutable_waiting()->mutable_ranks()->Add(ranks.begin(), ranks.end());
  {
    MutexLock lock(mutex_);
    std::erase_if(queue_, [&](const Item& item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      if (!IsWaiting(item)) return false;  // The newest one is complete.
      queue_bytes_ -= BytesOf(item);
      return true;
    });
  }
  Push(std::move(message));
}

void RankOutbox::Sealing(uint64_t step) {
  {
    MutexLock lock(mutex_);
    sealing_step_ = step;
  }
  Advance();
}

void RankOutbox::Discarded(StepAttempt at) {
  {
    MutexLock lock(mutex_);
    sealing_step_ = 0;
  }
  v1::TrainResponse message;
  // In the queue behind the provisional weights that it voids; what follows it is of the next
  // attempt.
  message.mutable_discarded()->set_step(at.step);
  message.mutable_discarded()->set_attempt(at.attempt);
  Push(std::move(message));
}

void RankOutbox::OnSealRefused(uint64_t step, const SealRefusal& refusal) {
  {
    MutexLock lock(mutex_);
    sealing_step_ = 0;
  }
  v1::TrainResponse message;
  v1::SealRefused& refused = *message.mutable_seal_refused();
  refused.set_step(step);
  refused.set_attempt(refusal.attempt);
  refused.set_message(std::string(refusal.status.message()));
  refused.set_reason(ReasonMessage(refusal.status));
  for (const MissingContribution& missing : refusal.missing) {
    v1::Missing& to = *refused.add_missing();
    to.set_rank(missing.rank);
    to.set_micro_step(missing.micro_step);
    to.mutable_parameters()->Add(missing.parameters.begin(), missing.parameters.end());
    to.set_more_parameters(missing.more_parameters);
  }
  Push(std::move(message));
}

void RankOutbox::OnNorm(const StepNorm& norm) {
  v1::TrainResponse message;
  v1::StepNorm& to = *message.mutable_norm();
  to.set_step(norm.step);
  to.set_attempt(norm.attempt);
  to.set_norm(norm.norm);
  to.mutable_group_norms()->Add(norm.group_norms.begin(), norm.group_norms.end());
  to.set_non_finite(norm.non_finite);
  const std::vector<std::string>& unused = norm.unused_parameters;
  const size_t named = std::min(unused.size(), kRecordedNames);
  to.mutable_unused_parameters()->Add(unused.begin(), unused.begin() + named);
  to.set_more_unused_parameters(static_cast<int64_t>(unused.size() - named));
  Push(std::move(message));
}

void RankOutbox::OnVoteRefused(StepAttempt at, const absl::Status& why) {
  v1::TrainResponse message;
  v1::VoteRefused& refused = *message.mutable_vote_refused();
  refused.set_step(at.step);
  refused.set_attempt(at.attempt);
  refused.set_message(std::string(why.message()));
  refused.set_reason(ReasonMessage(why));
  Push(std::move(message));
}

void RankOutbox::OnProvisionalWeights(uint64_t step, int chunk, WeightBuffer buffer) {
  Push(Item(
      Weights{.step = step, .chunk = chunk, .provisional = true, .buffer = std::move(buffer)}));
}

void RankOutbox::OnDecision(const StepOutcome& outcome, absl::Span<const int> dropped_chunks) {
  v1::TrainResponse message;
  v1::StepDecision& decision = *message.mutable_decision();
  decision.set_step(outcome.step);
  decision.set_applied(outcome.decision.apply);
  decision.set_norm(outcome.decision.norm);
  decision.set_clip_coefficient(outcome.decision.clip_coefficient);
  decision.set_skip_reason(outcome.skip_reason);
  const std::vector<std::string>& unused = outcome.unused_parameters;
  const size_t named = std::min(unused.size(), kRecordedNames);
  decision.mutable_unused_parameters()->Add(unused.begin(), unused.begin() + named);
  decision.set_more_unused_parameters(static_cast<int64_t>(unused.size() - named));
  // As the job numbers them until the message is sent: this may come before Opened.
  for (const int chunk : dropped_chunks) {
    decision.add_dropped_chunks(static_cast<uint32_t>(chunk));
  }
  Push(std::move(message));
}

void RankOutbox::OnWeights(uint64_t step, int chunk, WeightBuffer buffer) {
  Push(Item(
      Weights{.step = step, .chunk = chunk, .provisional = false, .buffer = std::move(buffer)}));
}

void RankOutbox::OnCommitted(uint64_t step, double update_seconds) {
  v1::TrainResponse message;
  message.mutable_committed()->set_step(step);
  message.mutable_committed()->set_update_seconds(update_seconds);
  Push(std::move(message));
}

void RankOutbox::OnDetached(const absl::Status& status) { EndWith(status); }

size_t RankOutbox::BytesOf(const Item& item) {
  const auto* message = std::get_if<std::unique_ptr<v1::TrainResponse>>(&item);
  return message == nullptr ? 0 : (*message)->ByteSizeLong();
}

bool RankOutbox::IsWaiting(const Item& item) {
  const auto* message = std::get_if<std::unique_ptr<v1::TrainResponse>>(&item);
  return message != nullptr && (*message)->has_waiting();
}

void RankOutbox::Push(v1::TrainResponse message) {
  Push(Item(std::make_unique<v1::TrainResponse>(std::move(message))));
}

void RankOutbox::Push(Item item) {
  {
    MutexLock lock(mutex_);
    // Also while the queue is sent to a worker that has closed its side: it gets what was queued by
    // then, and no more.
    if (end_) return;  // `item` is destroyed after the lock is released.
    const auto* weights = std::get_if<Weights>(&item);
    // Counted before they can leave: a trace ends when as many have gone as were to go.
    if (weights != nullptr && job_ != nullptr) job_->trace().WillSend(weights->step);
    queue_bytes_ += BytesOf(item);
    queue_.push_back(std::move(item));
  }
  Advance();
}

void RankOutbox::EndWith(const absl::Status& status) {
  // Its buffers return to their pool without the lock. Nothing is allocated here.
  std::unique_ptr<std::deque<Item>> dropped;
  {
    MutexLock lock(mutex_);
    dropped = std::move(dropped_);
    if (dropped != nullptr) {
      dropped->swap(queue_);
    } else {
      queue_.clear();  // The stream had ended before: there is hardly anything.
    }
    queue_bytes_ = 0;
    // The first reason stays. Only the OK of a worker that has closed its side gives way: it does
    // not get all of its queue now.
    if (!end_ || draining_) end_ = status;
    draining_ = false;
  }
  if (watched_ != nullptr) watched_->IsOver();
  Advance();
}

bool RankOutbox::HasRoom() const {
  return job_ == nullptr || (queue_.size() < queue_bound_ && queue_bytes_ < kQueueBytes);
}

size_t RankOutbox::SharedRun(size_t most) const {
  const auto* first = queue_.empty() ? nullptr : std::get_if<Weights>(&queue_.front());
  size_t run = 0;
  while (first != nullptr && run < std::min(most, queue_.size())) {
    const auto* weights = std::get_if<Weights>(&queue_[run]);
    if (weights == nullptr || !weights->GoesWith(*first)) break;
    ++run;
  }
  return run;
}

bool RankOutbox::HasItem() const {
  if (queue_.empty()) return false;
  const auto* first = std::get_if<Weights>(&queue_.front());
  const bool awaited = first != nullptr && first->provisional && first->step == sealing_step_;
  const bool enough = queue_.size() >= shared_batch_ || draining_ || awaited;
  // Anything else in the queue makes the run at its head shorter than the queue, and then nothing
  // is held back. A head that is not weights in place has a run of 0.
  return enough || SharedRun(shared_batch_) < queue_.size();
}

void RankOutbox::TakeItem(Move& move) {
  // The whole run, also beyond a batch: more may have come while another write was under way.
  const size_t count = std::max<size_t>(SharedRun(/*most=*/std::numeric_limits<size_t>::max()), 1);
  for (size_t i = 0; i < count; ++i) {
    queue_bytes_ -= BytesOf(queue_.front());
    if (auto* weights = std::get_if<Weights>(&queue_.front())) {
      move.weights.push_back(std::move(*weights));
    } else {
      move.message = std::move(std::get<std::unique_ptr<v1::TrainResponse>>(queue_.front()));
    }
    queue_.pop_front();
  }
}

void RankOutbox::PlanMove(Move& move) {
  if (wire_ == nullptr || writing_) return;
  const bool acknowledge = messages_acknowledged_ < messages_done_;
  const bool item = HasItem();
  const bool sending = job_ != nullptr && (!end_ || draining_) && (acknowledge || item);
  if (!sending) {
    // What handles a message uses the stream, so the end waits for it; the end of the message comes
    // here again.
    if (!end_ || messages_in_progress_ > 0) return;
    move.finish = true;
    move.status = *end_;
    // Taken away with the lock held, so only one thread finishes, and none uses the wire later.
    move.wire = std::exchange(wire_, nullptr);
    return;
  }
  writing_ = true;
  move.wire = wire_;
  move.job = job_;
  move.generation = generation_;
  move.first_on_wire = first_on_wire_;
  // Opened is sent first; then acknowledgements and the queue take turns, so that neither waits for
  // long.
  if (acknowledge && opened_sent_ && !(acknowledged_last_ && item)) {
    acknowledged_last_ = true;
    move.message = std::make_unique<v1::TrainResponse>();
    move.message->mutable_acknowledged()->set_messages(messages_done_);
    messages_acknowledged_ = messages_done_;
    return;
  }
  opened_sent_ = true;
  acknowledged_last_ = false;
  TakeItem(move);
  // Only what is taken from the queue makes room, so reading goes on here and nowhere else.
  if (reading_paused_ && HasRoom() && !end_) {
    reading_paused_ = false;
    move.read = true;
  }
}

absl::StatusOr<grpc::ByteBuffer> RankOutbox::Serialize(Move& move) {
  if (move.weights.empty()) {
    if (move.message->has_decision()) {
      for (uint32_t& chunk : *move.message->mutable_decision()->mutable_dropped_chunks()) {
        chunk -= static_cast<uint32_t>(move.first_on_wire);
      }
    }
    return proto::SerializeControl(*move.message);
  }
  Weights& first = move.weights.front();
  sending_step_ = first.step;
  sending_chunks_.clear();
  for (const Weights& weights : move.weights) sending_chunks_.push_back(weights.chunk);
  sending_since_ns_ = move.job->trace().Begin(first.step);
  // All others are sent one by one (GoesWith), so the first is the only one.
  if (!first.buffer.in_place()) {
    return SerializeWeights(
        *move.job, move.generation, first.chunk,
        MakeWeightHeader(first.step, first.chunk - move.first_on_wire, first.provisional),
        std::move(first.buffer));
  }
  v1::TrainResponse message;
  v1::SharedWeights& shared = *message.mutable_shared_weights();
  shared.set_step(first.step);
  shared.set_provisional(first.provisional);
  for (const int chunk : sending_chunks_) {
    shared.add_chunks(static_cast<uint32_t>(chunk - move.first_on_wire));
  }
  return proto::SerializeControl(message);
}

void RankOutbox::Advance() {
  Move move;
  const absl::Status planned = GuardedRun([&] {
    MutexLock lock(mutex_);
    PlanMove(move);
  });
  if (!planned.ok()) {
    if (move.wire != nullptr) {  // Otherwise the write, if there is one, is another thread's.
      MutexLock lock(mutex_);
      writing_ = false;
    }
    return EndWith(planned);  // Which needs no memory.
  }
  if (move.wire == nullptr) return;
  // The last use of this object: after Finish gRPC may delete the stream, which may have the last
  // reference to it, on another thread.
  if (move.finish) return move.wire->Finish(move.status);
  // While writing_ is set no other thread can end the stream, so the wire stays.
  if (move.read) move.wire->Read();
  absl::StatusOr<grpc::ByteBuffer> bytes = Guarded([&] { return Serialize(move); });
  if (bytes.ok()) {
    write_buffer_ = *std::move(bytes);
    // WriteDone may come on another thread before this returns, so nothing may follow.
    return move.wire->Write(write_buffer_);
  }
  {
    MutexLock lock(mutex_);
    writing_ = false;
  }
  // For example: weights that found no buffer, of a chunk that was at another step by their turn.
  EndWith(bytes.status());
}

}  // namespace ballast::server
