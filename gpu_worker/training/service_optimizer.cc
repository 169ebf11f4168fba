#include "gpu_worker/training/service_optimizer.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/base/log.h"

namespace ballast::worker {
namespace {

class ServiceOptimizer final : public StepOptimizer {
 public:
  // `first`: the layout's index of the rank's first chunk, which is the session's 0.
  ServiceOptimizer(std::shared_ptr<grpc::Channel> channel, client::SessionOptions options,
                   int first)
      : channel_(std::move(channel)), first_(first), options_(std::move(options)) {}

  // While the job awaits first weights, a rising generation makes the service forget those that
  // arrived. The other ranks may wait for this rank's there, not in a collective, so they are given
  // again at once.
  absl::Status Join(const FillChunk& first_weights) override {
    // There is a bound, because processes that take another rank from one another raise the
    // generation each time.
    constexpr int kMostAttempts = 100;
    bool awaited = false;
    absl::Status status;
    for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
      status = TryToJoin(first_weights);
      // An Open that fails leaves no session; what the one before said is the best that is known.
      if (session_ != nullptr) awaited = session_->awaiting_weights();
      // With weights in the job an ABORTED goes to the trainer: all ranks join again then,
      // together.
      if (!absl::IsAborted(status) || !awaited) break;
    }
    return status;
  }
  Generation generation() const override { return session().generation(); }
  uint64_t committed_step() const override { return session().committed_step(); }
  std::string trainer_state() const override { return session().trainer_state(); }
  bool last_step_applied() const override { return session().last_step_applied(); }
  absl::Span<std::byte> gradient_memory(int chunk) override {
    return session().gradient_memory(chunk - first_);
  }
  // Only the session writes there. Not const, because a device pins it.
  absl::Span<std::byte> weights_memory(int chunk) override {
    const absl::Span<const std::byte> memory = session().weights_memory(chunk - first_);
    return {const_cast<std::byte*>(memory.data()), memory.size()};
  }
  std::string transport() const override {
    return session().shares_memory() ? "shared memory" : "the connection";
  }

  absl::Status BeginStep(const StepSettings& settings) override {
    return session().BeginStep(settings);
  }
  absl::Status Push(client::GradientPush push) override {
    push.chunk -= first_;
    return session().Push(std::move(push));
  }
  absl::Status EndMicroStep(uint32_t micro_step, const UsedParameters& used) override {
    return session().EndMicroStep(micro_step, used);
  }
  absl::Status Report(const RankReport& report) override { return session().Report(report); }
  absl::StatusOr<client::StepDecision> Seal(uint32_t micro_steps, const StepVote& vote) override {
    return session().Seal(micro_steps, vote);
  }
  uint64_t directions_step() const override { return session().directions_step(); }
  absl::StatusOr<std::vector<HyperParameters>> ReadDirections(
      const std::function<void(int chunk, absl::Span<const std::byte> direction)>& place) override {
    return session().ReadDirections([&](int chunk, absl::Span<const std::byte> direction) {
      place(first_ + chunk, direction);
    });
  }
  absl::Status GiveOrthogonal(
      const std::function<void(int chunk, absl::Span<std::byte> out)>& fill) override {
    return session().GiveOrthogonal(
        [&](int chunk, absl::Span<std::byte> out) { fill(first_ + chunk, out); });
  }
  absl::Status ReceiveWeights() override { return session().ReceiveWeights(); }
  double update_seconds() const override { return session().update_seconds(); }
  absl::StatusOr<client::JobCounts> ReadCounts() override { return session().ReadCounts(); }
  absl::Status SaveCheckpoint(const std::string& directory) override {
    return Annotate(session().SaveCheckpoint(directory), "saving the checkpoint");
  }
  absl::Status CloseJob() override {
    return Annotate(client::Session::CloseJob(channel_, options_.job.name, session().job_uid()),
                    "closing the job");
  }

 private:
  absl::Status TryToJoin(const FillChunk& first_weights) {
    session_.reset();  // Waits until no thread reads the payloads.
    absl::StatusOr<std::unique_ptr<client::Session>> session =
        client::Session::Open(channel_, options_);
    // The uid is that of the job joined before. Without it Open would make a new job of this name,
    // and the training would begin again from its first weights without a word.
    if (!options_.job_uid.empty() && absl::IsNotFound(session.status())) return Closed();
    BALLAST_RETURN_IF_ERROR(session.status());
    session_ = *std::move(session);
    options_.job_uid = session_->job_uid();
    options_.rejoin = true;  // A process that was replaced leaves its rank to the other.
    // Each rank gives those of its own chunks; ReadWeights then waits for the others.
    if (session_->awaiting_weights()) {
      BALLAST_RETURN_IF_ERROR(session_->UploadWeights(
          [&](int chunk, absl::Span<float> out) { first_weights(first_ + chunk, out); }));
    }
    if (session_->directions_step() != 0) return absl::OkStatus();
    return session_->ReadWeights();
  }
  client::Session& session() const {
    Check(session_ != nullptr, "an optimizer is joined before it is used");
    return *session_;
  }
  absl::Status Closed() const {
    return absl::FailedPreconditionError(absl::StrCat(
        "job ", options_.job.name,
        " was closed on the service while this worker trained; start the workers again "
        "to begin it again"));
  }

  const std::shared_ptr<grpc::Channel> channel_;
  const int first_;
  client::SessionOptions options_;            // With the uid of the job, once it is joined.
  std::unique_ptr<client::Session> session_;  // Null until the first Join has opened it.
};

absl::Status LoadCheckpoint(const std::shared_ptr<grpc::Channel>& channel,
                            client::SessionOptions options, const std::string& directory) {
  // The session is for the load alone, and has no memory: the load ends the sessions of all ranks.
  options.takes_steps = false;
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<client::Session> session,
                           client::Session::Open(channel, options));
  // A restarted worker comes here with the same flag. The job has state then, and a load would undo
  // its steps.
  if (!session->awaiting_weights()) {
    Log().info("job {} goes on from step {}; --resume={} is loaded into new jobs only",
               options.job.name, session->committed_step(), directory);
    return absl::OkStatus();
  }
  const absl::Status loaded = session->LoadCheckpoint(directory);
  if (loaded.ok()) return absl::OkStatus();
  // One that is named is meant, and the newest is whatever there is.
  const bool is_one = absl::StartsWith(directory.substr(directory.rfind('/') + 1), "step-");
  if (absl::IsNotFound(loaded) && !is_one) {
    Log().warn("job {} begins again: {}", options.job.name, std::string(loaded.message()));
    return absl::OkStatus();
  }
  // A job without weights has nothing to lose, and would be in the way of the next start.
  client::Session::CloseJob(channel, options.job.name, session->job_uid()).IgnoreError();
  return Annotate(loaded, absl::StrCat("resuming job ", options.job.name, " from ", directory));
}

}  // namespace

absl::StatusOr<std::unique_ptr<StepOptimizer>> MakeServiceOptimizer(
    const std::shared_ptr<grpc::Channel>& channel, ServiceOptimizerOptions options,
    Collective& collective) {
  client::SessionOptions session_options;
  session_options.job = options.job.spec;
  session_options.job.members = std::move(options.members);
  session_options.job.homes = std::move(options.homes);
  session_options.rank = collective.rank();
  TrainingBackend& backend = options.backend;
  const int first = options.job.layout.first_of_rank(collective.rank());
  const auto named = [&backend, first](auto call) {
    return [&backend, first, call](int chunk) { return (backend.*call)(first + chunk); };
  };
  if (!backend.gathers_ahead()) session_options.weights = named(&TrainingBackend::weights);
  session_options.on_weights = named(&TrainingBackend::OnWeights);
  session_options.on_provisional_weights = named(&TrainingBackend::OnProvisionalWeights);
  session_options.on_dropped_weights = named(&TrainingBackend::OnDroppedWeights);
  session_options.seal_timeout = options.seal_timeout;
  session_options.reconnect_timeout = options.reconnect_timeout;
  session_options.shared_memory = options.shared_memory;
  if (!options.resume_directory.empty()) {
    // A load is of the whole job, so one rank asks for it. Rank 0, because only that creates a job
    // that does not exist yet.
    if (collective.rank() == 0) {
      BALLAST_RETURN_IF_ERROR(LoadCheckpoint(channel, session_options, options.resume_directory));
    }
    // A session that was open during the load would belong to an older generation.
    BALLAST_RETURN_IF_ERROR(collective.Barrier());
  }
  return std::make_unique<ServiceOptimizer>(channel, std::move(session_options), first);
}

}  // namespace ballast::worker
