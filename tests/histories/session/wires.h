// What the streams of a history do to the messages on them: where they break, what comes twice,
// whose messages are late.
#ifndef BALLAST_TESTS_HISTORIES_SESSION_WIRES_H_
#define BALLAST_TESTS_HISTORIES_SESSION_WIRES_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "ballast/v1/train.pb.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/job/job.h"

namespace ballast::histories {

// Where a stream breaks: at the `message`th message of the rank in an attempt, over all its
// streams.
struct Break {
  enum Where : uint8_t {
    kUp,        // Going up: it is lost.
    kUpHeld,    // Going up: it is handled, and its acknowledgement lost.
    kUpUnseen,  // As kUp, and the service notices only when the next stream comes.
    kDown,      // Coming down: it and all after it are lost.
  };
  Where where = kUp;
  int message = 0;
};

struct RankFaults {
  std::vector<Break> breaks;
  bool breaks_at_seal = false;  // Just after the seal was handled.
  std::set<int> repeats;        // Messages going up that are handled twice, if gradients.
  bool late = false;            // Nothing goes either way until Release.
};

// Thread-safe.
class Wires {
 public:
  explicit Wires(int world_size) : ranks_(world_size) {}

  // ---- the player's
  void Plan(std::vector<RankFaults> faults);
  void Release();  // Of late ranks.
  // False if it has not come to that within a minute. Of a rank that discards: begun in this try.
  bool AwaitBegun(int rank, uint32_t try_number);
  // Or until Release.
  bool AwaitSealHandled(int rank);
  int64_t breaks() const;
  int64_t repeats() const;

  // ---- the streams'
  enum class Fate : uint8_t { kPass, kTwice, kBreakBefore, kBreakUnseen, kBreakAfter };
  // Blocks while the rank is late.
  Fate GoesUp(int rank, const v1::TrainRequest& message);
  void WasHandled(int rank, const v1::TrainRequest& message);
  // A stream is opened: the service says what it has.
  void WasOpened(int rank, const RankPosition& position);
  // Whether it arrives.
  bool ComesDown(int rank);
  // A stream whose end the service has not noticed: it lives until the next Plan.
  void KeepUnseen(std::unique_ptr<RankStream> stream);

 private:
  struct Rank {
    RankFaults faults;
    int up = 0;
    int down = 0;
    std::optional<uint32_t> begun;  // The newest try.
    bool seal_handled = false;
  };
  void AwaitPassage(const Rank& rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<Rank> ranks_ ABSL_GUARDED_BY(mutex_);
  bool released_ ABSL_GUARDED_BY(mutex_) = true;
  int64_t breaks_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t repeats_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::unique_ptr<RankStream>> unseen_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_SESSION_WIRES_H_
