// A session's logic, over any transport.
#ifndef BALLAST_CLIENT_SESSION_SESSION_IMPL_H_
#define BALLAST_CLIENT_SESSION_SESSION_IMPL_H_

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "client/session.h"
#include "client/session/callers.h"
#include "client/session/gradient_places.h"
#include "client/session/send_log.h"
#include "client/session/shared_mapping.h"
#include "client/session/step_progress.h"
#include "client/session/stream_keeper.h"
#include "client/session/weight_sink.h"
#include "client/session/weights_memory.h"
#include "client/transport/clock.h"
#include "client/transport/transport.h"

namespace ballast::client {

class SessionImpl final : public Session, private StreamKeeper::User {
 public:
  // As Session::Open. `clock` outlives the session.
  static absl::StatusOr<std::unique_ptr<SessionImpl>> Open(std::unique_ptr<Transport> transport,
                                                           Clock& clock, SessionOptions options);
  ~SessionImpl() override;

  const Layout& layout() const override { return layout_; }
  bool awaiting_weights() const override { return awaiting_weights_; }
  uint64_t committed_step() const override { return committed_step_; }
  uint64_t generation() const override { return attached_.generation(); }
  const std::string& job_uid() const override { return attached_.uid(); }
  const std::string& trainer_state() const override { return trainer_state_; }
  bool last_step_applied() const override { return last_step_applied_; }
  absl::StatusOr<JobCounts> ReadCounts() override;
  bool shares_memory() const override { return shared_memory_ != nullptr; }
  absl::Span<std::byte> gradient_memory(int chunk) override;
  absl::Span<const std::byte> weights_memory(int chunk) const override;

  absl::Status UploadWeights(
      const std::function<void(int chunk, absl::Span<float> out)>& fill) override;
  absl::Status ReadWeights() override;
  absl::Status LoadCheckpoint(const std::string& directory) override;
  absl::Status SaveCheckpoint(const std::string& directory) override;

  absl::Status BeginStep(const StepSettings& settings) override;
  absl::Status Push(GradientPush push) override;
  absl::Status EndMicroStep(uint32_t micro_step, const UsedParameters& used) override;
  absl::StatusOr<StepDecision> Seal(uint32_t micro_steps) override;
  absl::Status ReceiveWeights() override;
  double update_seconds() const override { return update_seconds_; }

 private:
  SessionImpl(std::unique_ptr<Transport> transport, Clock& clock, SessionOptions options,
              Layout layout);

  absl::Status Start(absl::Time deadline);
  // Attaches and opens the stream. What it learns goes into `options`, for another attempt.
  absl::Status TryToStart(SessionOptions& options, absl::Time deadline);
  v1::OpenTrain OpenMessage() const;
  void ShareMemory(const v1::SharedMemoryOffer& offer, absl::Time deadline);
  // RESOURCE_EXHAUSTED if there is none, and the session cannot do without.
  absl::Status TakeWeightsMemory();
  bool may_speculate() const {
    return options_.job.update_mode == UpdateMode::kSpeculate && weights_memory_.has_value();
  }
  bool PushInPlace(GradientPush& push);

  // session_stream.cc: what the service says.
  absl::Status OnMessage(const v1::TrainResponse& message, PayloadPieces payload) override;
  absl::Status OnAttachedAgain(const v1::AttachWorkerResponse& attached,
                               absl::Duration limit) override;
  void OnEnded(const absl::Status& status) override;
  absl::Status OnSealRefused(const v1::SealRefused& refused);
  void OnWaiting(const v1::Waiting& waiting);
  absl::Status OnDecision(const v1::StepDecision& message);
  absl::Status OnWeights(const v1::WeightHeader& header, PayloadPieces payload);
  absl::Status OnSharedWeights(const v1::SharedWeights& message);
  absl::Status OnProvisionalWeights(const v1::WeightHeader& header, PayloadPieces payload);
  absl::Status PublishProvisionalWeights(const v1::StepDecision& decision);
  void DropProvisionalWeights();
  absl::Status OnCommitted(const v1::StepCommitted& committed);
  absl::Status Decide(StepDecision decision);
  absl::Status FinishStep(const StepProgress::Standing& standing, const v1::Job& job,
                          absl::Duration limit);

  // Reads what `sink` misses, at `step` if it is given, which is set to the step that came.
  absl::Status FetchWeights(WeightSink& sink, std::optional<uint64_t>& step, absl::Duration limit);
  absl::StatusOr<v1::Job> GetJob() const;
  // Tries again, up to reconnect_timeout, what may be done twice, while the session lives. What
  // ended it is the error then.
  absl::Status RetryBetweenSteps(
      const std::function<absl::Status()>& call,
      const std::function<bool(const absl::Status&)>& may_heal = absl::IsUnavailable) const;

  // "job J rank R" and, during one, "step S".
  std::string Context() const override;
  // OK if a step is open and the stream is sound.
  absl::Status CheckInStep(const char* call) const;
  // OK if the session was opened for steps.
  absl::Status CheckTakesSteps(const char* call) const;
  // OK if no step is open and the stream is sound.
  absl::Status CheckBetweenSteps(const char* call) const;
  absl::Status CheckPush(const GradientPush& push) const;
  absl::Status ExplainSeal(const absl::Status& status) const;

  Callers pushes_;

  const std::unique_ptr<Transport> transport_;
  Clock& clock_;
  const SessionOptions options_;
  const Layout layout_;

  // Constant once open.
  v1::AttachWorkerResponse attached_;             // Without its job.
  std::unique_ptr<SharedMapping> shared_memory_;  // Null: everything goes through the stream.
  std::string trainer_state_;
  bool last_step_applied_ = true;

  // Of the trainer's thread.
  bool awaiting_weights_ = false;
  double update_seconds_ = 0;

  GradientPlaces places_;

  // Where the weights of a chunk go: to the trainer, or where they are read in place.
  const std::function<absl::Span<std::byte>(int chunk)> weights_at_;
  // Of the stream's thread, and of the keeper's while there is no stream.
  WeightSink sink_;
  // Where it is, is constant once open; provisional are those of the stream and of the step in
  // progress.
  std::optional<WeightsMemory> weights_memory_;

  std::atomic<uint64_t> committed_step_ = 0;
  StepProgress progress_;
  // Destroyed after the stream, when the transport lets go of the last payloads.
  SendLog log_;
  std::unique_ptr<StreamKeeper> keeper_;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_SESSION_IMPL_H_
