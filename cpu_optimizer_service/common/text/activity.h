// The progress of long work, for the log, the page, the API and the tool.
//
//   const std::shared_ptr<Progress> progress = activities.Begin({.kind = ..., .job = "gpt2"});
//   const CountsIn here(*progress);               // Calls from here count in it,
//   ...
//   Progress::OfThisThread().Expect(all_bytes);   // deep down, without an argument for it.
//   Progress::OfThisThread().Count(bytes);
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_ACTIVITY_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_ACTIVITY_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast {

enum class ActivityKind : uint8_t {
  kMakingMemory,          // For a job that is being created.
  kTakingFirstWeights,    // From the ranks.
  kMakingSecondVersions,  // Memory that lets steps go on while a checkpoint is written.
  kWritingCheckpoint,
  kVerifyingCheckpoint,  // Reading all of its bytes; also before a load.
  kLoadingCheckpoint,
  kExportingWeights,  // Only in the tool. In messages it is kOther, as a newer service's kinds.
  kOther,
};

// A snapshot.
struct Activity {
  uint64_t number = 0;  // Unique among these Activities.
  ActivityKind kind = ActivityKind::kMakingMemory;
  std::string job;        // Empty: no job's.
  std::string directory;  // Of checkpoints; may be empty.
  int64_t done_bytes = 0;
  int64_t total_bytes = 0;            // 0: still unknown.
  double seconds = 0;                 // Since it began.
  double seconds_since_progress = 0;  // Since its last progress.
};

// "making memory for second versions: 3.1 of 5.2 GiB, 201.50 MiB/s, 11s left". With the directory,
// without the job. If there was no progress for long, it says so, without a cause.
std::string ToLine(const Activity& activity);

// Thread-safe.
class Progress {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Progress(int64_t total_bytes = 0) : total_(total_bytes) {}

  // Adds to the work.
  void Expect(int64_t bytes) { total_ += bytes; }
  // Adds to the finished work. 0 shows that it goes on. A negative number has to be repeated.
  void Count(int64_t bytes) {
    done_ += bytes;
    last_ = Clock::now();
  }

  int64_t done_bytes() const { return done_; }
  int64_t total_bytes() const { return total_; }
  double seconds() const { return Since(began_); }
  double seconds_since_progress() const { return Since(last_); }

  // That of this thread's innermost CountsIn, or an invisible one.
  static Progress& OfThisThread();

 private:
  static double Since(Clock::time_point then) {
    return std::chrono::duration<double>(Clock::now() - then).count();
  }

  const Clock::time_point began_ = Clock::now();
  std::atomic<int64_t> done_ = 0;
  std::atomic<int64_t> total_;
  std::atomic<Clock::time_point> last_ = Clock::now();
};

// During its life this thread's work counts there. A thread that it starts needs its own.
class CountsIn {
 public:
  explicit CountsIn(Progress& progress);
  ~CountsIn();
  CountsIn(const CountsIn&) = delete;
  CountsIn& operator=(const CountsIn&) = delete;

 private:
  Progress* const before_;
};

// Thread-safe.
class Activities {
 public:
  struct What {
    ActivityKind kind = ActivityKind::kMakingMemory;
    std::string job;
    std::string directory;
    int64_t total_bytes = 0;
  };
  // In progress until the last copy of the pointer is gone.
  std::shared_ptr<Progress> Begin(What what);
  std::vector<Activity> List() const;  // Oldest first.

 private:
  struct Entry {
    uint64_t number = 0;
    What what;
    std::weak_ptr<const Progress> progress;
  };

  mutable Mutex mutex_;
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_ACTIVITY_H_
