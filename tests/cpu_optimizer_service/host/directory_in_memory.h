// A directory on /dev/shm for a test, with what is in it.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_HOST_DIRECTORY_IN_MEMORY_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_HOST_DIRECTORY_IN_MEMORY_H_

#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <system_error>

namespace ballast {

// Gone when it is destroyed.
class DirectoryInMemory {
 public:
  DirectoryInMemory() {
    if (mkdtemp(outside_.data()) == nullptr) abort();
  }
  ~DirectoryInMemory() {
    std::error_code ignored;
    std::filesystem::remove_all(outside_, ignored);
  }
  DirectoryInMemory(const DirectoryInMemory&) = delete;
  DirectoryInMemory& operator=(const DirectoryInMemory&) = delete;

  // One that is there.
  const std::string& outside() const { return outside_; }
  // One in it that is not there yet.
  std::string path() const { return outside_ + "/state"; }

 private:
  std::string outside_ = "/dev/shm/ballast-test-XXXXXX";
};

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_HOST_DIRECTORY_IN_MEMORY_H_
