// The service's messages to a session, on its streams and when a broken one is reopened.
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/session/log.h"
#include "client/session/session_impl.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::client {
namespace {

// From a decision or from its record: both have these fields.
template <typename Message>
StepDecision ToDecision(const Message& message) {
  StepDecision decision;
  decision.step = message.step();
  decision.applied = message.applied();
  decision.norm = message.norm();
  decision.clip_coefficient = message.clip_coefficient();
  decision.skip_reason = message.skip_reason();
  decision.unused_parameters.assign(message.unused_parameters().begin(),
                                    message.unused_parameters().end());
  return decision;
}

// Why a seal or a vote was refused.
template <typename Refused>
absl::Status ToStatus(const Refused& refused) {
  absl::Status why = absl::FailedPreconditionError(refused.message());
  if (refused.reason() == v1::ERROR_REASON_UNSPECIFIED) return why;
  return WithReason(std::move(why), v1::ErrorReason_Name(refused.reason()));
}

}  // namespace

absl::Status SessionImpl::OnMessage(const v1::TrainResponse& message, PayloadPieces payload) {
  if (!options_.takes_steps) return absl::OkStatus();  // The end of a step that others took.
  switch (message.kind_case()) {
    case v1::TrainResponse::kSealRefused:
      return OnSealRefused(message.seal_refused());
    case v1::TrainResponse::kWaiting:
      OnWaiting(message.waiting());
      return absl::OkStatus();
    case v1::TrainResponse::kDecision:
      return OnDecision(message.decision());
    case v1::TrainResponse::kWeights:
      return OnWeights(message.weights().header(), payload);
    case v1::TrainResponse::kDirections:
      return progress_.Directions(message.directions().step());
    case v1::TrainResponse::kCommitted:
      return OnCommitted(message.committed());
    case v1::TrainResponse::kSharedWeights:
      return OnSharedWeights(message.shared_weights());
    case v1::TrainResponse::kNorm:
      return OnNorm(message.norm());
    case v1::TrainResponse::kVoteRefused:
      return OnVoteRefused(message.vote_refused());
    case v1::TrainResponse::kDiscarded:
      return OnDiscarded(message.discarded());
    case v1::TrainResponse::kOpened:        // The keeper's.
    case v1::TrainResponse::kAcknowledged:  // The keeper's.
    case v1::TrainResponse::KIND_NOT_SET:   // A kind of a newer service.
      return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status SessionImpl::OnSealRefused(const v1::SealRefused& refused) {
  const StepAttempt at = {refused.step(), refused.attempt()};
  // Before the trainer is notified, and seals again.
  log_.SealRefused(at);
  return progress_.Refused(at, ToStatus(refused));
}

absl::Status SessionImpl::OnNorm(const v1::StepNorm& message) {
  return progress_.Normed(
      {.step = message.step(),
       .attempt = message.attempt(),
       .norm = message.norm(),
       .group_norms = {message.group_norms().begin(), message.group_norms().end()},
       .non_finite = message.non_finite(),
       .unused_parameters = {message.unused_parameters().begin(),
                             message.unused_parameters().end()},
       .more_unused_parameters = message.more_unused_parameters()});
}

absl::Status SessionImpl::OnVoteRefused(const v1::VoteRefused& refused) {
  const StepAttempt at = {refused.step(), refused.attempt()};
  // As above: the trainer, once notified, may vote again, and that vote has to stay.
  log_.VoteRefused(at);
  return progress_.VoteRefused(at, ToStatus(refused));
}

absl::Status SessionImpl::OnDiscarded(const v1::Discarded& discarded) {
  if (progress_.discarding()) {
    // Before the trainer is notified, and begins again. What came ahead for the attempt is
    // no session's, and the service reads none of its gradients.
    log_.Discarded();
    DropProvisionalWeights();
  }
  return progress_.Discarded({discarded.step(), discarded.attempt()});
}

void SessionImpl::OnWaiting(const v1::Waiting& waiting) {
  progress_.Waiting(waiting.step(), {waiting.ranks().begin(), waiting.ranks().end()});
  const char* const did = progress_.standing().awaits_orthogonal ? "O is given"
                          : progress_.has_norm()                 ? "voted"
                                                                 : "sealed";
  Log().warn("{}: {}; the service waits for rank {}{}{}", Context(), did,
             absl::StrJoin(waiting.ranks(), ", "), waiting.why().empty() ? "" : ": ",
             waiting.why());
}

absl::Status SessionImpl::Decide(StepDecision decision) {
  // The log has nothing of the next step, which the trainer begins after Committed. Emptied before
  // the trainer is notified, so that payloads are released when Seal returns, unless the transport
  // still has them.
  log_.StepDecided();
  if (decision.applied) sink_.Begin();
  return progress_.Decided(std::move(decision));
}

absl::Status SessionImpl::OnDecision(const v1::StepDecision& message) {
  BALLAST_RETURN_IF_ERROR(Decide(ToDecision(message)));
  // What is published is no longer provisional. So the call after it drops the rest only: the
  // weights of dropped chunks, and all of a skipped step.
  const absl::Status published =
      message.applied() ? PublishProvisionalWeights(message) : absl::OkStatus();
  DropProvisionalWeights();
  return published;
}

// ---------------------------------------------------------------- weights

absl::Status SessionImpl::OnProvisionalWeights(const v1::WeightHeader& header,
                                               PayloadPieces payload) {
  const StepProgress::Standing standing = progress_.standing();
  // Otherwise there is no memory for them, or the trainer may be reading what they would overwrite.
  if (!may_speculate() || standing.step != header.step() || standing.decided) {
    return absl::InternalError(absl::StrCat(
        "the service sent provisional weights of step ", header.step(), " while this rank ",
        may_speculate() ? "was not awaiting its decision" : "has not asked for any"));
  }
  // Where it was only a guess that the chunk's gradient is whole, others may follow.
  if (guesses_ && weights_memory_->Drop(header.chunk()) && !options_.weights &&
      options_.on_dropped_weights) {
    options_.on_dropped_weights(static_cast<int>(header.chunk()));
  }
  BALLAST_RETURN_IF_ERROR(weights_memory_->KeepProvisional(header, payload));
  if (!options_.weights && options_.on_provisional_weights) {
    options_.on_provisional_weights(static_cast<int>(header.chunk()));
  }
  return absl::OkStatus();
}

absl::Status SessionImpl::PublishProvisionalWeights(const v1::StepDecision& decision) {
  if (!may_speculate()) return absl::OkStatus();
  const absl::flat_hash_set<uint32_t> dropped(decision.dropped_chunks().begin(),
                                              decision.dropped_chunks().end());
  v1::WeightHeader header;
  header.set_step(decision.step());
  for (int chunk : layout_.chunks_of_rank(options_.rank)) {
    const bool kept = weights_memory_->has_provisional(chunk);
    if (!kept || dropped.contains(static_cast<uint32_t>(chunk))) continue;
    header.set_chunk(static_cast<uint32_t>(chunk));
    weights_memory_->Publish(chunk);
    // Through the sink, which counts the chunk and notifies the trainer like any other.
    BALLAST_RETURN_IF_ERROR(sink_.Place(header, {weights_memory_->at(chunk)}));
  }
  return absl::OkStatus();
}

// Drops all that are left.
void SessionImpl::DropProvisionalWeights() {
  if (!weights_memory_.has_value()) return;
  for (int chunk : layout_.chunks_of_rank(options_.rank)) {
    if (!weights_memory_->has_provisional(chunk)) continue;
    if (!options_.weights && options_.on_dropped_weights) options_.on_dropped_weights(chunk);
  }
  weights_memory_->ForgetProvisional();
}

absl::Status SessionImpl::OnWeights(const v1::WeightHeader& header, PayloadPieces payload) {
  if (header.provisional()) return OnProvisionalWeights(header, payload);
  // Without that decision the trainer's memory still has the weights that it works with.
  if (!progress_.applies(header.step())) {
    return absl::InternalError(absl::StrCat("the service sent weights of step ", header.step(),
                                            ", which has no decision that applies it"));
  }
  // A stream that was opened in a second round brings all weights of the step.
  if (in_second_round_ && sink_.has(header.chunk())) return absl::OkStatus();
  return sink_.Place(header, payload);
}

absl::Status SessionImpl::OnSharedWeights(const v1::SharedWeights& message) {
  if (shared_memory_ == nullptr) {
    return absl::InternalError("the service sent weights in memory that it does not share");
  }
  v1::WeightHeader header;
  header.set_step(message.step());
  header.set_provisional(message.provisional());
  for (const uint32_t chunk : message.chunks()) {
    header.set_chunk(chunk);
    // A chunk of another rank has an empty place, and OnWeights refuses it.
    BALLAST_RETURN_IF_ERROR(OnWeights(header, {weights_memory_->at(chunk)}));
  }
  return absl::OkStatus();
}

absl::Status SessionImpl::OnCommitted(const v1::StepCommitted& committed) {
  // The service sends this after the rank's last chunk: what is missing now never comes.
  if (progress_.applies(committed.step()) && sink_.missing_chunks() > 0) {
    return absl::DataLossError(absl::StrCat("step ", committed.step(), " was committed, but ",
                                            sink_.missing_chunks(),
                                            " chunks of weights have not arrived"));
  }
  // Once for all ranks.
  if (!committed.left().empty() && options_.rank == 0) {
    Log().warn("{}: {}", Context(), committed.left());
  }
  return progress_.Committed(committed.step(), committed.update_seconds());
}

// ---------------------------------------------------------------- after a break

absl::Status SessionImpl::OnAttachedAgain(const v1::AttachWorkerResponse& attached,
                                          absl::Duration limit) {
  // Provisional weights of the old stream are void: the new stream sends its own.
  DropProvisionalWeights();
  const StepProgress::Standing standing = progress_.standing();
  const uint64_t service = attached.committed_step();
  in_second_round_ = IsInSecondRound(attached);
  // Between steps, and nothing happened meanwhile. Before there are weights the step is that of the
  // state which ranks are about to give.
  if (standing.step == 0 && (service == committed_step_ || attached.awaiting_weights())) {
    return absl::OkStatus();
  }
  // The step was committed while the stream was broken.
  if (standing.step != 0 && service == standing.step) {
    if (in_second_round_) return DecideAgain(standing, attached.job());
    return FinishStep(standing, attached.job(), limit);
  }
  // The step is still open: the log sends what the service does not have.
  // After a decision it cannot be: attaching waits for an update that is under way. A service that
  // is still at the step before has lost the decision.
  if (standing.step != 0 && service + 1 == standing.step && !standing.decided) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the stream broke, and the service is at step ", service, " where this rank ",
      standing.step == 0
          ? absl::StrCat("is at ", committed_step_.load())
          : absl::StrCat(standing.decided ? "has the decision of " : "is in step ", standing.step),
      "; open the session again"));
}

bool SessionImpl::IsInSecondRound(const v1::AttachWorkerResponse& attached) const {
  return options_.takes_steps && attached.job().phase() == v1::DIRECTIONS;
}

absl::Status SessionImpl::OnOpened(const v1::Opened& opened, absl::Duration limit) {
  if (!in_second_round_ || progress_.step() != opened.committed_step()) return absl::OkStatus();
  if (!opened.awaits_orthogonal()) {
    return absl::UnavailableError("the second round ended while the stream was being opened");
  }
  BALLAST_RETURN_IF_ERROR(progress_.Directions(progress_.step()));
  return SendOrthogonal(limit);  // The service may have lost it with its process.
}

absl::Status SessionImpl::DecideAgain(const StepProgress::Standing& standing, const v1::Job& job) {
  if (standing.decided) return absl::OkStatus();
  for (const v1::StepRecord& record : job.recent_steps()) {
    if (record.step() == standing.step) return Decide(ToDecision(record));
  }
  return absl::DataLossError(absl::StrCat("the service has committed step ", standing.step,
                                          ", but has no record of its decision; open the session "
                                          "again"));
}

absl::Status SessionImpl::FinishStep(const StepProgress::Standing& standing, const v1::Job& job,
                                     absl::Duration limit) {
  // Everything has come; only the trainer's ReceiveWeights, which needs no stream, is missing.
  if (standing.committed) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(DecideAgain(standing, job));
  // Only the chunks that the old stream did not bring. If the read breaks off, the next attempt
  // comes here again, with fewer of them missing.
  if (progress_.applies(standing.step) && sink_.missing_chunks() > 0) {
    std::optional<uint64_t> step = standing.step;
    BALLAST_RETURN_IF_ERROR(Annotate(FetchWeights(sink_, step, limit), "reading weights"));
  }
  // The record does not have the seconds.
  return progress_.Committed(standing.step, /*update_seconds=*/0);
}

}  // namespace ballast::client
