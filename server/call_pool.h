// Threads for the calls of one kind, and a bound on how many of them are in progress.
//
// gRPC's own threads are few (two on a small host) and serve every stream and call, so nothing
// waits and nothing heavy runs on them. A call that has work to do takes a place in a pool and does
// it there; a call that waits for the engine keeps its place, but no thread. The pools are apart
// from one another, so that no kind of call queues behind a slower kind.
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
#include "cpu_optimizer_service/common/system/memory_guard.h"
#include "cpu_optimizer_service/common/system/periodic_thread.h"
#include "server/call_watch.h"
#include "server/stream_watch.h"

namespace ballast::server {

// Thread-safe. The server is shut down before its pools end, so that no call waits for a task then:
// tasks that have not begun are dropped.
class CallPool {
 public:
  // `kind` follows a number in a message: "256 calls that read state". `watch`, of its calls,
  // outlives it.
  CallPool(std::string kind, size_t threads, size_t most_calls, CallWatch& watch)
      : kind_(std::move(kind)), most_calls_(most_calls), watch_(watch), threads_(threads) {}

  // One call in progress, until destroyed.
  struct Leave {
    void operator()(CallPool* pool) const { --pool->calls_; }
  };
  using Place = std::unique_ptr<CallPool, Leave>;
  // RESOURCE_EXHAUSTED: as many calls as the pool admits are in progress.
  absl::StatusOr<Place> Enter();

  // An answer of so many bytes waits to be taken: true if its call may give up its place meanwhile.
  // Then it says when that is over.
  bool AnswerWaits(size_t bytes);
  void AnswerIsOver(size_t bytes) { unread_bytes_ -= bytes; }

  size_t calls() const { return calls_; }  // In progress.
  size_t most_calls() const { return most_calls_; }
  CallWatch& watch() { return watch_; }

  // Runs `task` on one of the pool's threads, in the order of these calls.
  void Run(std::function<void()> task) { threads_.Run(std::move(task)); }

 private:
  const std::string kind_;
  const size_t most_calls_;
  CallWatch& watch_;
  std::atomic<size_t> calls_ = 0;
  std::atomic<size_t> unread_bytes_ = 0;
  HelperThreads threads_;
};

// Every control call keeps its request in memory while it waits, so their number has a bound; this
// one has room for the ranks of a large job that attach at once.
inline constexpr size_t kMaxControlCalls = 1024;
// For answers that their peers do not take, or not yet, without a place. Others keep theirs.
inline constexpr size_t kMaxUnreadBytes = size_t{64} << 20;
// A call that reads state pins the parameter's chunks for as long as its reader takes.
inline constexpr size_t kMaxReaders = 256;
// A trace blocks a thread until its steps are committed, and a job has one at a time.
inline constexpr size_t kMaxTraces = 32;

// Streams of training, uploads and readers of weights: room for every rank of large jobs. They have
// no threads here; what one costs is gRPC's memory for it.
inline constexpr size_t kMaxStreams = 8192;

// Streams of reflection, whose peers ask or go within some seconds.
inline constexpr size_t kMaxReflections = 256;

// A server's pools.
struct CallPools {
  // For the calls of all pools.
  CallWatch watch{[trimmer = std::make_shared<HeapTrimmer>()] { trimmer->Tick(); }};
  StreamWatch stream_watch;
  PeriodicThread stream_looks{"watch-streams", StreamWatch::kLookEvery,
                              [this] { stream_watch.Look(); }};
  // Attaching, aborting, saving, loading, changing groups, and descriptions of jobs. Each
  // task takes microseconds, or some ten milliseconds where a job has 100,000 parameters to
  // describe; four threads keep a few of those from holding up the others.
  CallPool control{"calls that control jobs", 4, kMaxControlCalls, watch};
  // Creating a job allocates and touches its memory, and closing it frees that: seconds for a large
  // one, with the processors that updates need, so more at once would not be faster.
  CallPool creation{"calls that create or close jobs", 4, kMaxControlCalls, watch};
  CallPool traces{"calls that trace jobs", kMaxTraces, kMaxTraces, watch};
  // Summaries and planes are bound by the memory that updates need too, so a few threads are
  // enough. A reader that does not read takes none.
  CallPool readers{"calls that read state", 4, kMaxReaders, watch};
  CallPool streams{"streams of gradients and weights", 1, kMaxStreams, watch};
  CallPool reflection{"streams of reflection", 1, kMaxReflections, watch};
  // Every thread is asked for its stack.
  CallPool descriptions{"description of itself", 1, 1, watch};

  // Gives up a job on a thread of `creation`: the last reference frees the job's memory, which
  // takes about as long as touching it did.
  void LetGo(std::shared_ptr<const void> job) {
    // Without memory to go there, on this one.
    if (job != nullptr) (void)RunsInMemory([&] { creation.Run([job = std::move(job)] {}); });
  }
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_CALL_POOL_H_
