#include "client/session/session_impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/session/join.h"
#include "client/session/log.h"
#include "client/session/retry.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::client {
namespace {

// For a small job. TimeForMemory is added, because the service answers once it has made the memory.
constexpr absl::Duration kLongestWaitForSharedMemory = absl::Seconds(10);

absl::Status CheckOptions(const SessionOptions& options) {
  const int world_size = options.job.layout.world_size;
  if (options.rank < 0 || options.rank >= world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", options.rank, " is not in a world of size ", world_size));
  }
  if (options.window_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("window_bytes is ", options.window_bytes, ", expected a positive number"));
  }
  return Validate(options.job);
}

v1::Vote ToMessage(const StepVote& vote) {
  v1::Vote message;
  message.set_abandon(!vote.apply);
  if (vote.clipping != Clipping()) *message.mutable_clipping() = proto::ToProto(vote.clipping);
  for (const auto& [group, overrides] : vote.overrides) {
    (*message.mutable_overrides())[group] = proto::ToProto(overrides);
  }
  if (vote.trainer_state.has_value()) message.set_trainer_state(*vote.trainer_state);
  return message;
}

}  // namespace

SessionImpl::SessionImpl(std::unique_ptr<Transport> transport, Clock& clock, SessionOptions options,
                         Layout layout)
    : transport_(std::move(transport)),
      clock_(clock),
      options_(std::move(options)),
      layout_(std::move(layout)),
      // Without `weights` the memory exists wherever weights can come: TakeWeightsMemory has made
      // it, or Open has failed; and a session that takes no steps gets no weights.
      weights_at_([this](int chunk) {
        return options_.weights ? options_.weights(chunk) : weights_memory_->at(chunk);
      }),
      sink_(layout_, options_.job.groups, options_.rank, weights_at_,
            // The callback first: whoever Arrived wakes relies on what it has done. The C interface
            // hands the chunk to its copies there.
            [this](int chunk) {
              if (options_.on_weights) options_.on_weights(chunk);
              progress_.Arrived(chunk);
            }),
      log_(options_.window_bytes, options_.seal_timeout) {}

SessionImpl::~SessionImpl() {
  // Pushes first: they use the members that go next, and one that waits for room would wait in vain
  // once there is no stream to acknowledge anything.
  EndPushes();
  pushes_.AwaitNone();
  // After this nothing calls back into the session. The log, which is destroyed next, waits for the
  // bytes that the transport still has; the shared memory that they may lie in goes after it.
  keeper_.reset();
}

absl::StatusOr<std::unique_ptr<SessionImpl>> SessionImpl::Open(std::unique_ptr<Transport> transport,
                                                               Clock& clock,
                                                               SessionOptions options) {
  BALLAST_RETURN_IF_ERROR(CheckOptions(options));
  if (options.process_id.empty()) options.process_id = DefaultProcessId();
  options.join_timeout += TimeForMemory(options.job);
  if (!options.takes_steps) options.shared_memory = SharedMemoryUse::kNever;
  BALLAST_ASSIGN_OR_RETURN(Layout layout,
                           Layout::CreateForRanks(options.job.layout, {options.rank}));
  const absl::Time deadline = clock.Now() + options.join_timeout;
  std::unique_ptr<SessionImpl> session(
      new SessionImpl(std::move(transport), clock, std::move(options), std::move(layout)));
  if (absl::Status status = session->Start(deadline); !status.ok()) {
    return Annotate(status, session->Context());
  }
  return session;
}

absl::Status SessionImpl::Start(absl::Time deadline) {
  SessionOptions options = options_;
  // This limits the attempts. A rank that waits for rank 0 does so within Join, up to the deadline.
  const absl::Duration limit = std::min(options_.reconnect_timeout, deadline - clock_.Now());
  return Retry(
      clock_, limit, [&] { return TryToStart(options, deadline); },
      [&](const absl::Status& status) {
        // ABORTED after attaching: the service noticed the end of an older stream only now and
        // detached the rank, or the generation has risen. Attaching once more shows whether the
        // rank is lost.
        return absl::IsUnavailable(status) || (absl::IsAborted(status) && options.rejoin &&
                                               ReasonOf(status) != reason::kRankReplaced);
      });
}

absl::Status SessionImpl::TryToStart(SessionOptions& options, absl::Time& deadline) {
  // The stream of an attempt before this one ends first: its thread uses what is replaced below.
  keeper_.reset();
  BALLAST_ASSIGN_OR_RETURN(attached_, Join(*transport_, clock_, options, deadline));
  // This process has the rank now. Another attempt must get the same job, and must not take the
  // rank from a process that has replaced this one.
  options.job_uid = attached_.uid();
  options.rejoin = true;
  // These are of the step at which the rank attached. A stream that opens at another step is an
  // error (StreamKeeper::Open), after which this is all done again.
  last_step_.trainer_state = attached_.job().trainer_state();
  last_step_.applied = true;
  if (const auto& records = attached_.job().recent_steps(); !records.empty()) {
    last_step_.applied = records.rbegin()->applied();
  }
  KnowInherited(attached_.job());
  // As a session that has the step's decision.
  if (in_second_round_.exchange(IsInSecondRound(attached_))) progress_.End();
  if (in_second_round_) {
    progress_.Begin(attached_.committed_step());
    BALLAST_RETURN_IF_ERROR(DecideAgain(progress_.standing(), attached_.job()));
  }
  attached_.clear_job();  // A job's description can be large, and is no longer needed.
  awaiting_weights_ = attached_.awaiting_weights();
  committed_step_ = attached_.committed_step() - (in_second_round_ ? 1 : 0);
  // Both before the stream: its open message says whether weights stay in shared memory, and
  // whether there is memory for provisional ones.
  ShareMemory(attached_.shared_memory(), deadline);
  BALLAST_RETURN_IF_ERROR(TakeWeightsMemory());
  keeper_ = std::make_unique<StreamKeeper>(
      *transport_, clock_, log_, static_cast<StreamKeeper::User&>(*this),
      StreamKeeper::Settings{.open = OpenMessage(),
                             .instance_id = attached_.instance_id(),
                             .committed_step = attached_.committed_step(),
                             .reconnect_timeout = options_.reconnect_timeout});
  // At the deadline there is still time for a reason to arrive.
  return keeper_->Open(std::max(deadline - clock_.Now(), absl::Seconds(1)));
}

void SessionImpl::KnowInherited(const v1::Job& job) {
  inherited_.assign(options_.job.layout.parameters.size(), false);
  for (int p = 0; p < job.parameters_size() && p < std::ssize(inherited_); ++p) {
    inherited_[p] = job.parameters(p).inherited();
  }
}

// Each attachment has its own offer. If anything fails, the stream carries everything.
void SessionImpl::ShareMemory(const v1::SharedMemoryOffer& offer, absl::Time deadline) {
  // Then its places lie in the mapping that goes. Memory of the session's own stays.
  if (shared_memory_ != nullptr) weights_memory_.reset();
  shared_memory_ = nullptr;
  if (!attached_.has_shared_memory()) return;
  // Leaves time to open the stream; a service that listens answers soon.
  const absl::Duration limit =
      std::clamp((deadline - clock_.Now()) / 2, absl::Seconds(1),
                 kLongestWaitForSharedMemory + TimeForMemory(options_.job));
  absl::StatusOr<std::unique_ptr<SharedMapping>> shared = SharedMapping::Connect(
      offer, RankMemoryLayout(layout_, options_.job.groups, options_.rank), limit);
  if (shared.ok()) {
    shared_memory_ = *std::move(shared);
    return;
  }
  // NOT_FOUND: the service is on another host, or in another network namespace.
  const bool elsewhere = absl::IsNotFound(shared.status());
  Log().log(elsewhere ? spdlog::level::info : spdlog::level::warn,
            "{}: no memory is shared, so gradients and weights go through the connection: {}",
            Context(), std::string(shared.status().message()));
}

absl::Status SessionImpl::TakeWeightsMemory() {
  if (!options_.takes_steps) return absl::OkStatus();
  if (shared_memory_ != nullptr) {
    weights_memory_ = WeightsMemory::In(*shared_memory_, layout_, options_.rank);
    return absl::OkStatus();
  }
  if (weights_memory_.has_value()) return absl::OkStatus();  // From another attempt.
  // With `weights`, memory is needed only for provisional weights.
  if (options_.weights && options_.job.update_mode != UpdateMode::kSpeculate) {
    return absl::OkStatus();
  }
  absl::StatusOr<WeightsMemory> reserved =
      WeightsMemory::Reserve(layout_, options_.job.groups, options_.rank);
  if (reserved.ok()) {
    weights_memory_ = *std::move(reserved);
    return absl::OkStatus();
  }
  // Without provisional weights the session still works, if the trainer has memory for the others.
  if (!options_.weights) return reserved.status();
  Log().warn("{}: {}; this rank's chunks wait for the decision", Context(),
             std::string(reserved.status().message()));
  return absl::OkStatus();
}

absl::Span<const std::byte> SessionImpl::weights_memory(int chunk) const {
  if (options_.weights || !weights_memory_.has_value() || chunk < 0) return {};
  return weights_memory_->at(chunk);
}

absl::Span<std::byte> SessionImpl::gradient_memory(int chunk) {
  const bool exists = chunk >= 0 && chunk < static_cast<int>(layout_.chunks().size());
  if (shared_memory_ == nullptr || !exists) return {};
  return shared_memory_->gradient(chunk);
}

v1::OpenTrain SessionImpl::OpenMessage() const {
  v1::OpenTrain open;
  open.set_name(proto::JobName(options_.job.name));
  open.set_uid(attached_.uid());
  open.set_rank(options_.rank);
  open.set_process_id(options_.process_id);
  *open.mutable_generation() = attached_.generation();
  if (may_speculate()) open.set_update_mode(v1::SPECULATE);
  open.set_weights_in_shared_memory(shared_memory_ != nullptr);
  open.set_orthogonalizes(options_.job.newton_schulz == Orthogonalizer::kWorkers);
  return open;
}

Generation SessionImpl::generation() const { return proto::FromProto(attached_.generation()); }

std::string SessionImpl::Context() const {
  std::string context = absl::StrCat("job ", options_.job.name, " rank ", options_.rank);
  if (const uint64_t step = progress_.step(); step != 0) absl::StrAppend(&context, " step ", step);
  return context;
}

void SessionImpl::OnEnded(const absl::Status& status) {
  // The failure first: a sender that the log wakes returns it.
  progress_.Fail(Annotate(status, Context()));
  log_.Close(progress_.failure());
}

// ---------------------------------------------------------------- the step

absl::Status SessionImpl::CheckNotDiscarding(const char* call) const {
  BALLAST_RETURN_IF_ERROR(progress_.failure());
  if (!progress_.discarding()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      Context(), ": ", call, " while the step is being discarded; call Discard again"));
}

absl::Status SessionImpl::CheckInStep(const char* call) const {
  BALLAST_RETURN_IF_ERROR(CheckNotDiscarding(call));
  if (progress_.step() != 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(Context(), ": ", call, " before BeginStep"));
}

absl::Status SessionImpl::CheckBetweenSteps(const char* call) const {
  BALLAST_RETURN_IF_ERROR(CheckNotDiscarding(call));
  if (progress_.step() == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      Context(), ": ", call, " in the middle of a step; seal and receive its weights first"));
}

absl::Status SessionImpl::CheckTakesSteps(const char* call) const {
  if (options_.takes_steps) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(Context(), ": ", call, " in a session that was opened without steps"));
}

absl::Status SessionImpl::BeginStep(const StepSettings& settings) {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("BeginStep"));
  BALLAST_RETURN_IF_ERROR(CheckTakesSteps("BeginStep"));
  const uint64_t step = committed_step_ + 1;
  v1::TrainRequest request;
  v1::BeginStep& begin = *request.mutable_begin_step();
  begin.set_step(step);
  begin.set_attempt(progress_.at().attempt);
  begin.set_loss_scale(settings.scale.loss_scale);
  begin.set_trainer_state(settings.trainer_state);
  begin.mutable_divisors()->Add(settings.scale.divisors.begin(), settings.scale.divisors.end());
  if (settings.expected_clipping != Clipping()) {
    *begin.mutable_expected_clipping() = proto::ToProto(settings.expected_clipping);
  }
  for (const auto& [group, overrides] : settings.overrides) {
    (*begin.mutable_overrides())[group] = proto::ToProto(overrides);
  }
  // Before the message leaves: the answers to it are checked against the step in progress, and
  // another thread may receive them before Send returns.
  progress_.Begin(step);
  guesses_ = in_second_round_ = false;
  if (report_.sent) report_ = {};
  return log_.Send(std::move(request));
}

absl::Status SessionImpl::CheckPush(const GradientPush& push, StepAttempt at) const {
  BALLAST_RETURN_IF_ERROR(progress_.failure());
  if (at.step == 0) {
    return absl::FailedPreconditionError(absl::StrCat(Context(), ": Push before BeginStep"));
  }
  const auto refuse = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(Context(), ": chunk ", push.chunk, ": ", why));
  };
  const absl::Span<const Chunk> chunks = layout_.chunks();
  if (push.chunk < 0 || push.chunk >= static_cast<int>(chunks.size())) {
    return refuse(absl::StrCat("there are ", chunks.size(), " chunks"));
  }
  const Chunk& chunk = chunks[push.chunk];
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
  const Callers::Entry entry(pushes_);    // The destructor waits for this call.
  const StepAttempt at = progress_.at();  // Another thread may discard it.
  if (absl::Status status = CheckPush(push, at); !status.ok()) {
    if (push.released) push.released();
    return status;
  }
  if (progress_.given_up()) {  // Its later messages are for no call.
    if (push.released) push.released();
    return absl::OkStatus();
  }
  v1::GradientHeader header;
  header.set_step(at.step);
  header.set_attempt(at.attempt);
  header.set_chunk(static_cast<uint32_t>(push.chunk));
  header.set_micro_step_begin(push.micro_step_begin);
  header.set_micro_step_end(push.micro_step_end);
  header.set_final(push.final);
  header.set_may_guess(push.may_guess);
  // Before the message leaves: provisional weights may come as soon as it has arrived, and a
  // chunk's may come twice only where this is set.
  if (push.may_guess) guesses_ = true;
  header.set_empty(push.empty);
  const absl::Span<const std::byte> place = gradient_memory(push.chunk);
  const bool in_place = !push.empty && !place.empty() && push.payload.data() == place.data();
  const absl::Status sent = in_place
                                ? log_.SendSharedGradient(header, place, std::move(push.released))
                                : log_.SendGradient(header, push.payload, std::move(push.released));
  if (sent.ok()) return sent;
  // If the session has failed, its failure is the cause.
  BALLAST_RETURN_IF_ERROR(progress_.failure());
  return Annotate(sent, absl::StrCat(Context(), ": chunk ", push.chunk, " of micro-step ",
                                     push.micro_step_begin));
}

void SessionImpl::EndPushes() { log_.Close(absl::CancelledError("the session was closed")); }

absl::Status SessionImpl::EndMicroStep(uint32_t micro_step, const UsedParameters& used) {
  BALLAST_RETURN_IF_ERROR(CheckInStep("EndMicroStep"));
  if (progress_.given_up()) return absl::OkStatus();
  v1::TrainRequest request;
  v1::EndMicroStep& end = *request.mutable_end_micro_step();
  end.set_step(progress_.at().step);
  end.set_attempt(progress_.at().attempt);
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
  return log_.Send(std::move(request));
}

absl::Status SessionImpl::CheckVote(const StepVote& vote) const {
  return Annotate(Validate(vote.clipping, static_cast<int>(options_.job.groups.size())), Context());
}

absl::Status SessionImpl::Report(const RankReport& report) {
  RankReport all = report_.report;
  for (const auto& [name, value] : report.numbers) all.numbers[name] = value;
  if (report.seconds.has_value()) all.seconds = report.seconds;
  BALLAST_RETURN_IF_ERROR(CheckReport(all));
  report_.report = std::move(all);
  return absl::OkStatus();
}

template <typename Message>
void SessionImpl::AddReport(Message& message) {
  if (report_.report.empty()) return;
  *message.mutable_report() = proto::ToProto(report_.report);
  report_.sent = true;
}

absl::Status SessionImpl::SendSeal(uint32_t micro_steps, const StepVote* vote) {
  v1::TrainRequest request;
  v1::Seal& seal = *request.mutable_seal();
  seal.set_step(progress_.at().step);
  seal.set_attempt(progress_.at().attempt);
  seal.set_micro_steps(micro_steps);
  if (vote != nullptr) *seal.mutable_vote() = ToMessage(*vote);
  AddReport(seal);
  return log_.Send(std::move(request));
}

absl::Status SessionImpl::SendVote(const StepVote& vote) {
  v1::TrainRequest request;
  request.mutable_vote()->set_step(progress_.at().step);
  request.mutable_vote()->set_attempt(progress_.at().attempt);
  *request.mutable_vote()->mutable_vote() = ToMessage(vote);
  AddReport(*request.mutable_vote());
  return log_.Send(std::move(request));
}

absl::StatusOr<StepNorm> SessionImpl::Seal(uint32_t micro_steps) {
  BALLAST_RETURN_IF_ERROR(CheckInStep("Seal"));
  if (progress_.StartSeal(/*with_vote=*/false)) {
    BALLAST_RETURN_IF_ERROR(SendSeal(micro_steps, nullptr));
  }
  absl::StatusOr<StepNorm> norm = progress_.AwaitNorm(options_.seal_timeout);
  if (!norm.ok()) return ExplainSeal(norm.status());
  return norm;
}

absl::StatusOr<StepDecision> SessionImpl::Vote(const StepVote& vote) {
  BALLAST_RETURN_IF_ERROR(CheckInStep("Vote"));
  // Before StartVote, after which a vote counts as sent: one that is refused later than that would
  // be waited for in vain, and the next one would not be sent.
  BALLAST_RETURN_IF_ERROR(CheckVote(vote));
  absl::StatusOr<bool> start = progress_.StartVote();
  if (!start.ok()) return Annotate(start.status(), Context());
  if (*start) BALLAST_RETURN_IF_ERROR(SendVote(vote));
  return AwaitDecision();
}

absl::StatusOr<StepDecision> SessionImpl::Seal(uint32_t micro_steps, const StepVote& vote) {
  BALLAST_RETURN_IF_ERROR(CheckInStep("Seal"));
  BALLAST_RETURN_IF_ERROR(CheckVote(vote));
  if (progress_.StartSeal(/*with_vote=*/true)) {
    BALLAST_RETURN_IF_ERROR(SendSeal(micro_steps, &vote));
  } else if (progress_.has_norm()) {  // It was sealed before.
    return Vote(vote);
  }
  return AwaitDecision();
}

absl::StatusOr<StepDecision> SessionImpl::AwaitDecision() {
  absl::StatusOr<StepDecision> decision = progress_.AwaitDecision(options_.seal_timeout);
  if (!decision.ok()) return ExplainSeal(decision.status());
  return decision;
}

absl::Status SessionImpl::ExplainSeal(const absl::Status& status) const {
  if (const absl::Status failure = progress_.failure(); !failure.ok()) return failure;
  if (!absl::IsDeadlineExceeded(status)) return Annotate(status, Context());
  std::vector<int> ranks = progress_.awaited_ranks();
  if (ranks.empty()) {
    // The service names the ranks only after its own deadline, which has not passed yet.
    if (const absl::StatusOr<v1::Job> job =
            client::GetJob(*transport_, options_.job.name, attached_.uid());
        job.ok()) {
      const bool voting = job->phase() == v1::VOTING;
      for (const v1::RankProgress& rank : job->ranks()) {
        if (!(voting ? rank.voted() : rank.sealed())) ranks.push_back(rank.rank());
      }
      if (ranks.empty() && !job->waits_for().empty()) {
        return Annotate(
            absl::DeadlineExceededError(absl::StrCat(status.message(), "; ", job->waits_for())),
            Context());
      }
      // If no rank is awaited, the service itself may hold the decision back, for a save that has
      // no memory for second versions.
      for (const v1::SaveProgress& save : job->saves()) {
        if (!ranks.empty() || !save.holds_back_decisions()) continue;
        const std::string what =
            save.makes_memory()
                ? "for memory for second versions, which the service makes for a save to "
                : "for a save to ";
        return Annotate(absl::DeadlineExceededError(absl::StrCat(
                            status.message(), "; all ranks have sealed, and the decision waits ",
                            what, save.directory(), ", which last got further ",
                            std::lround(save.seconds_since_progress()),
                            " s ago: wait with another Seal (ballast job shows how far it is)")),
                        Context());
      }
    }
  }
  return Annotate(
      absl::DeadlineExceededError(absl::StrCat(
          status.message(), progress_.has_norm() ? "; not voted: " : "; not sealed: ",
          ranks.empty() ? "no rank that the service names"
                        : absl::StrCat("rank ", absl::StrJoin(ranks, ", ")),
          "; wait with another ", progress_.has_norm() ? "Vote" : "Seal", ", or abort the step")),
      Context());
}

absl::Status SessionImpl::Discard() {
  BALLAST_RETURN_IF_ERROR(progress_.failure());
  BALLAST_RETURN_IF_ERROR(CheckTakesSteps("Discard"));
  if (progress_.StartDiscard()) {
    const StepAttempt at = progress_.at();
    v1::TrainRequest request;
    request.mutable_discard()->set_step(at.step != 0 ? at.step : committed_step_ + 1);
    request.mutable_discard()->set_attempt(at.attempt);
    BALLAST_RETURN_IF_ERROR(log_.Send(std::move(request)));
  }
  const absl::Status discarded = progress_.AwaitDiscarded(options_.seal_timeout);
  if (discarded.ok()) return discarded;
  BALLAST_RETURN_IF_ERROR(progress_.failure());
  return Annotate(discarded, Context());
}

absl::Status SessionImpl::ReceiveWeights() {
  // A decided step can be received even if the stream failed later.
  if (!progress_.standing().decided) {
    BALLAST_RETURN_IF_ERROR(CheckInStep("ReceiveWeights"));
    return absl::FailedPreconditionError(
        absl::StrCat(Context(), ": ReceiveWeights before Seal has returned a decision"));
  }
  if (progress_.standing().awaits_orthogonal && !ChunksOfTwoRounds().empty()) {
    const MutexLock lock(orthogonal_mutex_);
    if (!has_orthogonal_) {
      return absl::FailedPreconditionError(
          absl::StrCat(Context(), ": ReceiveWeights before GiveOrthogonal"));
    }
  }
  const absl::StatusOr<double> seconds = progress_.AwaitCommitted(options_.seal_timeout);
  if (!seconds.ok()) {
    BALLAST_RETURN_IF_ERROR(progress_.failure());
    if (!progress_.standing().awaits_orthogonal) return Annotate(seconds.status(), Context());
    std::vector<int> ranks;
    const auto job = client::GetJob(*transport_, options_.job.name, attached_.uid());
    for (int i = 0; job.ok() && i < job->ranks_size(); ++i) {
      if (job->ranks(i).orthogonalizes()) ranks.push_back(job->ranks(i).rank());
    }
    return Annotate(
        absl::DeadlineExceededError(absl::StrCat(
            seconds.status().message(), "; what it orthogonalizes has not been given by ",
            ranks.empty() ? "no rank that the service names"
                          : absl::StrCat("rank ", absl::StrJoin(ranks, ", ")),
            "; wait with another ReceiveWeights, or abort the step")),
        Context());
  }
  {
    const MutexLock lock(orthogonal_mutex_);
    orthogonal_.clear();
    has_orthogonal_ = false;
  }
  update_seconds_ = *seconds;
  // In this order: the stream may be reopened between the two lines, and of a rank without an open
  // step OnAttachedAgain expects that it is at the service's committed step.
  committed_step_ = progress_.step();
  progress_.End();
  return absl::OkStatus();
}

absl::Status SessionImpl::AwaitWeights(absl::Span<const int> chunks) {
  const absl::Status arrived = progress_.AwaitWeights(chunks, options_.seal_timeout);
  if (arrived.ok()) return arrived;
  BALLAST_RETURN_IF_ERROR(progress_.failure());
  return Annotate(arrived, Context());
}

}  // namespace ballast::client
