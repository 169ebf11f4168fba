#include "server/train/rank_outbox.h"

#include <deque>
#include <type_traits>
#include <utility>
#include <variant>

#include "proto/frame.h"
#include "server/call_errors.h"
#include "server/train/step_message.h"
#include "server/train/weight_message.h"

namespace ballast::server {
namespace {

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

}  // namespace

void RankOutbox::MessageBegins() {
  MutexLock lock(mutex_);
  ++messages_in_progress_;
}

void RankOutbox::MessageDone(uint64_t messages) {
  RankWire* reader = nullptr;
  {
    MutexLock lock(mutex_);
    queue_.Acknowledge(messages);
    if (!end_) {
      // A stream that is not read holds its worker back, by the flow control of HTTP/2.
      reading_paused_ = !queue_.HasRoom();
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
      draining_ = rank_.job != nullptr;
    }
  }
  Advance();
}

void RankOutbox::Opened(std::shared_ptr<Job> job, int rank, const RankPosition& position) {
  const Layout& layout = job->layout();
  const int first_of_rank = layout.first_of_rank(rank);
  const size_t chunks = layout.chunks_of_rank(rank).size();
  v1::TrainResponse message = ToMessage(position, first_of_rank);
  {
    MutexLock lock(mutex_);
    if (wire_ == nullptr) return;  // `job` is given up after the lock.
    rank_ = {
        .job = std::move(job), .generation = position.generation, .first_of_rank = first_of_rank};
    queue_.Open(chunks, std::move(message));  // The engine may have called the listener already.
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
  const int64_t since_ns = std::exchange(sending_.since_ns, 0);
  if (since_ns == 0) return;
  std::shared_ptr<Job> job;
  {
    MutexLock lock(mutex_);
    job = rank_.job;
  }
  if (job == nullptr) return;
  for (const int chunk : sending_.chunks) {
    job->trace().Record(TraceEventKind::kSent, sending_.step, chunk, since_ns);
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
  job = std::move(rank_.job);
}

void RankOutbox::OnWaiting(uint64_t step, const std::vector<int>& ranks, const std::string& why) {
  v1::TrainResponse message;
  message.mutable_waiting()->set_step(step);
  message.mutable_waiting()->mutable_ranks()->Add(ranks.begin(), ranks.end());
  message.mutable_waiting()->set_why(why);
  Push(std::move(message));
}

void RankOutbox::Sealing(uint64_t step) {
  {
    MutexLock lock(mutex_);
    queue_.Seals(step);
  }
  Advance();
}

void RankOutbox::Discarded(StepAttempt at) {
  v1::TrainResponse message;
  // In the queue behind the provisional weights that it voids; what follows it is of the next
  // attempt.
  message.mutable_discarded()->set_step(at.step);
  message.mutable_discarded()->set_attempt(at.attempt);
  Push(std::move(message));
}

void RankOutbox::OnSealRefused(uint64_t step, const SealRefusal& refusal) {
  Push(ToMessage(step, refusal));
}

void RankOutbox::OnNorm(const StepNorm& norm) { Push(ToMessage(norm)); }

void RankOutbox::OnVoteRefused(StepAttempt at, const absl::Status& why) {
  Push(ToMessage(at, why));
}

void RankOutbox::OnProvisionalWeights(uint64_t step, int chunk, WeightBuffer buffer) {
  Push(OutgoingWeights{
      .step = step, .chunk = chunk, .provisional = true, .buffer = std::move(buffer)});
}

void RankOutbox::OnDecision(const StepOutcome& outcome, absl::Span<const int> dropped_chunks) {
  // As the job numbers chunks until the message is sent: this may come before Opened.
  Push(ToMessage(outcome, dropped_chunks));
}

void RankOutbox::OnWeights(uint64_t step, int chunk, WeightBuffer buffer) {
  Push(OutgoingWeights{
      .step = step, .chunk = chunk, .provisional = false, .buffer = std::move(buffer)});
}

void RankOutbox::OnDirections(uint64_t step) {
  v1::TrainResponse message;
  message.mutable_directions()->set_step(step);
  Push(std::move(message));
}

void RankOutbox::OnCommitted(uint64_t step, double update_seconds, const std::string& left) {
  v1::TrainResponse message;
  message.mutable_committed()->set_step(step);
  message.mutable_committed()->set_update_seconds(update_seconds);
  message.mutable_committed()->set_left(left);
  Push(std::move(message));
}

void RankOutbox::OnDetached(const absl::Status& status) { EndWith(status); }

template <typename Item>
void RankOutbox::Push(Item item) {
  {
    MutexLock lock(mutex_);
    // Also while the queue is sent to a worker that has closed its side: it gets what was queued by
    // then, and no more.
    if (end_) return;  // `item` is destroyed after the lock is released.
    if constexpr (std::is_same_v<Item, OutgoingWeights>) {
      // Counted before they can leave: a trace ends when as many have gone as were to go.
      if (rank_.job != nullptr) rank_.job->trace().WillSend(item.step);
    }
    queue_.Push(std::move(item));
  }
  Advance();
}

void RankOutbox::EndWith(const absl::Status& status) {
  std::deque<OutboxQueue::Item> dropped;  // Its buffers return to their pool without the lock.
  {
    MutexLock lock(mutex_);
    dropped = queue_.Drop();
    // The first reason stays. Only the OK of a worker that has closed its side gives way: it does
    // not get all of its queue now.
    if (!end_ || draining_) end_ = status;
    draining_ = false;
  }
  if (watched_ != nullptr) watched_->IsOver();
  Advance();
}

void RankOutbox::PlanMove(Move& move) {
  if (wire_ == nullptr || writing_) return;
  std::optional<OutboxQueue::Batch> batch;
  if (rank_.job != nullptr && (!end_ || draining_)) batch = queue_.Next(/*flush=*/draining_);
  if (!batch.has_value()) {
    // What handles a message uses the stream, so the end waits for it; the end of the message comes
    // here again.
    if (!end_ || messages_in_progress_ > 0) return;
    move.end = end_;
    // Taken away with the lock held, so only one thread finishes, and none uses the wire later.
    move.wire = std::exchange(wire_, nullptr);
    return;
  }
  writing_ = true;
  move.wire = wire_;
  move.rank = rank_;
  move.batch = *std::move(batch);
  // Only what is taken from the queue makes room, so reading goes on here and nowhere else.
  if (reading_paused_ && queue_.HasRoom() && !end_) {
    reading_paused_ = false;
    move.read = true;
  }
}

absl::StatusOr<grpc::ByteBuffer> RankOutbox::Serialize(Move& move) {
  if (auto* message = std::get_if<std::unique_ptr<v1::TrainResponse>>(&move.batch.front())) {
    if ((*message)->has_decision()) {
      for (uint32_t& chunk : *(*message)->mutable_decision()->mutable_dropped_chunks()) {
        chunk -= static_cast<uint32_t>(move.rank.first_of_rank);
      }
    }
    return proto::SerializeControl(**message);
  }
  auto& first = std::get<OutgoingWeights>(move.batch.front());
  sending_.step = first.step;
  sending_.chunks.clear();
  for (const OutboxQueue::Item& item : move.batch) {
    sending_.chunks.push_back(std::get<OutgoingWeights>(item).chunk);
  }
  sending_.since_ns = move.rank.job->trace().Begin(first.step);
  if (!first.buffer.in_place()) {
    return SerializeWeights(
        *move.rank.job, move.rank.generation, first.chunk,
        MakeWeightHeader(first.step, first.chunk - move.rank.first_of_rank, first.provisional),
        std::move(first.buffer));
  }
  v1::TrainResponse message;
  v1::SharedWeights& shared = *message.mutable_shared_weights();
  shared.set_step(first.step);
  shared.set_provisional(first.provisional);
  for (const int chunk : sending_.chunks) {
    shared.add_chunks(static_cast<uint32_t>(chunk - move.rank.first_of_rank));
  }
  return proto::SerializeControl(message);
}

void RankOutbox::Advance() {
  Move move;
  {
    MutexLock lock(mutex_);
    PlanMove(move);
  }
  if (move.wire == nullptr) return;
  // The last use of this object: after Finish gRPC may delete the stream, which may have the last
  // reference to it, on another thread.
  if (move.end.has_value()) return move.wire->Finish(*move.end);
  // While writing_ is set no other thread can end the stream, so the wire stays.
  if (move.read) move.wire->Read();
  absl::StatusOr<grpc::ByteBuffer> bytes = Serialize(move);
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
