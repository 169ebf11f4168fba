// What waits to be sent to a rank: its order, what shares a message, and how much may wait.
//
// Acknowledgements and the queue take turns, so that neither waits for long. One message
// acknowledges all due ones, because acknowledgements are a count. A new reminder replaces one that
// still waits.
//
// Weights that the rank can already read in shared memory are only announced, many in one message.
// Consecutive ones wait until there are enough of them, or until something follows them.
// Provisional ones also wait until the rank seals.
//
// Calls nothing. Not thread-safe.
#ifndef BALLAST_SERVER_TRAIN_OUTBOX_QUEUE_H_
#define BALLAST_SERVER_TRAIN_OUTBOX_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "ballast/v1/train.pb.h"
#include "cpu_optimizer_service/job/job.h"

namespace ballast::server {

struct OutgoingWeights {
  uint64_t step = 0;
  int chunk = 0;
  bool provisional = false;
  WeightBuffer buffer;  // Null unless provisional: read from the job when they are sent.
};

class OutboxQueue {
 public:
  // unique_ptr: messages other than weights are large and rare, and weights are many.
  using Item = std::variant<OutgoingWeights, std::unique_ptr<v1::TrainResponse>>;
  // One message. Several items are weights in place, which it announces.
  using Batch = std::vector<Item>;

  // `opened` goes before everything pushed so far; the rank has `chunks` chunks.
  void Open(size_t chunks, v1::TrainResponse opened);
  void Push(OutgoingWeights weights) { queue_.emplace_back(std::move(weights)); }
  void Push(v1::TrainResponse message);
  void Acknowledge(uint64_t messages) { done_ += messages; }
  // The rank seals `step`. From then on it only waits, unless the seal is refused or the attempt is
  // discarded. So the step's provisional weights are announced at once.
  void Seals(uint64_t step) { sealing_step_ = step; }

  // False while the queue is full, by entries or by bytes.
  bool HasRoom() const;
  // The next message. Nullopt: there is nothing to send yet. `flush`: hold nothing back.
  std::optional<Batch> Next(bool flush);
  // Empties it.
  std::deque<Item> Drop();

 private:
  // The number of entries at the queue's head, at most `most`, that fit one message's announcement.
  size_t SharedRun(size_t most) const;
  // Whether the queue's head waits for more entries of its kind.
  bool HoldsBack() const;

  std::deque<Item> queue_;
  size_t bytes_ = 0;             // Of messages except weights.
  std::optional<size_t> bound_;  // Nullopt before Open.
  size_t shared_batch_ = 1;      // The number of weights announced at once.
  uint64_t sealing_step_ = 0;    // 0: none.
  uint64_t done_ = 0;
  uint64_t acknowledged_ = 0;
  bool acknowledged_last_ = false;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRAIN_OUTBOX_QUEUE_H_
