// Gradients of whole parameters, cut into chunks and pushed as a backward pass produces them.
#ifndef BALLAST_CLIENT_TENSORS_GRADIENT_GIVER_H_
#define BALLAST_CLIENT_TENSORS_GRADIENT_GIVER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/session.h"
#include "client/tensors/chunk_places.h"
#include "client/tensors/copy_threads.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/common/system/helper_threads.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {

// Elements [offset, offset + elements) of a parameter's gradient, of this rank's shard of it with a
// mesh, belong at `data`.
struct GradientPlace {
  std::byte* data = nullptr;
  int64_t offset = 0;
  int64_t elements = 0;
};

// Whether a gradient is a chunk's last one of the step: ballast_last.
enum class Last : uint8_t { kMore, kFinal, kMayGuess };

// The gradients of one session. A chunk is pushed when the last of its parameters is given, or at
// the end of the micro-step, with zeros for missing ones. A micro-step is open until End.
// Thread-safe. Each call waits at most `limit`, then returns DEADLINE_EXCEEDED; the same call again
// continues.
class GradientGiver {
 public:
  // Large gradients are copied with `threads`, which is borrowed.
  GradientGiver(Session& session, const JobSpec& job, int rank, CopyThreads& threads,
                absl::Duration limit);
  // Drops gradients of Written that are not pushed yet. Call it before the session is destroyed,
  // and after Session::EndPushes, because a push may be waiting.
  void Stop() { writer_.Stop(); }

  // A step begins, or its gradients were discarded: drops an unfinished micro-step.
  void Reset();

  // Where the caller writes the parts of the gradient that this rank owns, in the wire dtype. Then
  // the caller calls Give without a gradient, or Written. INVALID_ARGUMENT: the parameter does not
  // exist or was given in this micro-step, or another micro-step is open.
  struct PlacesOfGradient {
    uint64_t attempt = 0;
    std::vector<GradientPlace> places;
  };
  absl::StatusOr<PlacesOfGradient> Places(uint32_t micro_step, size_t parameter);
  // `gradient` is row-major in the wire dtype, and is copied; null: it is at its places. `last`:
  // whether no later micro-step of this step has a gradient; the same in all calls of a micro-step.
  absl::Status Give(uint32_t micro_step, size_t parameter, const void* gradient, Last last);
  // Give without a gradient, for a caller that must not wait, such as a callback of a CUDA stream.
  // Another thread pushes, and End returns its error. If the attempt of Places has been reset, it
  // has no effect.
  void Written(size_t parameter, uint64_t attempt, Last last);
  // Gives all at once, chunk by chunk, pushes each once it is copied, and ends the micro-step.
  // Null: that parameter has no gradient.
  absl::Status GiveAll(uint32_t micro_step, const void* const* gradients, Last last);
  // No other parameter has a gradient in this micro-step. Waits for gradients with places that are
  // not written yet.
  absl::Status End(uint32_t micro_step, Last last);

 private:
  struct Part {
    int chunk = 0;
    int64_t part_offset = 0;
    int64_t chunk_offset = 0;
    int64_t elements = 0;
  };
  // kAtOnce: by GiveAll, which has not ended yet.
  enum class Given : uint8_t { kNot, kHasPlaces, kAtOnce, kYes };
  struct Parameter {
    std::vector<Part> parts;
    Given given = Given::kNot;
    bool waits_for_push = false;  // Give returned DEADLINE_EXCEEDED after it had taken it.
  };
  enum class Stage : uint8_t { kIdle, kHasPlace, kPushed };
  struct Chunk {
    Stage stage = Stage::kIdle;
    int parameters = 0;  // With a part in it,
    int missing = 0;     // and those not given yet in this micro-step.
    absl::Span<std::byte> place;
  };

  struct Writing {
    size_t parameter = 0;
    uint64_t attempt = 0;
    Last last = Last::kMore;
  };

  absl::Status Enter(uint32_t micro_step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckParameter(size_t parameter) const;
  bool WasGiven(const Parameter& parameter) const {
    return parameter.given == Given::kAtOnce || parameter.given == Given::kYes;
  }
  absl::Status GivenAlready(size_t parameter) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakePlaces(Parameter& parameter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakePlace(int chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status GiveParameter(Parameter& parameter, const void* gradient, Last last)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits for gradients that are being written, and ends the micro-step. gradients[p] is for
  // parameters that were not given one by one.
  absl::Status EndWith(uint32_t micro_step, const void* const* gradients, Last last);
  absl::Status Finish(const void* const* gradients, Last last)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status FinishChunk(int chunk, const void* const* gradients, Last last)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PushReady(Last last) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PushChunk(int chunk, Last last) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t ElementBytes(int chunk) const;
  void PushWritten(const Writing& writing);
  absl::Status TryToPush(const Writing& writing);

  Session& session_;
  const JobSpec& job_;
  CopyThreads& threads_;
  const absl::Duration limit_;
  const absl::Span<const int> own_chunks_;
  int64_t own_bytes_ = 0;  // All gradients together.

  ChunkPlaces places_;

  Mutex mutex_;
  uint64_t attempt_ ABSL_GUARDED_BY(mutex_) = 0;  // Rises with each Reset.
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
  uint32_t micro_step_ ABSL_GUARDED_BY(mutex_) = 0;  // The open one.
  // Its end has begun: chunks have been sent, and the set of parameters with a gradient is fixed.
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  uint32_t next_micro_step_ ABSL_GUARDED_BY(mutex_) = 0;  // Those before it were ended.
  std::vector<Parameter> parameters_ ABSL_GUARDED_BY(mutex_);
  std::vector<Chunk> chunks_ ABSL_GUARDED_BY(mutex_);  // By index in the layout.
  std::vector<int> ready_ ABSL_GUARDED_BY(mutex_);     // Chunks that miss nothing, not pushed yet.
  absl::Status written_status_ ABSL_GUARDED_BY(mutex_);  // The writer's first error.
  CondVar done_;  // Something that End waits for may have changed.

  // For Written, which must not wait: a thread that has mutex_ may wait for a push. Declared last,
  // so it ends first.
  HelperThreads writer_{1};
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TENSORS_GRADIENT_GIVER_H_
