// Which chunks of O, the orthogonalized directions of a step, its ranks have given. Each rank gives
// its own chunks. Parts of two generations never mix: two devices may have made them.
//
// Pure bookkeeping. Thread-compatible: the job's lock guards it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_ORTHOGONAL_PARTS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_ORTHOGONAL_PARTS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/layout.h"

namespace ballast {

class OrthogonalParts {
 public:
  // It outlives the object.
  explicit OrthogonalParts(const Layout& layout)
      : layout_(layout), chunks_(layout.chunks().size()) {}

  // A second round of these matrices begins, or ends.
  void Begin(absl::Span<const int> matrices);
  void End();
  // Nothing is given: in another generation.
  void Forget();

  // A matrix with elements in a chunk, and the largest magnitude among those of O.
  struct Largest {
    int parameter = 0;
    double value = 0;
  };
  enum class Wants : uint8_t {
    kIt,
    kRepeat,  // It is there.
    kBusy,    // Another call is writing it.
    kNothing  // No matrix of the round has elements in it.
  };
  // kIt: the caller writes the chunk's part, without the lock, then calls EndWriting.
  Wants BeginWriting(int chunk);
  // `counts`: of the round and generation in progress.
  void EndWriting(int chunk, bool counts, absl::Span<const Largest> largest);

  // Between these a chunk's directions are copied to where its weights will come.
  void BeginSharing() { ++sharing_; }
  void EndSharing() { --sharing_; }
  bool are_being_shared() const { return sharing_ > 0; }

  bool all_given() const { return missing_ == 0; }
  // Any of them, also of an earlier generation or round.
  bool are_being_written() const;
  bool Awaits(int rank) const;
  std::vector<int> RanksAwaited() const;
  // Of O, by parameter. Precondition: all are given.
  const std::vector<double>& largest() const { return largest_; }

 private:
  struct State {
    bool is_wanted = false;
    bool is_given = false;
    bool is_being_written = false;  // Also of an earlier generation or round.
  };

  const Layout& layout_;
  std::vector<State> chunks_;
  std::vector<double> largest_;  // By parameter.
  int64_t missing_ = 0;
  int64_t sharing_ = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_ORTHOGONAL_PARTS_H_
