// The messages from one Train stream to its worker, in order, and the decision when the stream
// ends.
//
//   gRPC's threads:    MessageBegins, MessageDone, MessageFailed, NoMoreMessages, WriteDone
//   any thread:        Opened, or MessageFailed if opening is refused
//   engine's threads:  the RankListener calls
//
// It sends one message at a time; the others wait in a queue (outbox_queue.h). Weights wait in pool
// buffers or, if the pool was empty, as chunk numbers, and are then converted just before they are
// sent. While the queue is full, no further message is read. So a worker that does not read cannot
// make the service's memory grow.
//
// The engine may keep the outbox longer than the stream. After the stream's end its calls have no
// effect. The wire is called without a lock, and never after Finish. Thread-safe.
#ifndef BALLAST_SERVER_TRAIN_RANK_OUTBOX_H_
#define BALLAST_SERVER_TRAIN_RANK_OUTBOX_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/job/job.h"
#include "server/call_watch.h"
#include "server/train/outbox_queue.h"

namespace ballast::server {

// The gRPC stream as the outbox sees it. Each call starts an operation and returns at once.
class RankWire {
 public:
  virtual ~RankWire() = default;
  virtual void Read() = 0;
  // `bytes` must stay until WriteDone.
  virtual void Write(const grpc::ByteBuffer& bytes) = 0;
  virtual void Finish(const absl::Status& status) = 0;  // Once, and last.
};

class RankOutbox final : public RankListener {
 public:
  // The wire must live until its Finish is called. `watched`, which may be null, is told when the
  // stream only waits for its last write.
  explicit RankOutbox(RankWire& wire, std::shared_ptr<WatchedCall> watched = nullptr)
      : watched_(std::move(watched)), wire_(&wire) {}

  // A message has arrived and is being handled. The stream does not end before one of the next
  // three calls:
  void MessageBegins();
  // The engine has the message, which counts as `messages` in acknowledgements. The next message is
  // read.
  void MessageDone(uint64_t messages = 1);
  void MessageFailed(const absl::Status& status);  // The stream ends with `status`.
  // The worker has closed its side. The queue is sent, and the stream ends.
  void NoMoreMessages();

  // The stream is open. Nothing is sent earlier.
  void Opened(std::shared_ptr<Job> job, int rank, const RankPosition& position);

  void WriteDone(bool ok);
  void Cancelled();
  // After the stream's end: the reason, OK if the worker closed its side.
  absl::Status end();
  // After that: releases the job.
  void Close();

  // The worker seals `step`: see OutboxQueue::Seals.
  void Sealing(uint64_t step);
  // The worker has discarded its attempts before this one, and seals no more for now.
  void Discarded(StepAttempt at);

  void OnWaiting(uint64_t step, const std::vector<int>& ranks, const std::string& why) override;
  void OnSealRefused(uint64_t step, const SealRefusal& refusal) override;
  void OnNorm(const StepNorm& norm) override;
  void OnVoteRefused(StepAttempt at, const absl::Status& why) override;
  void OnProvisionalWeights(uint64_t step, int chunk, WeightBuffer buffer) override;
  void OnDecision(const StepOutcome& outcome, absl::Span<const int> dropped_chunks) override;
  void OnWeights(uint64_t step, int chunk, WeightBuffer buffer) override;
  void OnDirections(uint64_t step) override;
  void OnCommitted(uint64_t step, double update_seconds, const std::string& left) override;
  void OnDetached(const absl::Status& status) override;

 private:
  // The stream's rank.
  struct Rank {
    std::shared_ptr<Job> job;  // Null before Opened.
    Generation generation;
    int first_of_rank = 0;  // Layout::first_of_rank.
  };
  // What the lock was held for, to be done without it.
  struct Move {
    RankWire* wire = nullptr;         // Null: nothing to do.
    std::optional<absl::Status> end;  // Finish.
    OutboxQueue::Batch batch;         // Otherwise: write it.
    Rank rank;
    bool read = false;
  };

  template <typename Item>
  void Push(Item item);
  void EndWith(const absl::Status& status);
  // Starts the next write, or ends the stream, if possible now.
  void Advance();
  void PlanMove(Move& move) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Only the thread that has set writing_ calls these.
  absl::StatusOr<grpc::ByteBuffer> Serialize(Move& move);
  void RecordSent();

  const std::shared_ptr<WatchedCall> watched_;
  Mutex mutex_;
  RankWire* wire_ ABSL_GUARDED_BY(mutex_);  // Null after Finish.
  Rank rank_ ABSL_GUARDED_BY(mutex_);
  OutboxQueue queue_ ABSL_GUARDED_BY(mutex_);
  int messages_in_progress_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool reading_paused_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);

  // Only the thread that has set writing_ uses these.
  grpc::ByteBuffer write_buffer_;
  // The weights being sent, for a trace.
  struct {
    uint64_t step = 0;
    std::vector<int> chunks;
    int64_t since_ns = 0;  // 0: none, or not traced.
  } sending_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRAIN_RANK_OUTBOX_H_
