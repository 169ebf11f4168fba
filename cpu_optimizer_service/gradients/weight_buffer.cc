#include "cpu_optimizer_service/gradients/weight_buffer.h"

#include <utility>

namespace ballast {

WeightBuffer WeightBuffer::InPlace(std::shared_ptr<const RankMemory> memory, int chunk) {
  const absl::Span<std::byte> place = memory->weights(chunk);
  WeightBuffer buffer;
  buffer.data_ = place.data();
  buffer.size_bytes_ = static_cast<int64_t>(place.size());
  buffer.memory_ = std::move(memory);
  return buffer;
}

WeightBuffer WeightBuffer::Lent(std::shared_ptr<const void> loan, absl::Span<std::byte> bytes) {
  WeightBuffer buffer;
  buffer.data_ = bytes.data();
  buffer.size_bytes_ = static_cast<int64_t>(bytes.size());
  buffer.loan_ = std::move(loan);
  return buffer;
}

WeightBuffer::WeightBuffer(WeightBuffer&& other) noexcept
    : pool_(std::move(other.pool_)),
      memory_(std::move(other.memory_)),
      loan_(std::move(other.loan_)),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

WeightBuffer& WeightBuffer::operator=(WeightBuffer&& other) noexcept {
  if (this != &other) {
    Release();
    pool_ = std::move(other.pool_);
    memory_ = std::move(other.memory_);
    loan_ = std::move(other.loan_);
    data_ = std::exchange(other.data_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
  }
  return *this;
}

void WeightBuffer::Release() {
  // Only a pool is told. Shared and lent memory have a pointer, whose end is enough: with the last
  // one to a loan the place is free (GradientStore::LendPlace).
  if (pool_ != nullptr) pool_->GiveBack(data_);
  pool_ = nullptr;
  memory_ = nullptr;
  loan_ = nullptr;
  data_ = nullptr;
  size_bytes_ = 0;
}

std::shared_ptr<WeightBufferPool> WeightBufferPool::Create(int64_t buffer_bytes, int64_t count,
                                                           std::function<void()> came_back) {
  return std::shared_ptr<WeightBufferPool>(
      new WeightBufferPool(buffer_bytes, count, std::move(came_back)));
}

WeightBufferPool::WeightBufferPool(int64_t buffer_bytes, int64_t count,
                                   std::function<void()> came_back)
    : buffer_bytes_(buffer_bytes),
      memory_(new std::byte[buffer_bytes * count]),
      came_back_(std::move(came_back)) {
  // So that GiveBack, which destructors call, needs no memory.
  free_.reserve(count);
  for (int64_t i = 0; i < count; ++i) free_.push_back(memory_.get() + i * buffer_bytes);
}

WeightBuffer WeightBufferPool::TryTake(int64_t size_bytes) {
  MutexLock lock(mutex_);
  return Take(size_bytes);
}

WeightBuffer WeightBufferPool::TryTakeOrTell(int64_t size_bytes) {
  MutexLock lock(mutex_);
  // Under the same lock as the look. Otherwise a buffer could come back in between, and nobody
  // would be told of it.
  if (free_.empty()) wanted_ = true;
  return Take(size_bytes);
}

WeightBuffer WeightBufferPool::Take(int64_t size_bytes) {
  WeightBuffer buffer;
  if (free_.empty() || size_bytes > buffer_bytes_) return buffer;
  buffer.data_ = free_.back();
  free_.pop_back();
  buffer.size_bytes_ = size_bytes;
  // A buffer may be on its way to a slow worker when the pool's owner is gone.
  buffer.pool_ = shared_from_this();
  return buffer;
}

void WeightBufferPool::GiveBack(std::byte* data) {
  {
    MutexLock lock(mutex_);
    free_.push_back(data);
    if (!std::exchange(wanted_, false)) return;
  }
  if (came_back_ != nullptr) came_back_();
}

}  // namespace ballast
