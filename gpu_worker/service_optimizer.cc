#include "gpu_worker/service_optimizer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {
namespace {

class ServiceOptimizer final : public StepOptimizer {
 public:
  explicit ServiceOptimizer(std::unique_ptr<client::Session> session)
      : session_(std::move(session)) {}

  absl::Status Start(const FillChunk& first_weights) override {
    if (session_->awaiting_weights()) {
      BALLAST_RETURN_IF_ERROR(session_->UploadWeights(first_weights));
    }
    return session_->ReadWeights();
  }
  uint64_t committed_step() const override { return session_->committed_step(); }

  absl::Status BeginStep(const client::StepSettings& settings) override {
    return session_->BeginStep(settings);
  }
  absl::Status Push(client::GradientPush push) override { return session_->Push(std::move(push)); }
  absl::Status EndMicroStep(uint32_t micro_step, const client::UsedParameters& used) override {
    return session_->EndMicroStep(micro_step, used);
  }
  absl::StatusOr<client::StepDecision> Seal(uint32_t micro_steps) override {
    return session_->Seal(micro_steps);
  }
  absl::Status ReceiveWeights() override { return session_->ReceiveWeights(); }
  double update_seconds() const override { return session_->update_seconds(); }
  absl::Status SaveCheckpoint(const std::string& directory) override {
    return Annotate(session_->SaveCheckpoint(directory), "saving the checkpoint");
  }

 private:
  const std::unique_ptr<client::Session> session_;
};

absl::Status LoadCheckpoint(const std::shared_ptr<grpc::Channel>& channel,
                            const client::SessionOptions& options, const std::string& directory) {
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<client::Session> session,
                           client::Session::Open(channel, options));
  return Annotate(session->LoadCheckpoint(directory),
                  absl::StrCat("resuming job ", options.job.name,
                               ", which waits for weights until it "
                               "is closed or resumed, from ",
                               directory, " on the service's host"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<StepOptimizer>> OpenServiceOptimizer(
    const std::shared_ptr<grpc::Channel>& channel, ServiceOptimizerOptions options,
    Collective& collective) {
  client::SessionOptions session_options;
  session_options.job = std::move(options.job);
  session_options.rank = collective.rank();
  session_options.weights = std::move(options.weights);
  if (!options.resume_directory.empty()) {
    if (collective.rank() == 0) {
      BALLAST_RETURN_IF_ERROR(LoadCheckpoint(channel, session_options, options.resume_directory));
    }
    // A session that was open during the load would belong to an older generation.
    BALLAST_RETURN_IF_ERROR(collective.Barrier());
  }
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<client::Session> session,
                           client::Session::Open(channel, std::move(session_options)));
  return std::make_unique<ServiceOptimizer>(std::move(session));
}

}  // namespace ballast::worker
