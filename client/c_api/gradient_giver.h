// Gradients of whole parameters, cut into chunks and pushed as a backward pass produces them.
#ifndef BALLAST_CLIENT_C_API_GRADIENT_GIVER_H_
#define BALLAST_CLIENT_C_API_GRADIENT_GIVER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/c_api/copy_threads.h"
#include "client/session.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {

// Elements [offset, offset + elements) of a parameter's gradient, of this rank's shard of it with a
// mesh, belong at `data`.
struct GradientPlace {
  std::byte* data = nullptr;
  int64_t offset = 0;
  int64_t elements = 0;
};

// Whether a gradient is a chunk's last of the step: ballast_last.
enum class Last : uint8_t { kMore, kFinal, kMayGuess };

// The job's trainable parameters for which `used` is true.
UsedParameters UsedOf(const JobSpec& job, absl::FunctionRef<bool(size_t)> used);

// The gradients of one session. A chunk is pushed when the last of its parameters is given, or at
// the end of the micro-step, with zeros for those that were not. A micro-step is open until End.
// Thread safe. Each call waits for at most `limit` and returns DEADLINE_EXCEEDED then; the same
// call again goes on.
class GradientGiver {
 public:
  // Large gradients are copied with `threads`, which is borrowed.
  GradientGiver(Session& session, const JobSpec& job, int rank, CopyThreads& threads,
                absl::Duration limit);
  ~GradientGiver() { Stop(); }
  // What Written was called with and is not pushed yet is dropped. Before the session is destroyed.
  void Stop();

  // A step begins, or what was given of it was discarded: an unfinished micro-step is forgotten.
  void Reset();

  // Where the parts of the gradient that this rank owns are to be written, in the wire dtype, by the
  // caller, who then calls Give without a gradient, or Written. INVALID_ARGUMENT: there is no such
  // parameter, it was given in this micro-step, or another micro-step is open.
  struct PlacesOfGradient {
    uint64_t attempt = 0;
    std::vector<GradientPlace> places;
  };
  absl::StatusOr<PlacesOfGradient> Places(uint32_t micro_step, size_t parameter);
  // The gradient is at `gradient`, row-major in the wire dtype, and is copied; or, null, at its
  // places. `last`: whether no later micro-step of this step has a gradient; the same in all calls
  // of a micro-step.
  absl::Status Give(uint32_t micro_step, size_t parameter, const void* gradient, Last last);
  // Give without a gradient, for a caller that may not wait, such as a callback of a CUDA stream:
  // another thread pushes, and its error is that of End. Nothing happens if what Places said is of
  // an attempt that was reset.
  void Written(size_t parameter, uint64_t attempt, Last last);
  // Gives all at once, chunk by chunk and each pushed once it is copied, and ends the micro-step;
  // null: that parameter has no gradient.
  absl::Status GiveAll(uint32_t micro_step, const void* const* gradients, Last last);
  // No other parameter has a gradient in this micro-step. Waits for those that have places and are
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
    int parameters = 0;  // That have a part in it,
    int missing = 0;     // and those that were not given yet in this micro-step.
    absl::Span<std::byte> place;
    std::vector<std::byte> own;  // Without shared memory.
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
  // Waits for what is still being written, and ends the micro-step, with gradients[p] of parameters
  // that were not given one by one.
  absl::Status EndWith(uint32_t micro_step, const void* const* gradients, Last last);
  absl::Status Finish(const void* const* gradients, Last last)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status FinishChunk(int chunk, const void* const* gradients, Last last)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PushReady(Last last) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PushChunk(int chunk, Last last) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t ElementBytes(int chunk) const;
  absl::Status PushWritten(const Writing& writing);
  void WriterLoop();

  Session& session_;
  const JobSpec& job_;
  CopyThreads& threads_;
  const absl::Duration limit_;
  const absl::Span<const int> own_chunks_;
  int64_t own_bytes_ = 0;  // All gradients together.

  // Which chunks' last pushes have not been released; their places may not be written to. A lock of
  // its own, because a session may release during Push.
  Mutex release_mutex_ ABSL_ACQUIRED_AFTER(mutex_);
  CondVar released_;
  std::vector<bool> in_use_ ABSL_GUARDED_BY(release_mutex_);

  Mutex mutex_;
  uint64_t attempt_ ABSL_GUARDED_BY(mutex_) = 0;  // Rises with each Reset.
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
  uint32_t micro_step_ ABSL_GUARDED_BY(mutex_) = 0;  // The open one.
  // Its end has begun: chunks have left, and which parameters have a gradient changes no more.
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  uint32_t next_micro_step_ ABSL_GUARDED_BY(mutex_) = 0;  // Those before it were ended.
  std::vector<Parameter> parameters_ ABSL_GUARDED_BY(mutex_);
  std::vector<Chunk> chunks_ ABSL_GUARDED_BY(mutex_);  // By index in the layout.
  std::vector<int> ready_ ABSL_GUARDED_BY(mutex_);     // Chunks that miss nothing, not pushed yet.
  absl::Status written_status_ ABSL_GUARDED_BY(mutex_);  // The writer's first error.
  CondVar done_;  // Something that End may wait for has changed.

  // What Written was called with. The thread begins with its first call. Held for moments only,
  // because Written must not wait; a thread that has mutex_ may wait for a push.
  Mutex queue_mutex_ ABSL_ACQUIRED_AFTER(mutex_);
  CondVar queued_;
  std::deque<Writing> queue_ ABSL_GUARDED_BY(queue_mutex_);
  bool stopping_ ABSL_GUARDED_BY(queue_mutex_) = false;
  std::thread writer_;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_C_API_GRADIENT_GIVER_H_
