// In what order, and when, the tests' device does what its streams were given (fake_device.h): one
// thread, and a seed that chooses among all that streams and events allow.
//
// Work waits until it, or something after it, is demanded. How much is done before that depends on
// seed % 4: 0 nothing, 1 a little, 2 most, 3 everything as soon as it can be. With 0 and one thread
// of the host, a run is a function of the seed.
//
// Thread-safe.
#ifndef BALLAST_TESTS_GPU_EMULATOR_FAKE_SCHEDULE_H_
#define BALLAST_TESTS_GPU_EMULATOR_FAKE_SCHEDULE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::worker {

// Prints the message and aborts: a test, or what it tests, broke a contract of device.h.
[[noreturn]] void FakeDeviceAbort(const std::string& message);

class FakeSchedule {
 public:
  class Queue;  // A stream's.

  // The end of the first `position` pieces of a queue.
  struct Point {
    std::shared_ptr<Queue> queue;
    uint64_t position = 0;
  };

  // `around` is called by the schedule's thread with true before each piece of work, and with false
  // after it.
  FakeSchedule(uint64_t seed, std::function<void(bool begins)> around);
  ~FakeSchedule();  // Does what is left.

  std::shared_ptr<Queue> AddQueue(std::string name);

  // `host` is the pinned memory that the work reads or writes, if it does.
  Point Give(const std::shared_ptr<Queue>& queue, std::function<void()> work,
             absl::Span<const std::byte> host = {});
  // What the queue is given from now on comes after `point`.
  void GiveWait(const std::shared_ptr<Queue>& queue, const Point& point);
  // Everything that the queue was given so far.
  Point End(const std::shared_ptr<Queue>& queue) const;

  // Has the work before `point` done some time soon; true if it is done.
  bool Demand(const Point& point);
  // Has it done, and waits. False if it never will be, and nothing runs any more.
  bool Await(const Point& point);
  // The same for all queues.
  void AwaitAll();

  // What was not begun never is.
  void Lose();

  // The name of a queue that has work left which uses some of `host`, or empty.
  std::string UserOf(absl::Span<const std::byte> host) const;

 private:
  struct Piece {
    std::function<void()> work;
    Point after;  // No queue: of nothing.
    absl::Span<const std::byte> host;
  };

  void Run();
  Queue* Choose() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Want(Queue& queue, uint64_t position) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Point Push(const std::shared_ptr<Queue>& queue, Piece piece);

  const double early_;  // How likely something is done before it is demanded.
  const std::function<void(bool)> around_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<std::shared_ptr<Queue>> queues_ ABSL_GUARDED_BY(mutex_);
  // Two, so that what is done early does not depend on the thread's progress.
  std::mt19937_64 at_giving_ ABSL_GUARDED_BY(mutex_);
  std::mt19937_64 at_choosing_ ABSL_GUARDED_BY(mutex_);
  Queue* running_ ABSL_GUARDED_BY(mutex_) = nullptr;
  absl::Span<const std::byte> running_host_ ABSL_GUARDED_BY(mutex_);
  bool lost_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_EMULATOR_FAKE_SCHEDULE_H_
