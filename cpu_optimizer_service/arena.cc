#include "cpu_optimizer_service/arena.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;
constexpr int64_t kPageBytes = 4096;

class AnonymousArena : public Arena {
 public:
  AnonymousArena(std::byte* mapping, int64_t mapped_bytes, std::byte* data, int64_t size_bytes)
      : mapping_(mapping), mapped_bytes_(mapped_bytes), data_(data), size_bytes_(size_bytes) {}
  ~AnonymousArena() override { munmap(mapping_, mapped_bytes_); }

  std::byte* data() override { return data_; }
  int64_t size_bytes() const override { return size_bytes_; }

 private:
  std::byte* const mapping_;
  const int64_t mapped_bytes_;
  std::byte* const data_;
  const int64_t size_bytes_;
};

class AnonymousArenaFactory : public ArenaFactory {
 public:
  absl::StatusOr<std::unique_ptr<Arena>> Create(int64_t bytes, absl::string_view label,
                                                Touch touch) override {
    // Room to begin on a huge page: the kernel backs only whole, aligned ones.
    const bool huge = bytes >= kHugePageBytes;
    const int64_t alignment = huge ? kHugePageBytes : kPageBytes;
    const int64_t mapped_bytes = bytes + alignment;
    void* mapping = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat("cannot map ", mapped_bytes, " bytes for ",
                                                       label, ": ", std::strerror(errno)));
    }
    auto* begin = static_cast<std::byte*>(mapping);
    const auto address = reinterpret_cast<uintptr_t>(begin);
    std::byte* data = begin + (alignment - address % alignment) % alignment;
    if (huge) madvise(data, bytes, MADV_HUGEPAGE);
    for (int64_t offset = 0; touch == Touch::kNow && offset < bytes; offset += kPageBytes) {
      data[offset] = std::byte{0};  // A write takes the page; a read would map the zero page.
    }
    return std::make_unique<AnonymousArena>(begin, mapped_bytes, data, bytes);
  }
};

}  // namespace

std::unique_ptr<ArenaFactory> MakeAnonymousArenaFactory() {
  return std::make_unique<AnonymousArenaFactory>();
}

}  // namespace ballast
