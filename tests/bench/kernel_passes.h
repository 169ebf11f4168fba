// What kernel_bench.cc times: one pass each over the arrays of a whole model, on all threads of a
// pool or on the caller's alone.
#ifndef BALLAST_TESTS_BENCH_KERNEL_PASSES_H_
#define BALLAST_TESTS_BENCH_KERNEL_PASSES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/adam.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/host/arena.h"
#include "cpu_optimizer_service/host/memory_budget.h"
#include "cpu_optimizer_service/host/task_pool.h"
#include "cpu_optimizer_service/state/chunk_store.h"

namespace ballast::bench {

// The state and gradients of `chunks` whole chunks. The state lies in memory as a job keeps it, in
// the slots of a ChunkStore, for all passes: how far the planes lie apart decides much of the
// speed. Thread-compatible.
class KernelPasses {
 public:
  static absl::StatusOr<std::unique_ptr<KernelPasses>> Create(int64_t chunks, int threads);

  int64_t elements() const { return chunks_ * kMaxChunkElements; }
  const TaskPool& pool() const { return pool_; }
  // From now on passes run on the caller's thread alone, or on all.
  void UseOneThread(bool one) { one_thread_ = one; }
  // From now on passes go over this of `slices` parts of about equal size; UseSlice(0, 1) over all.
  void UseSlice(int64_t slice, int64_t slices);

  struct Options {
    WeightDecay decay = WeightDecay::kDecoupled;
    bool amsgrad = false;
    DType gradient = DType::kBFloat16;
    DType shard = DType::kBFloat16;
    bool has_shard = true;
  };
  // Bytes that an update with these options reads and writes for an element.
  static int64_t TrafficBytes(const Options& options);
  // Gradients, moments and weights of an ordinary size, or moments and gradients that are all
  // denormal. The gradient is of `dtype`.
  void Fill(DType dtype, bool denormal);
  absl::Status AddAmsgradPlane();

  void Roofline(int prefetch_ahead_elements);
  void Update(const Options& options);
  // UpdateChunk from the store to itself, as a job in wait mode does it.
  void ThroughStore(const Layout& layout);
  // Of one group with parameters of about equal size.
  Layout LayoutOf(int tensors) const;

  void Sums(DType dtype);
  void Add();  // fp32 += bf16

  // Several micro-steps, the last contribution of a step: what is done when it arrives (its sums of
  // squares at least), and what after the decision.
  void ArriveAdded();  // The sum is written back, and its squares are summed from the cache.
  void UpdateAdded();  // Reads the sum.
  void ArriveApart();  // The squares of the sum, which is not written.
  void UpdateApart();  // Reads the sum and what came last.

 private:
  KernelPasses(int64_t chunks, int threads);
  absl::Status CreateStore();

  template <class T>
  T* At(const std::unique_ptr<Arena>& arena, int64_t chunk) const {
    return reinterpret_cast<T*>(arena->data()) + chunk * kMaxChunkElements;
  }
  float* PlaneAt(Plane plane, int64_t chunk) const;
  void ForChunks(absl::FunctionRef<void(int64_t)> body);
  AdamRun Run(int64_t chunk, const Options& options) const;
  // body(gradient, begin): the fp32 sum of elements [begin, begin + kTileElements) of the chunk and
  // of what came last, in this thread's first-level cache.
  static constexpr int64_t kTileElements = 2048;
  void ForTilesOfSum(int64_t chunk, absl::FunctionRef<void(const float*, int64_t)> body) const;

  const int64_t chunks_;
  TaskPool pool_;
  const std::unique_ptr<ArenaFactory> arenas_;
  bool one_thread_ = false;
  int64_t first_chunk_ = 0;
  int64_t end_chunk_ = chunks_;
  std::unique_ptr<Arena> gradient_;  // Of any type; or the sum.
  std::unique_ptr<Arena> last_;      // bf16: what came last.
  std::unique_ptr<Arena> shard_;
  std::unique_ptr<Arena> max_exp_avg_sq_;
  std::vector<double> sums_;

  MemoryBudget budget_{0};
  std::unique_ptr<Layout> store_layout_;  // The store keeps a reference.
  std::unique_ptr<ChunkStore> store_;
  uint64_t step_ = 0;
};

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_KERNEL_PASSES_H_
