// A session's logic, over any transport.
#ifndef BALLAST_CLIENT_SESSION_SESSION_IMPL_H_
#define BALLAST_CLIENT_SESSION_SESSION_IMPL_H_

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/session.h"
#include "client/session/callers.h"
#include "client/session/send_log.h"
#include "client/session/shared_mapping.h"
#include "client/session/step_progress.h"
#include "client/session/stream_keeper.h"
#include "client/session/weight_sink.h"
#include "client/session/weights_memory.h"
#include "client/transport/clock.h"
#include "client/transport/transport.h"
#include "cpu_optimizer_service/common/system/mutex.h"

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
  Generation generation() const override;
  const std::string& job_uid() const override { return attached_.uid(); }
  const std::string& trainer_state() const override { return last_step_.trainer_state; }
  bool last_step_applied() const override { return last_step_.applied; }
  absl::StatusOr<JobCounts> ReadCounts() override;
  bool shares_memory() const override { return shared_memory_ != nullptr; }
  absl::Span<std::byte> gradient_memory(int chunk) override;
  absl::Span<const std::byte> weights_memory(int chunk) const override;

  absl::Status UploadWeights(
      const std::function<void(int chunk, absl::Span<float> out)>& fill) override;
  absl::Status UploadState(
      const FirstState& state,
      const std::function<void(int chunk, absl::Span<float> out)>& fill) override;
  absl::Status WriteState(
      StateWrite write, absl::Duration timeout,
      const std::function<void(int chunk, absl::Span<float> out)>& fill) override;
  absl::Status ReadWeights() override;
  absl::Status LoadCheckpoint(const std::string& directory) override;
  absl::Status SaveCheckpoint(const std::string& directory) override;
  absl::StatusOr<uint64_t> UndoStep() override;

  absl::Status BeginStep(const StepSettings& settings) override;
  absl::Status Push(GradientPush push) override;
  void EndPushes() override;
  absl::Status EndMicroStep(uint32_t micro_step, const UsedParameters& used) override;
  absl::Status Report(const RankReport& report) override;
  absl::StatusOr<StepNorm> Seal(uint32_t micro_steps) override;
  absl::StatusOr<StepDecision> Vote(const StepVote& vote) override;
  absl::StatusOr<StepDecision> Seal(uint32_t micro_steps, const StepVote& vote) override;
  absl::Status Discard() override;
  absl::Status ReceiveWeights() override;
  absl::Status AwaitWeights(absl::Span<const int> chunks) override;
  absl::StatusOr<std::vector<HyperParameters>> ReadDirections(
      const std::function<void(int chunk, absl::Span<const std::byte> direction)>& place) override;
  absl::Status GiveOrthogonal(
      const std::function<void(int chunk, absl::Span<std::byte> out)>& fill) override;
  uint64_t directions_step() const override {
    const StepProgress::Standing standing = progress_.standing();
    return standing.awaits_orthogonal ? standing.step : 0;
  }
  double update_seconds() const override { return update_seconds_; }

 private:
  SessionImpl(std::unique_ptr<Transport> transport, Clock& clock, SessionOptions options,
              Layout layout);

  absl::Status Start(absl::Time deadline);
  // Attaches and opens the stream. Stores in `options` what another attempt needs: the job's uid,
  // and that this process has the rank.
  absl::Status TryToStart(SessionOptions& options, absl::Time& deadline);
  void KnowInherited(const v1::Job& job);
  v1::OpenTrain OpenMessage() const;
  void ShareMemory(const v1::SharedMemoryOffer& offer, absl::Time deadline);
  // RESOURCE_EXHAUSTED if there is not enough memory and the session cannot work without it.
  absl::Status TakeWeightsMemory();
  bool may_speculate() const {
    return options_.job.update_mode == UpdateMode::kSpeculate && weights_memory_.has_value();
  }

  // session_stream.cc: messages of the service.
  absl::Status OnMessage(const v1::TrainResponse& message, PayloadPieces payload) override;
  absl::Status OnAttachedAgain(const v1::AttachWorkerResponse& attached,
                               absl::Duration limit) override;
  absl::Status OnOpened(const v1::Opened& opened, absl::Duration limit) override;
  // The job is in one in which this session takes part.
  bool IsInSecondRound(const v1::AttachWorkerResponse& attached) const;
  void OnEnded(const absl::Status& status) override;
  absl::Status OnSealRefused(const v1::SealRefused& refused);
  absl::Status OnNorm(const v1::StepNorm& message);
  absl::Status OnVoteRefused(const v1::VoteRefused& refused);
  absl::Status OnDiscarded(const v1::Discarded& discarded);
  void OnWaiting(const v1::Waiting& waiting);
  absl::Status OnDecision(const v1::StepDecision& message);
  absl::Status OnWeights(const v1::WeightHeader& header, PayloadPieces payload);
  absl::Status OnSharedWeights(const v1::SharedWeights& message);
  absl::Status OnProvisionalWeights(const v1::WeightHeader& header, PayloadPieces payload);
  absl::Status PublishProvisionalWeights(const v1::StepDecision& decision);
  void DropProvisionalWeights();
  absl::Status OnCommitted(const v1::StepCommitted& committed);
  absl::Status Decide(StepDecision decision);
  // The decision of a committed step, by its record.
  absl::Status DecideAgain(const StepProgress::Standing& standing, const v1::Job& job);
  absl::Status FinishStep(const StepProgress::Standing& standing, const v1::Job& job,
                          absl::Duration limit);

  // Those of this rank that have directions.
  std::vector<int> ChunksOfTwoRounds() const;
  int64_t BytesInBFloat16(int chunk) const;
  // Whether the service has the memory, too.
  bool SharesMemory() const { return shared_memory_ != nullptr && keeper_->shares_memory(); }
  // Where a chunk's O is kept: in `own`, or with shared memory in the place for gradients.
  absl::Span<std::byte> OrthogonalOf(std::vector<std::vector<std::byte>>& own, int chunk) const;
  // What the rank has given in this step, if anything. OK also if the service does not want it any
  // more.
  absl::Status SendOrthogonal(absl::Duration limit);
  // For both uploads.
  absl::Status Upload(const FirstState& state,
                      const std::function<void(int chunk, absl::Span<float> out)>& fill);
  // OK once the service has this rank's.
  absl::Status SendFirstWeights(const FirstState& state,
                                const std::function<void(int chunk, absl::Span<float> out)>& fill);
  // Reads the chunks that `sink` lacks, at `step` if that has a value. Sets `step` to the step of
  // the weights that arrived.
  absl::Status FetchWeights(WeightSink& sink, std::optional<uint64_t>& step, absl::Duration limit);
  absl::StatusOr<v1::Job> GetJob() const;
  // Retries `call`, which must be idempotent, for at most reconnect_timeout. If the session ends
  // meanwhile, returns the error that ended it.
  absl::Status RetryBetweenSteps(
      const std::function<absl::Status()>& call,
      const std::function<bool(const absl::Status&)>& may_heal = absl::IsUnavailable) const;

  // "job J rank R", and "step S" during a step.
  std::string Context() const override;
  // OK if a step is open and the stream is sound.
  absl::Status CheckInStep(const char* call) const;
  // OK if no discard is in progress and the stream works.
  absl::Status CheckNotDiscarding(const char* call) const;
  // OK if the session was opened for steps.
  absl::Status CheckTakesSteps(const char* call) const;
  // OK if no step is open and the stream is sound.
  absl::Status CheckBetweenSteps(const char* call) const;
  absl::Status CheckPush(const GradientPush& push, StepAttempt at) const;
  absl::Status CheckVote(const StepVote& vote) const;
  template <typename Message>
  void AddReport(Message& message);  // To a seal or a vote, if there is one.
  absl::Status SendSeal(uint32_t micro_steps, const StepVote* vote);
  absl::Status SendVote(const StepVote& vote);
  absl::StatusOr<StepDecision> AwaitDecision();
  absl::Status ExplainSeal(const absl::Status& status) const;

  Callers pushes_;

  const std::unique_ptr<Transport> transport_;
  Clock& clock_;
  const SessionOptions options_;
  const Layout layout_;

  // Constant once open.
  v1::AttachWorkerResponse attached_;             // Without its job.
  std::unique_ptr<SharedMapping> shared_memory_;  // Null: everything uses the stream.
  struct {
    std::string trainer_state;
    bool applied = true;
  } last_step_;  // Before this session.

  // Used by the trainer's thread only.
  bool awaiting_weights_ = false;
  std::vector<bool> inherited_;  // By parameter: a derived job has it already, and no rank uploads
                                 // it.
  double update_seconds_ = 0;
  struct {
    RankReport report;
    bool sent = false;  // With a seal or a vote.
  } report_;

  // Until the step's end, because the service may lose it with its process.
  Mutex orthogonal_mutex_;
  bool has_orthogonal_ ABSL_GUARDED_BY(orthogonal_mutex_) = false;
  // By chunk; empty with shared memory.
  std::vector<std::vector<std::byte>> orthogonal_ ABSL_GUARDED_BY(orthogonal_mutex_);

  // The destination of a chunk's weights: the trainer's memory, or where the trainer reads them in
  // place.
  const std::function<absl::Span<std::byte>(int chunk)> weights_at_;
  // Used by the stream's thread, and by the keeper's while there is no stream.
  WeightSink sink_;
  // Its address is constant once open. Weights in it are provisional only on this stream and for
  // the step in progress.
  std::optional<WeightsMemory> weights_memory_;

  std::atomic<uint64_t> committed_step_ = 0;
  // The stream was opened in the second round of the step in progress.
  std::atomic<bool> in_second_round_ = false;
  std::atomic<bool> guesses_ = false;  // A push of the step in progress had may_guess.
  StepProgress progress_;
  // Destroyed after the stream, because the transport may use payloads until then.
  SendLog log_;
  std::unique_ptr<StreamKeeper> keeper_;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_SESSION_IMPL_H_
