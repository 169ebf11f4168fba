// The messages from one Train stream to its worker, in order, and the decision when the stream
// ends.
//
//   gRPC's threads:    MessageBegins, MessageDone, MessageFailed, NoMoreMessages, WriteDone
//   any thread:        Opened, or MessageFailed if opening is refused
//   engine's threads:  the RankListener calls
//
// One message is being sent at a time; the others wait in a queue. Weights wait as pool buffers or,
// if the pool was empty, as chunk numbers alone, and are then converted just before they are sent.
// While the queue is full, by entries or by bytes, no further message is read, so a worker that
// does not read does not make the service's memory grow. Reminders are not answers to messages, so
// a new one replaces one that still waits. Acknowledgements are a count: one message acknowledges
// all that are due.
//
// Weights that the rank can already read in shared memory are only announced, many in one message:
// consecutive ones wait until there are enough of them, until something follows them, or, while
// they are provisional, until the rank seals.
//
// The engine may keep the outbox for longer than the stream lives; after the stream's end its calls
// have no effect. The wire is called without a lock, and not at all after Finish. Thread-safe.
#ifndef BALLAST_SERVER_TRAIN_RANK_OUTBOX_H_
#define BALLAST_SERVER_TRAIN_RANK_OUTBOX_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ballast/v1/ballast.pb.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/job/job.h"
#include "server/call_watch.h"

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
  // The wire must live until its Finish is called. `watched`, which may be null, is notified when the
  // stream only waits for its last write.
  explicit RankOutbox(RankWire& wire, std::shared_ptr<WatchedCall> watched = nullptr)
      : watched_(std::move(watched)), wire_(&wire) {}

  // A message has arrived and is being handled. The stream does not end before one of the next
  // three:
  void MessageBegins();
  // It is in the engine, and counts as so many in acknowledgements. The next message is read.
  void MessageDone(uint64_t messages = 1);
  void MessageFailed(const absl::Status& status);  // The stream ends with `status`.
  // There was no message: the worker has closed its side. The queue is sent, and the stream ends.
  void NoMoreMessages();

  // The stream is open. Nothing is sent before.
  void Opened(std::shared_ptr<Job> job, int rank, const RankPosition& position);

  void WriteDone(bool ok);
  void Cancelled();
  // After the stream's end: what ended it, OK if that was the worker, as it closed its side.
  absl::Status end();
  // Then: gives up the job.
  void Close();

  // The worker seals `step`. From then on, unless the seal is refused, it only waits, so the step's
  // provisional weights are announced at once.
  void Sealing(uint64_t step);
  // The worker has discarded its attempts before this one, and seals no more for now.
  void Discarded(StepAttempt at);

  void OnWaiting(uint64_t step, const std::vector<int>& ranks) override;
  void OnSealRefused(uint64_t step, const SealRefusal& refusal) override;
  void OnNorm(const StepNorm& norm) override;
  void OnVoteRefused(StepAttempt at, const absl::Status& why) override;
  void OnProvisionalWeights(uint64_t step, int chunk, WeightBuffer buffer) override;
  void OnDecision(const StepOutcome& outcome, absl::Span<const int> dropped_chunks) override;
  void OnWeights(uint64_t step, int chunk, WeightBuffer buffer) override;
  void OnCommitted(uint64_t step, double update_seconds) override;
  void OnDetached(const absl::Status& status) override;

 private:
  struct Weights {
    uint64_t step = 0;
    int chunk = 0;
    bool provisional = false;
    WeightBuffer buffer;  // Null, if not provisional: read from the job when they are sent.

    // Whether one message can announce both.
    bool GoesWith(const Weights& other) const {
      return buffer.in_place() && other.buffer.in_place() && step == other.step &&
             provisional == other.provisional;
    }
  };
  // unique_ptr: a message that is not weights is large and rare, and weights are many.
  using Item = std::variant<Weights, std::unique_ptr<v1::TrainResponse>>;

  static bool IsWaiting(const Item& item);
  static size_t BytesOf(const Item& item);  // 0: weights.
  void Push(v1::TrainResponse message);
  void Push(Item item);
  void EndWith(const absl::Status& status);
  // Starts the next write, or ends the stream, if that is possible now.
  void Advance();
  struct Move {
    RankWire* wire = nullptr;  // Null: nothing to do.
    bool finish = false;
    bool read = false;
    std::vector<Weights> weights;                // More than one only if they are in place.
    std::unique_ptr<v1::TrainResponse> message;  // If there are no weights.
    std::shared_ptr<Job> job;
    Generation generation;
    int first_on_wire = 0;
    absl::Status status;
  };
  // Sets the wire of `move` together with writing_, and before anything that needs memory: so
  // where that is missing, the wire tells whether the caller has set writing_.
  void PlanMove(Move& move) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The number of entries at the queue's head, at most `most`, that one message can announce.
  size_t SharedRun(size_t most) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the queue has something to send now.
  bool HasItem() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeItem(Move& move) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Called by the thread that has set writing_.
  absl::StatusOr<grpc::ByteBuffer> Serialize(Move& move);
  void RecordSent();
  bool HasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<WatchedCall> watched_;
  Mutex mutex_;
  RankWire* wire_ ABSL_GUARDED_BY(mutex_);            // Null after Finish.
  std::shared_ptr<Job> job_ ABSL_GUARDED_BY(mutex_);  // Null before Opened.
  Generation generation_ ABSL_GUARDED_BY(mutex_);     // The stream's.
  int first_on_wire_ ABSL_GUARDED_BY(mutex_) = 0;     // Layout::first_on_wire of the rank.
  std::deque<Item> queue_ ABSL_GUARDED_BY(mutex_);
  // Takes the queue at the stream's end, which may come for want of memory.
  std::unique_ptr<std::deque<Item>> dropped_ ABSL_GUARDED_BY(mutex_) =
      std::make_unique<std::deque<Item>>();
  size_t queue_bound_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t queue_bytes_ ABSL_GUARDED_BY(mutex_) = 0;     // Of messages that are not weights.
  size_t shared_batch_ ABSL_GUARDED_BY(mutex_) = 1;    // So many are announced at once.
  uint64_t sealing_step_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: none.
  uint64_t messages_done_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t messages_acknowledged_ ABSL_GUARDED_BY(mutex_) = 0;
  int messages_in_progress_ ABSL_GUARDED_BY(mutex_) = 0;
  bool opened_sent_ ABSL_GUARDED_BY(mutex_) = false;
  bool acknowledged_last_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool reading_paused_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);

  // These belong to the thread that has set writing_.
  grpc::ByteBuffer write_buffer_;
  // The weights that are being sent, for a trace.
  uint64_t sending_step_ = 0;
  std::vector<int> sending_chunks_;
  int64_t sending_since_ns_ = 0;  // 0: none, or not traced.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRAIN_RANK_OUTBOX_H_
