// Preloaded into a process (LD_PRELOAD), makes its reads of checkpoints fail as those of a disk that breaks: once
// the number in the file that BALLAST_TEST_READS_LEFT names, an int64_t, has been counted down to 0. And its renames with
// flags fail as those of NFS, Lustre, CephFS and some FUSE file systems.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

std::atomic<int64_t>* ReadsLeft() {
  static auto* const left = []() -> std::atomic<int64_t>* {
    const char* const path = std::getenv("BALLAST_TEST_READS_LEFT");
    const int file = path == nullptr ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return nullptr;
    void* const mapped =
        mmap(nullptr, sizeof(int64_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return mapped == MAP_FAILED ? nullptr : static_cast<std::atomic<int64_t>*>(mapped);
  }();
  return left;
}

bool IsOfACheckpoint(int descriptor) {
  char link[64];
  char path[4096];
  std::snprintf(link, sizeof(link), "/proc/self/fd/%d", descriptor);
  const ssize_t bytes = readlink(link, path, sizeof(path) - 1);
  if (bytes < 0) return false;
  path[bytes] = '\0';
  return std::strstr(path, ".safetensors") != nullptr;
}

}  // namespace

extern "C" ssize_t pread(int descriptor, void* to, size_t bytes, off_t offset) {
  using Read = ssize_t (*)(int, void*, size_t, off_t);
  static const auto next = reinterpret_cast<Read>(dlsym(RTLD_NEXT, "pread"));
  std::atomic<int64_t>* const left = ReadsLeft();
  if (left != nullptr && IsOfACheckpoint(descriptor) && left->fetch_sub(1) <= 0) {
    errno = EIO;
    return -1;
  }
  return next(descriptor, to, bytes, offset);
}

extern "C" int renameat2(int, const char*, int, const char*, unsigned int) {
  errno = EINVAL;
  return -1;
}
