// Hands this rank's gradients to the optimizer, on its own thread: the chunks of a bucket after
// their event, in the order of the pushes.
//
// After an error it hands over nothing more (GradientSink), but still waits for each event before
// it releases the payload: memory stays until the copies to it are done.
//
// Threads: Push and EndMicroStep from one, WaitIdle from any. The places (gradient_slots.h) and the
// buckets' micro-steps bound the queue.
#ifndef BALLAST_GPU_WORKER_PIPELINE_GRADIENT_SENDER_H_
#define BALLAST_GPU_WORKER_PIPELINE_GRADIENT_SENDER_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "client/session.h"
#include "gpu_worker/base/timeline.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/pipeline/completions.h"
#include "gpu_worker/pipeline/pipeline_errors.h"
#include "gpu_worker/training/backend.h"

namespace ballast::worker {

class GradientSender {
 public:
  // Borrows until destruction. `timeline` is nullable.
  GradientSender(Device& device, PipelineErrors& errors, Timeline* timeline)
      : errors_(errors), timeline_(timeline), completions_(device) {}

  // Before anything is pushed.
  void Start(GradientSink& sink) { sink_ = &sink; }

  // The payloads are complete when the present work of `stream` is done. All share one event,
  // because events, thread wake-ups and queues dominate the cost of many chunks. An error is the
  // device's, and the payloads are not released.
  absl::Status Push(DeviceStream& stream, uint64_t step, std::vector<client::GradientPush> pushes);
  void EndMicroStep(uint64_t step, uint32_t micro_step, UsedParameters used);

  // Waits until everything pushed is handed over or released.
  void WaitIdle() { completions_.WaitIdle(); }

 private:
  void HandOver(uint64_t step, std::vector<client::GradientPush> pushes);

  PipelineErrors& errors_;
  Timeline* const timeline_;
  GradientSink* sink_ = nullptr;
  Completions completions_;  // Last: its thread uses the others.
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_GRADIENT_SENDER_H_
