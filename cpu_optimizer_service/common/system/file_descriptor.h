// A file descriptor with an owner.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_FILE_DESCRIPTOR_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_FILE_DESCRIPTOR_H_

#include <unistd.h>

#include <utility>

namespace ballast {

// Closed on destruction. -1: empty.
class FileDescriptor {
 public:
  explicit FileDescriptor(int number = -1) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~FileDescriptor() {
    if (number_ >= 0) close(number_);
  }
  int number() const { return number_; }
  // The caller gets the number, and closes it.
  int Release() { return std::exchange(number_, -1); }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_FILE_DESCRIPTOR_H_
