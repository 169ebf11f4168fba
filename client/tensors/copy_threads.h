// The threads that copy a session's gradients and weights, besides the calling ones.
#ifndef BALLAST_CLIENT_TENSORS_COPY_THREADS_H_
#define BALLAST_CLIENT_TENSORS_COPY_THREADS_H_

#include <cstdint>
#include <functional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "cpu_optimizer_service/common/system/helper_threads.h"

namespace ballast::client {

// Thread-safe. Threads start with the first large copy.
class CopyThreads {
 public:
  // `most`: besides the caller. By default one for each other usable processor, up to what
  // saturates memory.
  explicit CopyThreads(int most = DefaultMost()) : most_(most), threads_(most) {}
  static int DefaultMost();

  // How many of them, at most `most`, are worth starting for so many bytes.
  int WorthFor(int64_t bytes) const;
  // As HelperThreads::Run.
  void Run(std::function<void()> task) { threads_.Run(std::move(task)); }
  // Runs body(0) ... body(count - 1), which copy `bytes` in total, on the caller's thread and the
  // others, and waits for them. After an error, which is returned, no further one begins.
  absl::Status ForEach(int64_t count, int64_t bytes, absl::FunctionRef<absl::Status(int64_t)> body);

 private:
  const int most_;
  HelperThreads threads_;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TENSORS_COPY_THREADS_H_
