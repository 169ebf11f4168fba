// Tells when files have changed.
#ifndef BALLAST_SERVER_ACCESS_FILE_WATCH_H_
#define BALLAST_SERVER_ACCESS_FILE_WATCH_H_

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::server {

// Looks every second, on a thread of its own: a disk that hangs holds up nothing else.
class FileWatch {
 public:
  // `changed` is called, on that thread, after any of the files is another, has been written to, or
  // is gone.
  FileWatch(std::vector<std::string> paths, std::function<void()> changed);
  ~FileWatch();

 private:
  // What shows that files have changed.
  std::vector<int64_t> Look() const;
  void Run();

  const std::vector<std::string> paths_;
  const std::function<void()> changed_;
  std::vector<int64_t> seen_;
  Mutex mutex_;
  CondVar stopping_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_ACCESS_FILE_WATCH_H_
