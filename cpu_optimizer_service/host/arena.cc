#include "cpu_optimizer_service/host/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/text/activity.h"
#include "cpu_optimizer_service/host/huge_pages.h"

namespace ballast {
namespace {

// The smallest page that Linux has. Where pages are larger, each is written more than once, which
// costs little.
constexpr int64_t kPageBytes = 4096;
// What one task touches: a few milliseconds of the system's work.
constexpr int64_t kTouchBytes = 4 * kHugePageBytes;
// Smaller arenas are not looked at: a page more or less at their ends would count too much.
constexpr int64_t kWarnBytes = 32 * kHugePageBytes;

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

void TouchRange(std::byte* data, int64_t begin, int64_t end) {
  for (int64_t offset = begin; offset < end; offset += kPageBytes) {
    data[offset] = std::byte{0};  // A write takes the page; a read would map the zero page.
  }
}

class AnonymousArenaFactory : public ArenaFactory {
 public:
  AnonymousArenaFactory(TaskPool* tasks, std::function<void(const std::string&)> warn)
      : tasks_(tasks), warn_(std::move(warn)) {}

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
    // Before the pages are touched, because the system chooses a page's size then. It is a wish:
    // memory in small pages is only slower, and WarnOfSmallPages says so.
    if (huge) madvise(data, bytes, MADV_HUGEPAGE);
    if (touch == Touch::kNow) {
      TouchAll(data, bytes);
      // Only after the touch: the share of huge pages is known of pages that are there.
      WarnOfSmallPages(data, bytes, label);
    }
    return std::make_unique<AnonymousArena>(begin, mapped_bytes, data, bytes);
  }

 private:
  void TouchAll(std::byte* data, int64_t bytes) const {
    const int64_t pieces = DivideUp(bytes, kTouchBytes);
    Progress& progress = Progress::OfThisThread();
    const auto touch_piece = [&](int64_t piece) {
      const int64_t begin = piece * kTouchBytes;
      const int64_t end = std::min(bytes, begin + kTouchBytes);
      TouchRange(data, begin, end);
      progress.Count(end - begin);
    };
    if (tasks_ == nullptr || pieces < 2) {
      for (int64_t piece = 0; piece < pieces; ++piece) touch_piece(piece);
    } else {
      tasks_->ForEach(pieces, touch_piece);
    }
  }

  void WarnOfSmallPages(const std::byte* data, int64_t bytes, absl::string_view label) {
    // After one warning the text of /proc/self/smaps, which takes long to make, is not read again.
    // Jobs may be created on several threads at once, so the exchange decides which of them warns.
    if (warn_ == nullptr || bytes < kWarnBytes || warned_.load()) return;
    const std::string warning = HugePageWarning(HugePageShare(data, bytes), label);
    if (!warning.empty() && !warned_.exchange(true)) warn_(warning);
  }

  TaskPool* const tasks_;
  const std::function<void(const std::string&)> warn_;
  std::atomic<bool> warned_ = false;
};

}  // namespace

std::unique_ptr<ArenaFactory> MakeAnonymousArenaFactory(
    TaskPool* tasks, std::function<void(const std::string&)> warn) {
  return std::make_unique<AnonymousArenaFactory>(tasks, std::move(warn));
}

}  // namespace ballast
