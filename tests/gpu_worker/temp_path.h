// Paths for a test's files that no other process uses, such as the same test of another build.
#ifndef BALLAST_TESTS_GPU_WORKER_TEMP_PATH_H_
#define BALLAST_TESTS_GPU_WORKER_TEMP_PATH_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

namespace ballast::worker {

// Nothing is there; removed, with all that is in it, at the end.
class TempPath {
 public:
  explicit TempPath(const std::string& name)
      : path_(testing::TempDir() + "/ballast_" + std::to_string(getpid()) + "_" + name) {
    std::filesystem::remove_all(path_);
  }
  ~TempPath() { std::filesystem::remove_all(path_); }
  TempPath(const TempPath&) = delete;
  TempPath& operator=(const TempPath&) = delete;

  const std::string& str() const { return path_; }

 private:
  const std::string path_;
};

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_WORKER_TEMP_PATH_H_
