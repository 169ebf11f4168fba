// A rank's stream: says everything to the job with its own key.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_STREAM_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_STREAM_H_

#include <memory>
#include <utility>

#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {

class JobImpl::Stream : public RankStream {
 public:
  Stream(std::shared_ptr<JobImpl> job, StreamKey key, RankPosition position)
      : job_(std::move(job)), key_(key), position_(std::move(position)) {}
  ~Stream() override { job_->CloseStream(key_); }

  const RankPosition& position() const override { return position_; }
  absl::Status BeginStep(uint64_t step, const StepSettings& settings) override {
    return job_->BeginStep(key_, step, settings);
  }
  absl::StatusOr<ContributionResult> Contribute(const Contribution& contribution) override {
    return job_->Contribute(key_, contribution);
  }
  absl::Status EndMicroStep(uint64_t step, uint32_t micro_step,
                            const UsedParameters& used) override {
    return job_->EndMicroStep(key_, step, micro_step, used);
  }
  absl::StatusOr<std::optional<SealRefusal>> Seal(uint64_t step, uint32_t micro_steps) override {
    return job_->Seal(key_, step, micro_steps);
  }

 private:
  const std::shared_ptr<JobImpl> job_;
  const StreamKey key_;
  const RankPosition position_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_STREAM_H_
