#include "tests/gpu_emulator/fake_memory.h"

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/gpu_emulator/fake_schedule.h"

namespace ballast::worker {
namespace {

// NaN as fp32, bf16, fp16 and double; a token and an index that nothing has.
constexpr int kPoison = 0xFF;

std::byte* AlignedBytes(size_t alignment, size_t size_bytes) {
  void* bytes = nullptr;
  if (posix_memalign(&bytes, alignment, size_bytes) != 0) return nullptr;
  return static_cast<std::byte*>(bytes);
}

}  // namespace

FakeMemory::FakeMemory(std::string device, int64_t memory_bytes)
    : device_(std::move(device)), memory_bytes_(memory_bytes) {}

std::byte* FakeMemory::AllocateDevice(size_t size_bytes) {
  MutexLock lock(mutex_);
  if (size_bytes > static_cast<size_t>(memory_bytes_ - allocated_bytes_)) return nullptr;
  std::byte* bytes = AlignedBytes(256, size_bytes);
  if (bytes == nullptr) return nullptr;
  std::memset(bytes, 0, size_bytes);
  if (!open_) ASAN_POISON_MEMORY_REGION(bytes, size_bytes);
  device_memory_[bytes] = size_bytes;
  allocated_bytes_ += size_bytes;
  most_allocated_bytes_ = std::max(most_allocated_bytes_, allocated_bytes_);
  return bytes;
}

void FakeMemory::FreeDevice(std::byte* bytes, size_t size_bytes) {
  MutexLock lock(mutex_);
  device_memory_.erase(bytes);
  allocated_bytes_ -= size_bytes;
  ASAN_UNPOISON_MEMORY_REGION(bytes, size_bytes);
  std::memset(bytes, kPoison, size_bytes);
  std::free(bytes);
}

std::byte* FakeMemory::AllocateHost(size_t size_bytes) {
  std::byte* bytes = AlignedBytes(4096, size_bytes);
  if (bytes != nullptr) std::memset(bytes, kPoison, size_bytes);
  return bytes;
}

void FakeMemory::FreeHost(std::byte* bytes) { std::free(bytes); }

void FakeMemory::Pin(absl::Span<const std::byte> bytes, absl::string_view what) {
  MutexLock lock(mutex_);
  if (Overlap(pinned_, bytes.data(), bytes.size())) {
    FakeDeviceAbort(absl::StrCat("memory for ", what, " is pinned twice"));
  }
  if (!bytes.empty()) pinned_[bytes.data()] = bytes.size();
}

void FakeMemory::Unpin(absl::Span<const std::byte> bytes) {
  MutexLock lock(mutex_);
  if (!bytes.empty()) pinned_.erase(bytes.data());
}

bool FakeMemory::IsPinned(absl::Span<const std::byte> bytes) const {
  MutexLock lock(mutex_);
  return Contain(pinned_, bytes.data(), bytes.size());
}

void FakeMemory::CheckOnDevice(const void* memory, size_t size_bytes, absl::string_view use) const {
  MutexLock lock(mutex_);
  if (size_bytes == 0) return;
  if (Contain(device_memory_, static_cast<const std::byte*>(memory), size_bytes)) return;
  FakeDeviceAbort(absl::StrCat(use, ": ", size_bytes, " bytes are not within memory of ", device_));
}

void FakeMemory::CheckOnHost(absl::Span<const std::byte> bytes, absl::string_view use) const {
  MutexLock lock(mutex_);
  if (!Overlap(device_memory_, bytes.data(), bytes.size())) return;
  FakeDeviceAbort(absl::StrCat(use, ": the host's side is memory of ", device_));
}

void FakeMemory::CheckNothingIsLeft() const {
  MutexLock lock(mutex_);
  if (!device_memory_.empty()) {
    FakeDeviceAbort(absl::StrCat(device_memory_.size(), " pieces of device memory are left"));
  }
  if (!pinned_.empty()) {
    FakeDeviceAbort(absl::StrCat(pinned_.size(), " pieces of pinned host memory are left"));
  }
}

void FakeMemory::Open() {
  MutexLock lock(mutex_);
  open_ = true;
  for ([[maybe_unused]] const auto& [begin, size] : device_memory_) {
    ASAN_UNPOISON_MEMORY_REGION(begin, size);
  }
}

void FakeMemory::Close() {
  MutexLock lock(mutex_);
  open_ = false;
  for ([[maybe_unused]] const auto& [begin, size] : device_memory_) {
    ASAN_POISON_MEMORY_REGION(begin, size);
  }
}

int64_t FakeMemory::free_bytes() const {
  MutexLock lock(mutex_);
  return memory_bytes_ - allocated_bytes_;
}

int64_t FakeMemory::allocated_bytes() const {
  MutexLock lock(mutex_);
  return allocated_bytes_;
}

int64_t FakeMemory::most_allocated_bytes() const {
  MutexLock lock(mutex_);
  return most_allocated_bytes_;
}

bool FakeMemory::Overlap(const Ranges& ranges, const std::byte* begin, size_t size) {
  const auto after = ranges.lower_bound(begin + size);
  if (size == 0 || after == ranges.begin()) return false;
  const auto& [last_begin, last_size] = *std::prev(after);
  return begin < last_begin + last_size;
}

bool FakeMemory::Contain(const Ranges& ranges, const std::byte* begin, size_t size) {
  const auto after = ranges.upper_bound(begin);
  if (after == ranges.begin()) return false;
  const auto& [last_begin, last_size] = *std::prev(after);
  return begin + size <= last_begin + last_size;
}

}  // namespace ballast::worker
