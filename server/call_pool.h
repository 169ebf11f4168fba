// Threads for the calls of one kind, and a bound on calls in progress.
//
// gRPC's own threads are few (two on a small host) and serve every stream and call. So no call
// waits or does heavy work on them. A call with work takes a place in a pool and works there. A
// call that waits for the engine keeps its place, but no thread. Pools are separate, so that calls
// of one kind never queue behind a slower kind.
#ifndef BALLAST_SERVER_CALL_POOL_H_
#define BALLAST_SERVER_CALL_POOL_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/heap_settings.h"
#include "cpu_optimizer_service/common/system/helper_threads.h"
#include "server/call_watch.h"

namespace ballast::server {

// Thread-safe. Shut the server down before its pools end, so that no call waits for a task. Tasks
// that have not begun are dropped.
class CallPool {
 public:
  // `kind` follows a number in a message: "256 calls that read state". `watch` watches its calls
  // and outlives it.
  CallPool(std::string kind, size_t threads, size_t most_calls, CallWatch& watch)
      : kind_(std::move(kind)), most_calls_(most_calls), watch_(watch), threads_(threads) {}

  // One call in progress, until destroyed.
  struct Leave {
    void operator()(CallPool* pool) const { --pool->calls_; }
  };
  using Place = std::unique_ptr<CallPool, Leave>;
  // RESOURCE_EXHAUSTED: the pool's bound is reached.
  absl::StatusOr<Place> Enter();

  // An unread answer of so many bytes waits. True: its call may give up its place meanwhile. Then
  // it has to report the end.
  bool AnswerWaits(size_t bytes);
  void AnswerIsOver(size_t bytes) { unread_bytes_ -= bytes; }

  size_t calls() const { return calls_; }  // In progress.
  size_t most_calls() const { return most_calls_; }
  CallWatch& watch() { return watch_; }

  // Runs `task` on one of the pool's threads, in the order of these calls. If the system has no
  // thread, the process ends: gRPC's callbacks would swallow an exception.
  void Run(std::function<void()> task) noexcept { threads_.Run(std::move(task)); }

 private:
  const std::string kind_;
  const size_t most_calls_;
  CallWatch& watch_;
  std::atomic<size_t> calls_ = 0;
  std::atomic<size_t> unread_bytes_ = 0;
  HelperThreads threads_;
};

// Every waiting control call keeps its request in memory, so their number is bounded. This bound
// has room for the ranks of a large job that attach at once.
inline constexpr size_t kMaxControlCalls = 1024;
// For unread answers without a place. Beyond it calls keep their places.
inline constexpr size_t kMaxUnreadBytes = size_t{64} << 20;
// A call that reads state pins the parameter's chunks as long as its reader takes.
inline constexpr size_t kMaxReaders = 256;
// A trace blocks a thread until its steps are committed, and a job has one at a time.
inline constexpr size_t kMaxTraces = 32;

// Streams of training, uploads and readers of weights: room for every rank of large jobs. They have
// no threads here; each costs gRPC's memory.
inline constexpr size_t kMaxStreams = 8192;

// Streams of reflection, including silent ones.
inline constexpr size_t kMaxReflections = 256;

// A server's pools.
struct CallPools {
  // For the calls of all pools.
  CallWatch watch{[trimmer = std::make_shared<HeapTrimmer>()] { trimmer->Tick(); }};
  // Attaching, aborting, saving, loading, changing groups, and descriptions of jobs. A task takes
  // microseconds, or tens of milliseconds for the description of 100,000 parameters. With four
  // threads such tasks do not delay the others.
  CallPool control{"calls that control jobs", 4, kMaxControlCalls, watch};
  // Creating a job allocates and touches its memory, and closing it frees that. A large job takes
  // seconds, on processors that updates need. More threads would not be faster.
  CallPool creation{"calls that create or close jobs", 4, kMaxControlCalls, watch};
  CallPool traces{"calls that trace jobs", kMaxTraces, kMaxTraces, watch};
  // Summaries and planes are bound by memory bandwidth, which updates need too, so a few threads
  // are enough. A reader that does not read holds no thread.
  CallPool readers{"calls that read state", 4, kMaxReaders, watch};
  CallPool streams{"streams of gradients and weights", 1, kMaxStreams, watch};
  // Links of jobs' leads. To open one may lay out a job; its words take no thread.
  CallPool members{"links of members of jobs", 4, kMaxStreams, watch};
  CallPool reflection{"streams of reflection", 1, kMaxReflections, watch};
  CallPool descriptions{"description of itself", 1, 1, watch};

  // Releases a job on a thread of `creation`: the last reference frees the job's memory, which
  // takes about as long as touching it.
  void LetGo(std::shared_ptr<const void> job) {
    if (job != nullptr) creation.Run([job = std::move(job)] {});
  }
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_CALL_POOL_H_
