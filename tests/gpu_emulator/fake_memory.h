// The memory of the tests' device (fake_device.h): what is allocated and pinned, and who may touch
// it. Breaking a rule of device.h aborts.
//
// Thread-safe.
#ifndef BALLAST_TESTS_GPU_EMULATOR_FAKE_MEMORY_H_
#define BALLAST_TESTS_GPU_EMULATOR_FAKE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::worker {

class FakeMemory {
 public:
  FakeMemory(std::string device, int64_t memory_bytes);

  // Zeros; null if it does not fit.
  std::byte* AllocateDevice(size_t size_bytes);
  void FreeDevice(std::byte* bytes, size_t size_bytes);

  // Not zeros; null if the host has none.
  static std::byte* AllocateHost(size_t size_bytes);
  static void FreeHost(std::byte* bytes);
  void Pin(absl::Span<const std::byte> bytes, absl::string_view what);
  void Unpin(absl::Span<const std::byte> bytes);
  bool IsPinned(absl::Span<const std::byte> bytes) const;

  // `use` names the access, for the message.
  void CheckOnDevice(const void* memory, size_t size_bytes, absl::string_view use) const;
  void CheckOnHost(absl::Span<const std::byte> bytes, absl::string_view use) const;
  void CheckNothingIsLeft() const;

  // Under AddressSanitizer an access to the device's memory is an error while it is closed, as it
  // is at first.
  void Open();
  void Close();

  int64_t free_bytes() const;
  int64_t allocated_bytes() const;
  int64_t most_allocated_bytes() const;

 private:
  // Sizes by beginning; they do not overlap.
  using Ranges = std::map<const std::byte*, size_t>;
  static bool Overlap(const Ranges& ranges, const std::byte* begin, size_t size);
  static bool Contain(const Ranges& ranges, const std::byte* begin, size_t size);

  const std::string device_;
  const int64_t memory_bytes_;
  mutable Mutex mutex_;
  Ranges device_memory_ ABSL_GUARDED_BY(mutex_);
  Ranges pinned_ ABSL_GUARDED_BY(mutex_);
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t allocated_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t most_allocated_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_EMULATOR_FAKE_MEMORY_H_
