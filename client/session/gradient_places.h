// Who may write to the places for gradients in shared memory.
//
// A trainer that asks for a chunk's place writes there itself. The other places are the session's,
// to copy pushes of other memory to: such a place is free until a push lies there, again when the
// service holds that push, and after a final push not before the next step, because the service
// then reads it where it is.
//
// Thread-safe.
#ifndef BALLAST_CLIENT_SESSION_GRADIENT_PLACES_H_
#define BALLAST_CLIENT_SESSION_GRADIENT_PLACES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cpu_optimizer_service/common/mutex.h"

namespace ballast::client {

class GradientPlaces {
 public:
  explicit GradientPlaces(size_t chunks) : states_(chunks, State::kFree) {}

  // Whether the trainer may write there; then only the trainer does, from now on. Not while a push
  // that the session copied there is in use.
  bool GiveToTrainer(int chunk) {
    MutexLock lock(mutex_);
    if (states_[chunk] == State::kTaken) return false;
    states_[chunk] = State::kTrainers;
    return true;
  }
  // Whether the session may write there now; then it is not free any more.
  bool Take(int chunk) {
    MutexLock lock(mutex_);
    if (states_[chunk] != State::kFree) return false;
    states_[chunk] = State::kTaken;
    return true;
  }
  void Free(int chunk) {
    MutexLock lock(mutex_);
    if (states_[chunk] == State::kTaken) states_[chunk] = State::kFree;
  }
  // A step begins: the service reads no gradient of the one before.
  void FreeAll() {
    MutexLock lock(mutex_);
    for (State& state : states_) {
      if (state == State::kTaken) state = State::kFree;
    }
  }

 private:
  enum class State : uint8_t { kFree, kTaken, kTrainers };

  Mutex mutex_;
  std::vector<State> states_ ABSL_GUARDED_BY(mutex_);  // By chunk of the job.
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_GRADIENT_PLACES_H_
