// The service's end of memory shared with a rank's process on the same host: a memory file, sealed
// against resizing, so that every access to its mapping is within the file.
//
// A seal does not prevent the other side from punching holes. Holes read as zeros and are filled at
// the next write. Only a system without overcommit (vm.overcommit_memory is 2) and without free
// memory could refuse that page, and kill this process.
#ifndef BALLAST_SERVER_SHARED_MEMORY_SHARED_MEMORY_H_
#define BALLAST_SERVER_SHARED_MEMORY_SHARED_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/rank_memory_layout.h"
#include "cpu_optimizer_service/gradients/rank_memory.h"
#include "cpu_optimizer_service/host/memory_budget.h"
#include "cpu_optimizer_service/host/named_memory.h"

namespace ballast::server {

class SharedMemory final : public RankMemory {
 public:
  // Zeroed and backed by pages. RESOURCE_EXHAUSTED if the system has no room; INVALID_ARGUMENT if
  // `places` is empty. Keeps `reservation`.
  static absl::StatusOr<std::shared_ptr<SharedMemory>> Create(
      RankMemoryLayout places, MemoryBudget::Reservation reservation);
  // The same in memory that outlives this process, under a new name.
  static absl::StatusOr<std::shared_ptr<SharedMemory>> CreateNamed(
      RankMemoryLayout places, MemoryBudget::Reservation reservation, NamedMemory& memory,
      const std::string& name);
  ~SharedMemory() override;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  absl::Span<const std::byte> gradient(int chunk) const override;
  absl::Span<std::byte> weights(int chunk) const override;

  absl::string_view kept_name() const override {
    return arena_ == nullptr ? absl::string_view() : arena_->name();
  }

  int file_descriptor() const { return file_descriptor_; }  // This object still closes it.

  // The other process no longer uses the memory. The destructor then gives the pages back to the
  // system, even if that process has kept a mapping. Pages that it touches afterwards are not
  // counted here.
  void PeerIsDone() const { peer_is_done_ = true; }

 private:
  SharedMemory(RankMemoryLayout places, MemoryBudget::Reservation reservation, int file_descriptor,
               std::byte* memory, std::unique_ptr<NamedArena> arena = nullptr);

  const RankMemoryLayout places_;
  const MemoryBudget::Reservation reservation_;
  const std::unique_ptr<NamedArena> arena_;  // Null: this object owns file and mapping.
  const int file_descriptor_;
  std::byte* const memory_;
  mutable std::atomic<bool> peer_is_done_ = false;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_SHARED_MEMORY_SHARED_MEMORY_H_
