// The threads that copy gradients and weights of one session, beside those that call.
#ifndef BALLAST_CLIENT_C_API_COPY_THREADS_H_
#define BALLAST_CLIENT_C_API_COPY_THREADS_H_

#include <cstdint>
#include <functional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "cpu_optimizer_service/common/system/helper_threads.h"

namespace ballast::client {

// Thread-safe. A thread is started when there is something large to copy.
class CopyThreads {
 public:
  // `most`: beside the caller. By default one for each other processor that this process may use,
  // and no more than memory takes.
  explicit CopyThreads(int most = DefaultMost()) : most_(most), threads_(most) {}
  static int DefaultMost();

  // How many of them are worth their start, at most `most`, where so many bytes are copied.
  int WorthFor(int64_t bytes) const;
  // As HelperThreads::Run; may throw std::bad_alloc.
  void Run(std::function<void()> task) { threads_.Run(std::move(task)); }
  // Runs body(0) ... body(count - 1), which copy `bytes` altogether, on the caller's thread and on
  // the others, and waits for them. After an error, which is returned, it begins no more.
  absl::Status ForEach(int64_t count, int64_t bytes, absl::FunctionRef<absl::Status(int64_t)> body);

 private:
  const int most_;
  HelperThreads threads_;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_C_API_COPY_THREADS_H_
