// Reads changed files again.
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
  // Takes the files' contents and describes them. After an error nothing has changed.
  using Read = std::function<absl::StatusOr<std::string>()>;

  // `name` is for the log: "roles and tokens". Empty paths are ignored.
  WatchedFiles(std::string name, std::vector<std::string> paths, Read read);

  // Reads the files once they have changed and two successive looks find them equal, because a file
  // may still be being written. After a failure, the files may be halfway through a change: they
  // are read again after 1, 2, 4, ... 64, 64 more looks, until that succeeds. The log has one line
  // for the failure and one for the success.
  void Look();

 private:
  // Marks that show whether files have changed.
  std::vector<int64_t> Marks() const;

  const std::string name_;
  const std::vector<std::string> paths_;
  const Read read_;
  std::vector<int64_t> seen_;  // The marks at the last read.
  std::vector<int64_t> last_look_;
  int pause_ = 0;  // Looks before the next attempt. Zero: the last one succeeded.
  int looks_left_ = 0;
};

// Looks every second, on its own thread: a hanging disk delays only that.
class FileWatch {
 public:
  explicit FileWatch(std::vector<WatchedFiles> files);

 private:
  void Look();

  std::vector<WatchedFiles> files_;  // Used only by the thread.
  PeriodicThread thread_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_ACCESS_FILE_WATCH_H_
