// Who may write to the places for gradients in shared memory.
//
// The trainer itself writes to a place that it has asked for. The other places are the session's:
// it copies pushes of other memory there. Such a place is free until the session copies a push
// there, and again when the service has that push; after a final push, from the next step on,
// because the service reads a final gradient in place.
//
//   kFree -- GiveToTrainer --> kTrainers (for the session's lifetime)
//   kFree -- Take --> kTaken -- Free, or the next step --> kFree
//
// Thread-safe.
#ifndef BALLAST_CLIENT_SESSION_GRADIENT_PLACES_H_
#define BALLAST_CLIENT_SESSION_GRADIENT_PLACES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {

class GradientPlaces {
 public:
  explicit GradientPlaces(size_t chunks) : states_(chunks, State::kFree) {}

  // Whether the trainer may write to the chunk's place; then only the trainer does from now on.
  // False while a push that the session copied there is in use.
  bool GiveToTrainer(int chunk) {
    MutexLock lock(mutex_);
    if (states_[chunk] == State::kTaken) return false;
    states_[chunk] = State::kTrainers;
    return true;
  }
  // Whether the session may write to the place now; then it is no longer free.
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
  // A step begins: the service no longer reads gradients of the previous step.
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
