// Where updated weights lie on their way out: the chunk's place in the memory that its rank shares
// with this process; or the place of the gradient that they were made of, which is not needed any
// more (gradient_store.h); or, where neither can be, a buffer from a pool of fixed size. An empty
// pool never blocks an update after the decision: the weights are then converted again when they
// can be sent. A provisional update waits for a buffer instead (speculation.h).
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_WEIGHT_BUFFER_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_WEIGHT_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/gradients/rank_memory.h"

namespace ballast {

class WeightBufferPool;

// A buffer, or null. Goes back to its pool on destruction, from any thread.
class WeightBuffer {
 public:
  WeightBuffer() = default;
  // The place of `chunk`'s weights in `memory`, which it keeps alive.
  static WeightBuffer InPlace(std::shared_ptr<const RankMemory> memory, int chunk);
  // `bytes`, which stay for as long as `loan` does.
  static WeightBuffer Lent(std::shared_ptr<const void> loan, absl::Span<std::byte> bytes);
  WeightBuffer(WeightBuffer&& other) noexcept;
  WeightBuffer& operator=(WeightBuffer&& other) noexcept;
  ~WeightBuffer() { Release(); }

  explicit operator bool() const { return data_ != nullptr; }
  bool in_place() const { return memory_ != nullptr; }  // The rank sees it already.
  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }
  absl::Span<std::byte> bytes() const {
    return absl::MakeSpan(data_, static_cast<size_t>(size_bytes_));
  }

 private:
  friend class WeightBufferPool;
  void Release();

  std::shared_ptr<WeightBufferPool> pool_;
  std::shared_ptr<const RankMemory> memory_;
  std::shared_ptr<const void> loan_;
  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

class WeightBufferPool : public std::enable_shared_from_this<WeightBufferPool> {
 public:
  // `came_back` (nullable) is called once for each time that TryTakeOrTell was in vain, or several,
  // by the thread that gives the next buffer back, with no lock of the pool held. It may be called
  // from within anything that can end a buffer's life, so it must neither block nor take a lock
  // under which buffers are given back.
  static std::shared_ptr<WeightBufferPool> Create(int64_t buffer_bytes, int64_t count,
                                                  std::function<void()> came_back = nullptr);

  // Null if all are out, or if they are smaller than `size_bytes`.
  WeightBuffer TryTake(int64_t size_bytes);
  // As above; if all are out, `came_back` is called when one is given back.
  WeightBuffer TryTakeOrTell(int64_t size_bytes);

 private:
  friend class WeightBuffer;
  WeightBufferPool(int64_t buffer_bytes, int64_t count, std::function<void()> came_back);
  WeightBuffer Take(int64_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveBack(std::byte* data);

  const int64_t buffer_bytes_;
  const std::unique_ptr<std::byte[]> memory_;
  const std::function<void()> came_back_;
  Mutex mutex_;
  std::vector<std::byte*> free_ ABSL_GUARDED_BY(mutex_);
  bool wanted_ ABSL_GUARDED_BY(mutex_) = false;  // `came_back` is to be called.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_WEIGHT_BUFFER_H_
