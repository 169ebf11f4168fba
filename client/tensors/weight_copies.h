// Copies weights to the trainer's parameters as they arrive, beside the session's thread.
#ifndef BALLAST_CLIENT_TENSORS_WEIGHT_COPIES_H_
#define BALLAST_CLIENT_TENSORS_WEIGHT_COPIES_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/types/span.h"
#include "client/tensors/copy_threads.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {

// Thread-safe. Borrows `threads`, which outlives it.
class WeightCopies {
 public:
  // `copy` copies a chunk, and does not throw. `chunks`, `bytes`: the totals.
  WeightCopies(CopyThreads& threads, int64_t chunks, int64_t bytes,
               std::function<void(int chunk)> copy);
  ~WeightCopies() { Stop(); }

  // The chunk's weights are there, and stay until Finish has returned.
  void Add(int chunk);
  // Returns when everything added is copied; the calling thread helps.
  void Finish();
  // The same for these chunks alone, each of which was added.
  void Finish(absl::Span<const int> chunks);
  // Drops waiting and later chunks. Returns when no copy runs any more.
  void Stop();

 private:
  void CopyAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Copy(int chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Help();

  CopyThreads& threads_;
  const int most_helpers_;
  const std::function<void(int chunk)> copy_;
  Mutex mutex_;
  CondVar idle_;
  std::vector<int> waiting_ ABSL_GUARDED_BY(mutex_);
  int helpers_ ABSL_GUARDED_BY(mutex_) = 0;           // Started and unfinished.
  std::vector<int> copying_ ABSL_GUARDED_BY(mutex_);  // Chunks, now.
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TENSORS_WEIGHT_COPIES_H_
