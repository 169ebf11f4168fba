// Who may write to the places for gradients in shared memory.
//
// The trainer itself writes to a place that it has asked for. The other places are the session's:
// it copies pushes of other memory there. Such a place is free until the session copies a push
// there, and again when the service has that push; after a final push, from the next step on,
// because the service reads a final gradient in place.
//
//   kFree -- GiveToTrainer --> kTrainers (for the session's lifetime)
//   kFree -- Take --> kTaken -- Free of that use, or the next step --> kFree
//
// A push may be released late, on another thread, when the next step has begun and the place is in
// use again. So each use has a number, and Free ends only the use that it names.
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
  explicit GradientPlaces(size_t chunks) : places_(chunks) {}

  // Whether the trainer may write to the chunk's place; then only the trainer does from now on.
  // False while a push that the session copied there is in use.
  bool GiveToTrainer(int chunk) {
    MutexLock lock(mutex_);
    Place& place = places_[chunk];
    if (place.state == State::kTaken) return false;
    place.state = State::kTrainers;
    return true;
  }
  // The number of this use if the session may write to the place now, and then it is no longer free;
  // otherwise 0.
  uint64_t Take(int chunk) {
    MutexLock lock(mutex_);
    Place& place = places_[chunk];
    if (place.state != State::kFree) return 0;
    place.state = State::kTaken;
    return place.use = ++last_use_;
  }
  // Nothing if another use has begun since.
  void Free(int chunk, uint64_t use) {
    MutexLock lock(mutex_);
    Place& place = places_[chunk];
    if (place.state == State::kTaken && place.use == use) place.state = State::kFree;
  }
  // A step begins: the service no longer reads gradients of the previous step.
  void FreeAll() {
    MutexLock lock(mutex_);
    for (Place& place : places_) {
      if (place.state == State::kTaken) place.state = State::kFree;
    }
  }

 private:
  enum class State : uint8_t { kFree, kTaken, kTrainers };
  struct Place {
    State state = State::kFree;
    uint64_t use = 0;  // The last one.
  };

  Mutex mutex_;
  std::vector<Place> places_ ABSL_GUARDED_BY(mutex_);  // By chunk of the job.
  uint64_t last_use_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_GRADIENT_PLACES_H_
