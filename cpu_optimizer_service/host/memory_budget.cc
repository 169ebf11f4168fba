#include "cpu_optimizer_service/host/memory_budget.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {

MemoryBudget::Reservation::Reservation(Reservation&& other) noexcept
    : budget_(std::exchange(other.budget_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

MemoryBudget::Reservation& MemoryBudget::Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    Release();
    budget_ = std::exchange(other.budget_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void MemoryBudget::Reservation::ShrinkTo(int64_t bytes) {
  if (budget_ == nullptr || bytes >= bytes_) return;
  MutexLock lock(budget_->mutex_);
  budget_->used_bytes_ -= bytes_ - bytes;
  bytes_ = bytes;
}

void MemoryBudget::Reservation::Release() {
  if (budget_ == nullptr) return;
  MutexLock lock(budget_->mutex_);
  budget_->used_bytes_ -= bytes_;
  budget_ = nullptr;
  bytes_ = 0;
}

absl::StatusOr<MemoryBudget::Reservation> MemoryBudget::Reserve(int64_t bytes,
                                                                absl::string_view what) {
  MutexLock lock(mutex_);
  // Written as a difference, so that no sum can overflow. After Take it may be negative, and then
  // nothing fits until enough has been given back.
  if (bytes > limit_bytes_ - used_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        what, " does not fit: needed ", bytes, " bytes, used ", used_bytes_, " bytes, limit ",
        limit_bytes_, " bytes; raise --memory-limit, close a job or spread it over more hosts"));
  }
  used_bytes_ += bytes;
  return Reservation(this, bytes);
}

MemoryBudget::Reservation MemoryBudget::Take(int64_t bytes) {
  MutexLock lock(mutex_);
  // No limit is asked. A new process may have a lower one, and to refuse memory that is there would
  // lose a job.
  used_bytes_ += bytes;
  return Reservation(this, bytes);
}

int64_t MemoryBudget::used_bytes() const {
  MutexLock lock(mutex_);
  return used_bytes_;
}

}  // namespace ballast
