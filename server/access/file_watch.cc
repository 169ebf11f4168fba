#include "server/access/file_watch.h"

#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace ballast::server {
namespace {

constexpr std::chrono::seconds kFilesEvery(1);
constexpr int kLongestPause = 64;  // Looks.

}  // namespace

WatchedFiles::WatchedFiles(std::string name, std::vector<std::string> paths, Read read)
    : name_(std::move(name)),
      paths_(std::move(paths)),
      read_(std::move(read)),
      seen_(Marks()),
      last_look_(seen_) {}

std::vector<int64_t> WatchedFiles::Marks() const {
  std::vector<int64_t> marks;
  for (const std::string& path : paths_) {
    struct stat found = {};
    // All are zero for a file that is gone.
    static_cast<void>(stat(path.c_str(), &found));
    // stat follows links, so a link that leads to another file by now is a change, too. st_ctim
    // also shows another owner, which decides whether a file with secrets is taken.
    for (const int64_t mark :
         {static_cast<int64_t>(found.st_ino), static_cast<int64_t>(found.st_size),
          static_cast<int64_t>(found.st_mode), static_cast<int64_t>(found.st_mtim.tv_sec),
          static_cast<int64_t>(found.st_mtim.tv_nsec), static_cast<int64_t>(found.st_ctim.tv_sec),
          static_cast<int64_t>(found.st_ctim.tv_nsec)}) {
      marks.push_back(mark);
    }
  }
  return marks;
}

void WatchedFiles::Look() {
  // Before the files are read: what changes meanwhile is seen by the next look.
  std::vector<int64_t> marks = Marks();
  const bool has_changed = marks != seen_;
  const bool is_settled = std::exchange(last_look_, marks) == marks;
  if (has_changed && !is_settled) return;
  if (!has_changed && (pause_ == 0 || --looks_left_ > 0)) return;
  const absl::StatusOr<std::string> read = read_();
  // Also after a failure: only a further change counts as one, and the pause brings the next
  // attempt.
  seen_ = std::move(marks);
  if (read.ok()) {
    pause_ = 0;
    spdlog::info("read {} again: {}", name_, *read);
    return;
  }
  // A new change is logged, and its pauses begin again. Later failures of the same files are
  // silent.
  if (has_changed) {
    pause_ = 0;
    spdlog::error("cannot read {} again, and the old stays in force: {} (tried again by itself)",
                  name_, std::string(read.status().message()));
  }
  pause_ = std::clamp(2 * pause_, 1, kLongestPause);
  looks_left_ = pause_;
}

FileWatch::FileWatch(std::vector<WatchedFiles> files)
    : files_(std::move(files)), thread_("watch-files", kFilesEvery, [this] { Look(); }) {}

void FileWatch::Look() {
  for (WatchedFiles& files : files_) files.Look();
}

}  // namespace ballast::server
