#include "gpu_worker/pipeline/gradient_sender.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {

absl::Status GradientSender::Push(DeviceStream& stream, uint64_t step, client::GradientPush push) {
  return completions_.After(stream,
                            [this, step, push = std::move(push)](const absl::Status& there) {
                              HandOver(step, push, there);
                            });
}

void GradientSender::HandOver(uint64_t step, client::GradientPush push, const absl::Status& there) {
  const std::string what = absl::StrCat("step ", step, ": chunk ", push.chunk, " of micro-step ",
                                        push.micro_step_end - 1);
  if (!there.ok()) errors_.Fail(Annotate(there, what));
  if (!errors_.current().ok()) return push.released();
  const TimelineScope scope(
      timeline_, Track::kSend,
      {.step = step, .micro_step = static_cast<int>(push.micro_step_end) - 1, .chunk = push.chunk});
  const absl::Status pushed = sink_->Push(std::move(push));
  if (!pushed.ok()) errors_.FailStep(Annotate(pushed, what));
}

void GradientSender::EndMicroStep(uint64_t step, uint32_t micro_step, UsedParameters used) {
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
