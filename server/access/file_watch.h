// Reads files again when they have changed.
#ifndef BALLAST_SERVER_ACCESS_FILE_WATCH_H_
#define BALLAST_SERVER_ACCESS_FILE_WATCH_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/periodic_thread.h"

namespace ballast::server {

// Files that belong together. Not thread-safe.
class WatchedFiles {
 public:
  // Takes what the files have now, and says what that is; with an error all stays as it was.
  using Read = std::function<absl::StatusOr<std::string>()>;

  // `name` is for the log: "roles and tokens". Empty paths are none.
  WatchedFiles(std::string name, std::vector<std::string> paths, Read read);

  // Reads after any of the files is another, has been written to, or is gone, and this look found
  // them as the last one: what is being written is left alone. What fails then may still be halfway
  // through a change: it is read again after 1, 2, 4, ... 64, 64 more looks, until that
  // succeeds. The log has one line for the failure and one for the success.
  void Look();

 private:
  // What shows that files have changed.
  std::vector<int64_t> Marks() const;

  const std::string name_;
  const std::vector<std::string> paths_;
  const Read read_;
  std::vector<int64_t> seen_;  // When they were read.
  std::vector<int64_t> last_look_;
  int pause_ = 0;  // In looks, before the next attempt. Zero: the last one succeeded.
  int looks_left_ = 0;
};

// Looks every second, on a thread of its own: a disk that hangs holds up nothing else.
class FileWatch {
 public:
  explicit FileWatch(std::vector<WatchedFiles> files);

 private:
  void Look();

  std::vector<WatchedFiles> files_;  // The thread's.
  PeriodicThread thread_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_ACCESS_FILE_WATCH_H_
