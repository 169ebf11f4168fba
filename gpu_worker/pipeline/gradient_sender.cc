#include "gpu_worker/pipeline/gradient_sender.h"

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {

namespace {

std::string Describe(uint64_t step, int chunk, uint32_t micro_step_end) {
  return absl::StrCat("step ", step, ": chunk ", chunk, " of micro-step ", micro_step_end - 1);
}

}  // namespace

absl::Status GradientSender::Push(DeviceStream& stream, uint64_t step,
                                  std::vector<client::GradientPush> pushes) {
  if (pushes.empty()) return absl::OkStatus();
  // A std::function is copied; the pushes are not.
  auto shared = std::make_shared<std::vector<client::GradientPush>>(std::move(pushes));
  return completions_.After(stream, [this, step, shared](const absl::Status& there) {
    if (!there.ok()) {
      const client::GradientPush& first = shared->front();
      errors_.Fail(Annotate(there, Describe(step, first.chunk, first.micro_step_end)));
    }
    for (client::GradientPush& push : *shared) HandOver(step, std::move(push));
  });
}

void GradientSender::HandOver(uint64_t step, client::GradientPush push) {
  if (errors_.any()) return push.released();
  const int chunk = push.chunk;
  const uint32_t micro_step_end = push.micro_step_end;
  const TimelineScope scope(
      timeline_, Track::kSend,
      {.step = step, .micro_step = static_cast<int>(push.micro_step_end) - 1, .chunk = push.chunk});
  const absl::Status pushed = sink_->Push(std::move(push));
  if (!pushed.ok()) {
    errors_.FailStep(Annotate(pushed, Describe(step, chunk, micro_step_end)));
  }
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
