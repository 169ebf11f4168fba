#include "gpu_worker/pipeline/gradient_sender.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {

absl::Status GradientSender::Push(DeviceStream& stream, uint64_t step,
                                  std::vector<client::GradientPush> pushes) {
  if (pushes.empty()) return absl::OkStatus();
  // A std::function is copied; the pushes are not.
  auto shared = std::make_shared<std::vector<client::GradientPush>>(std::move(pushes));
  return completions_.After(stream, [this, step, shared](const absl::Status& there) {
    if (!there.ok()) {
      const client::GradientPush& first = shared->front();
      errors_.Fail(Annotate(there, absl::StrCat("step ", step, ": chunk ", first.chunk,
                                                " of micro-step ", first.micro_step_end - 1)));
    }
    // After a failure HandOver only releases the payloads, because the failure is noted by now.
    HandOver(step, std::move(*shared));
  });
}

void GradientSender::HandOver(uint64_t step, std::vector<client::GradientPush> pushes) {
  if (errors_.any()) {
    for (const client::GradientPush& push : pushes) push.released();
    return;
  }
  const client::GradientPush& first = pushes.front();
  const TimelineScope scope(timeline_, Track::kSend,
                            {.step = step,
                             .micro_step = static_cast<int>(first.micro_step_end) - 1,
                             .chunk = pushes.size() == 1 ? first.chunk : -1});
  // The sink releases every payload, also if it returns an error.
  const absl::Status pushed = sink_->PushAll(std::move(pushes));
  if (!pushed.ok()) errors_.FailStep(Annotate(pushed, absl::StrCat("step ", step)));
}

void GradientSender::EndMicroStep(uint64_t step, uint32_t micro_step, UsedParameters used) {
  // No event is needed: calls are made in order, so the micro-step's pushes were handed over
  // before.
  completions_.AfterThose([this, step, micro_step, used = std::move(used)](const absl::Status&) {
    if (!errors_.current().ok()) return;
    const absl::Status ended = sink_->EndMicroStep(micro_step, used);
    if (!ended.ok()) {
      errors_.FailStep(
          Annotate(ended, absl::StrCat("step ", step, ": end of micro-step ", micro_step)));
    }
  });
}

}  // namespace ballast::worker
