#include "client/session_impl.h"

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/join.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::client {
namespace {

// The trainer's standard output is the trainer's.
spdlog::logger& Log() {
  static spdlog::logger logger("ballast", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  return logger;
}

absl::Status CheckOptions(const SessionOptions& options) {
  const int world_size = options.job.layout.world_size;
  if (options.rank < 0 || options.rank >= world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", options.rank, " is not in a world of size ", world_size));
  }
  if (!options.weights) {
    return absl::InvalidArgumentError(
        "SessionOptions::weights is not set; it says where the weights of a chunk go");
  }
  if (options.window_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("window_bytes is ", options.window_bytes, ", expected a positive number"));
  }
  return Validate(options.job);
}

}  // namespace

SessionImpl::SessionImpl(std::unique_ptr<Transport> transport, Clock& clock, SessionOptions options,
                         Layout layout)
    : transport_(std::move(transport)),
      clock_(clock),
      options_(std::move(options)),
      layout_(std::move(layout)),
      sink_(layout_, options_.job.groups, options_.rank, options_.weights, options_.on_weights),
      window_(options_.window_bytes, options_.seal_timeout) {}

SessionImpl::~SessionImpl() {
  // Wakes senders in other threads before the stream goes.
  window_.Close(absl::CancelledError("the session was closed"));
  stream_.reset();
}

absl::StatusOr<std::unique_ptr<SessionImpl>> SessionImpl::Open(std::unique_ptr<Transport> transport,
                                                               Clock& clock,
                                                               SessionOptions options) {
  BALLAST_RETURN_IF_ERROR(CheckOptions(options));
  if (options.process_id.empty()) options.process_id = DefaultProcessId();
  BALLAST_ASSIGN_OR_RETURN(Layout layout, Layout::Create(options.job.layout));
  const absl::Time deadline = clock.Now() + options.join_timeout;
  std::unique_ptr<SessionImpl> session(
      new SessionImpl(std::move(transport), clock, std::move(options), std::move(layout)));
  if (absl::Status status = session->Start(deadline); !status.ok()) {
    return Annotate(status, session->Context());
  }
  return session;
}

absl::Status SessionImpl::Start(absl::Time deadline) {
  BALLAST_ASSIGN_OR_RETURN(attached_, Join(*transport_, clock_, options_, deadline));
  trainer_state_ = attached_.job().trainer_state();
  if (const auto& records = attached_.job().recent_steps(); !records.empty()) {
    last_step_applied_ = records.rbegin()->applied();
  }
  attached_.clear_job();
  awaiting_weights_ = attached_.awaiting_weights();
  committed_step_ = attached_.committed_step();
  stream_ = transport_->OpenTrainStream(*this);
  v1::TrainRequest request;
  *request.mutable_open() = OpenMessage();
  // A failure comes out of AwaitOpened, without the context that Open adds.
  Send(request).IgnoreError();
  return progress_.AwaitOpened(options_.join_timeout);
}

v1::OpenTrain SessionImpl::OpenMessage() const {
  v1::OpenTrain open;
  open.set_name(proto::JobName(options_.job.name));
  open.set_uid(attached_.uid());
  open.set_rank(options_.rank);
  open.set_process_id(options_.process_id);
  open.set_generation(attached_.generation());
  return open;
}

std::string SessionImpl::Context() const {
  std::string context = absl::StrCat("job ", options_.job.name, " rank ", options_.rank);
  if (const uint64_t step = progress_.step(); step != 0) absl::StrAppend(&context, " step ", step);
  return context;
}

absl::Status SessionImpl::Fail(const absl::Status& status) {
  progress_.Fail(Annotate(status, Context()));
  window_.Close(progress_.failure());
  return progress_.failure();
}

// ---------------------------------------------------------------- weights and checkpoints

absl::Status SessionImpl::UploadWeights(
    const std::function<void(int chunk, absl::Span<float> out)>& fill) {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("UploadWeights"));
  const absl::Span<const int> chunks = layout_.chunks_of_rank(options_.rank);
  const absl::StatusOr<v1::UploadWeightsResponse> response =
      transport_->UploadWeights(OpenMessage(), chunks, [&](int chunk) {
        std::vector<float> values(layout_.chunks()[chunk].elements);
        fill(chunk, absl::MakeSpan(values));
        return values;
      });
  if (!response.ok()) {
    return Annotate(response.status(), absl::StrCat(Context(), ": upload of first weights"));
  }
  if (response->chunks() != static_cast<int64_t>(chunks.size())) {
    return absl::InternalError(absl::StrCat(Context(), ": the service took ", response->chunks(),
                                            " of ", chunks.size(), " chunks of first weights"));
  }
  return absl::OkStatus();
}

absl::Status SessionImpl::ReadWeights() {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("ReadWeights"));
  const std::string context = absl::StrCat(Context(), ": reading weights");
  if (absl::Status status = AwaitFirstWeights(*transport_, clock_, options_); !status.ok()) {
    return Annotate(status, context);
  }
  awaiting_weights_ = false;
  const absl::Span<const int> chunks = layout_.chunks_of_rank(options_.rank);
  // An empty list would mean all chunks.
  if (chunks.empty()) return absl::OkStatus();
  v1::ReadWeightsRequest request;
  request.set_name(proto::JobName(options_.job.name));
  request.set_uid(attached_.uid());
  for (int chunk : chunks) request.add_chunks(static_cast<uint32_t>(chunk));
  WeightSink sink(layout_, options_.job.groups, options_.rank, options_.weights,
                  options_.on_weights);
  sink.Begin();
  const absl::StatusOr<uint64_t> step = transport_->ReadWeights(
      request, [&sink](const v1::WeightHeader& header, PayloadPieces payload) {
        return sink.Place(header, payload);
      });
  if (!step.ok()) return Annotate(step.status(), context);
  if (sink.missing_chunks() > 0) {
    return absl::DataLossError(
        absl::StrCat(context, ": ", sink.missing_chunks(), " chunks did not come"));
  }
  committed_step_ = *step;
  return absl::OkStatus();
}

absl::StatusOr<JobCounts> SessionImpl::ReadCounts() {
  v1::GetJobRequest request;
  request.set_name(proto::JobName(options_.job.name));
  BALLAST_ASSIGN_OR_RETURN(const v1::Job job, transport_->GetJob(request));
  return JobCounts{.applied_steps = job.applied_steps(),
                   .skipped_steps = job.skipped_steps(),
                   .coverage_complete_steps = job.coverage_complete_steps(),
                   .speculated_chunks = job.speculation().speculated_chunks(),
                   .published_chunks = job.speculation().published_chunks(),
                   .redone_chunks = job.speculation().redone_chunks()};
}

absl::Status SessionImpl::SaveCheckpoint(const std::string& directory) {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("SaveCheckpoint"));
  v1::SaveJobRequest request;
  request.set_name(proto::JobName(options_.job.name));
  request.set_directory(directory);
  return Annotate(transport_->SaveJob(request).status(),
                  absl::StrCat(Context(), ": saving to ", directory));
}

absl::Status SessionImpl::LoadCheckpoint(const std::string& directory) {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("LoadCheckpoint"));
  v1::LoadJobRequest request;
  request.set_name(proto::JobName(options_.job.name));
  request.set_directory(directory);
  const absl::Status loaded = transport_->LoadJob(request).status();
  if (!loaded.ok()) return Annotate(loaded, absl::StrCat(Context(), ": loading ", directory));
  // The generation has risen: no rank's stream is good any more, this one's included.
  Fail(absl::AbortedError("a checkpoint was loaded; open the session again")).IgnoreError();
  return absl::OkStatus();
}

// ---------------------------------------------------------------- the step

absl::Status SessionImpl::CheckInStep(const char* call) const {
  BALLAST_RETURN_IF_ERROR(progress_.failure());
  if (progress_.step() != 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(Context(), ": ", call, " before BeginStep"));
}

absl::Status SessionImpl::CheckBetweenSteps(const char* call) const {
  BALLAST_RETURN_IF_ERROR(progress_.failure());
  if (progress_.step() == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      Context(), ": ", call, " in the middle of a step; seal and receive its weights first"));
}

absl::Status SessionImpl::Send(const v1::TrainRequest& message) {
  return window_.SendControl([&] { stream_->Send(message); });
}

absl::Status SessionImpl::BeginStep(const StepSettings& settings) {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("BeginStep"));
  const uint64_t step = committed_step_ + 1;
  v1::TrainRequest request;
  v1::BeginStep& begin = *request.mutable_begin_step();
  begin.set_step(step);
  begin.set_loss_scale(settings.scale.loss_scale);
  begin.set_trainer_state(settings.trainer_state);
  begin.mutable_divisors()->Add(settings.scale.divisors.begin(), settings.scale.divisors.end());
  for (const auto& [group, overrides] : settings.overrides) {
    (*begin.mutable_overrides())[group] = proto::ToProto(overrides);
  }
  progress_.Begin(step);
  return Send(request);
}

absl::Status SessionImpl::CheckPush(const GradientPush& push) const {
  BALLAST_RETURN_IF_ERROR(CheckInStep("Push"));
  const auto refuse = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(Context(), ": chunk ", push.chunk, ": ", why));
  };
  const absl::Span<const Chunk> chunks = layout_.chunks();
  if (push.chunk < 0 || push.chunk >= static_cast<int>(chunks.size())) {
    return refuse(absl::StrCat("there are ", chunks.size(), " chunks"));
  }
  const Chunk& chunk = chunks[push.chunk];
  if (chunk.rank != options_.rank) return refuse(absl::StrCat("belongs to rank ", chunk.rank));
  const DType dtype = options_.job.groups[chunk.group].wire_dtype;
  const size_t wanted = push.empty ? 0 : chunk.elements * SizeBytes(dtype);
  if (push.payload.size() != wanted) {
    return refuse(absl::StrCat(
        "the payload has ", push.payload.size(), " bytes, expected ", wanted,
        push.empty ? " of an empty contribution"
                   : absl::StrCat(" (", chunk.elements, " elements of ", Name(dtype), ")")));
  }
  return absl::OkStatus();
}

absl::Status SessionImpl::Push(GradientPush push) {
  if (absl::Status status = CheckPush(push); !status.ok()) {
    if (push.released) push.released();
    return status;
  }
  v1::GradientHeader header;
  header.set_step(progress_.step());
  header.set_chunk(static_cast<uint32_t>(push.chunk));
  header.set_micro_step_begin(push.micro_step_begin);
  header.set_micro_step_end(push.micro_step_end);
  header.set_final(push.final);
  header.set_empty(push.empty);
  const absl::Status sent =
      window_.Send(static_cast<int64_t>(push.payload.size()), std::move(push.released),
                   [&](std::function<void()> let_go) {
                     stream_->SendGradient(header, push.payload, std::move(let_go));
                   });
  if (sent.ok()) return sent;
  BALLAST_RETURN_IF_ERROR(progress_.failure());
  return Annotate(sent, absl::StrCat(Context(), ": chunk ", push.chunk, " of micro-step ",
                                     push.micro_step_begin));
}

absl::Status SessionImpl::EndMicroStep(uint32_t micro_step, const UsedParameters& used) {
  BALLAST_RETURN_IF_ERROR(CheckInStep("EndMicroStep"));
  v1::TrainRequest request;
  v1::EndMicroStep& end = *request.mutable_end_micro_step();
  end.set_step(progress_.step());
  end.set_micro_step(micro_step);
  end.set_all_used(used.all);
  if (used.non_finite.has_value()) {
    v1::NonFiniteGradient& found = *end.mutable_non_finite();
    found.set_parameter(used.non_finite->parameter);
    found.set_element(used.non_finite->element);
    found.set_value(used.non_finite->value);
  }
  if (!used.all) {
    end.mutable_used_parameters()->Add(used.parameters.begin(), used.parameters.end());
  }
  return Send(request);
}

absl::StatusOr<StepDecision> SessionImpl::Seal(uint32_t micro_steps) {
  BALLAST_RETURN_IF_ERROR(CheckInStep("Seal"));
  if (progress_.StartSeal()) {
    v1::TrainRequest request;
    request.mutable_seal()->set_step(progress_.step());
    request.mutable_seal()->set_micro_steps(micro_steps);
    BALLAST_RETURN_IF_ERROR(Send(request));
  }
  absl::StatusOr<StepDecision> decision = progress_.AwaitDecision(options_.seal_timeout);
  if (!decision.ok()) return ExplainSeal(decision.status());
  return decision;
}

absl::Status SessionImpl::ExplainSeal(const absl::Status& status) {
  if (const absl::Status failure = progress_.failure(); !failure.ok()) return failure;
  if (!absl::IsDeadlineExceeded(status)) return Annotate(status, Context());
  std::vector<int> ranks = progress_.awaited_ranks();
  if (ranks.empty()) {
    // The service's own deadline has not passed yet; ask.
    v1::GetJobRequest request;
    request.set_name(proto::JobName(options_.job.name));
    if (const absl::StatusOr<v1::Job> job = transport_->GetJob(request); job.ok()) {
      for (const v1::RankProgress& rank : job->ranks()) {
        if (!rank.sealed()) ranks.push_back(rank.rank());
      }
    }
  }
  return Annotate(absl::DeadlineExceededError(absl::StrCat(
                      status.message(), "; not sealed: ",
                      ranks.empty() ? "no rank that the service knows of"
                                    : absl::StrCat("rank ", absl::StrJoin(ranks, ", ")),
                      "; wait with another Seal, or abort the step")),
                  Context());
}

absl::Status SessionImpl::ReceiveWeights() {
  // A step whose end has come counts, even if the stream failed after it.
  if (!progress_.decision().has_value()) {
    BALLAST_RETURN_IF_ERROR(CheckInStep("ReceiveWeights"));
    return absl::FailedPreconditionError(
        absl::StrCat(Context(), ": ReceiveWeights before Seal has returned a decision"));
  }
  const absl::StatusOr<double> seconds = progress_.AwaitCommitted(options_.seal_timeout);
  if (!seconds.ok()) {
    BALLAST_RETURN_IF_ERROR(progress_.failure());
    return Annotate(seconds.status(), Context());
  }
  update_seconds_ = *seconds;
  committed_step_ = progress_.step();
  progress_.End();
  return absl::OkStatus();
}

// ---------------------------------------------------------------- the stream's thread

void SessionImpl::OnMessage(const v1::TrainResponse& message, PayloadPieces payload) {
  // After an error, what else comes must not touch the trainer's memory.
  if (!progress_.failure().ok()) return;
  if (absl::Status status = Handle(message, payload); !status.ok()) Fail(status).IgnoreError();
}

void SessionImpl::OnClosed(const absl::Status& status) {
  Fail(status.ok() ? absl::UnavailableError("the service ended the stream; open the session again")
                   : status)
      .IgnoreError();
}

absl::Status SessionImpl::Handle(const v1::TrainResponse& message, PayloadPieces payload) {
  switch (message.kind_case()) {
    case v1::TrainResponse::kOpened:
      progress_.Opened();
      return absl::OkStatus();
    case v1::TrainResponse::kAcknowledged:
      return window_.Acknowledge(message.acknowledged().messages());
    case v1::TrainResponse::kSealRefused:
      return progress_.Refused(message.seal_refused().step(), message.seal_refused().message());
    case v1::TrainResponse::kWaiting:
      OnWaiting(message.waiting());
      return absl::OkStatus();
    case v1::TrainResponse::kDecision:
      return OnDecision(message.decision());
    case v1::TrainResponse::kWeights:
      return OnWeights(message.weights(), payload);
    case v1::TrainResponse::kCommitted:
      return OnCommitted(message.committed());
    case v1::TrainResponse::KIND_NOT_SET:
      return absl::OkStatus();  // A kind that a newer service knows.
  }
  return absl::OkStatus();
}

void SessionImpl::OnWaiting(const v1::Waiting& waiting) {
  progress_.Waiting(waiting.step(), {waiting.ranks().begin(), waiting.ranks().end()});
  Log().warn("{}: sealed; the service waits for rank {}", Context(),
             absl::StrJoin(waiting.ranks(), ", "));
}

absl::Status SessionImpl::OnDecision(const v1::StepDecision& message) {
  StepDecision decision;
  decision.step = message.step();
  decision.applied = message.applied();
  decision.norm = message.norm();
  decision.clip_coefficient = message.clip_coefficient();
  decision.skip_reason = message.skip_reason();
  decision.unused_parameters.assign(message.unused_parameters().begin(),
                                    message.unused_parameters().end());
  if (decision.applied) sink_.Begin();
  return progress_.Decided(std::move(decision));
}

absl::Status SessionImpl::OnWeights(const v1::WeightChunk& weights, PayloadPieces payload) {
  const std::optional<StepDecision> decision = progress_.decision();
  if (!decision.has_value() || !decision->applied || decision->step != weights.header().step()) {
    return absl::InternalError(absl::StrCat("the service sent weights of step ",
                                            weights.header().step(),
                                            ", which it has not said to apply"));
  }
  return sink_.Place(weights.header(), payload);
}

absl::Status SessionImpl::OnCommitted(const v1::StepCommitted& committed) {
  const std::optional<StepDecision> decision = progress_.decision();
  if (decision.has_value() && decision->applied && sink_.missing_chunks() > 0) {
    return absl::DataLossError(absl::StrCat("step ", committed.step(), " was committed, but ",
                                            sink_.missing_chunks(),
                                            " chunks of weights have not come"));
  }
  return progress_.Committed(committed.step(), committed.update_seconds());
}

}  // namespace ballast::client
