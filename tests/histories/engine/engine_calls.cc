// One call at a time, and what the engine should say to it.
#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "tests/histories/engine/engine_player.h"

namespace ballast::histories {

absl::Status EnginePlayer::Make(const Call& call) {
  if (ranks_[call.rank].away) return absl::OkStatus();
  switch (call.kind) {
    case CallKind::kBegin:
      return Begin(call);
    case CallKind::kContribute:
      return Contribute(call);
    case CallKind::kEndMicroStep:
      return EndMicroStep(call);
    case CallKind::kSeal:
      return Seal(call, attempt_->micro_steps);
  }
  return absl::OkStatus();
}

absl::Status EnginePlayer::Begin(const Call& call) {
  Rank& side = ranks_[call.rank];
  const auto adopt = [&](const RankPosition& position) {
    side.begun |= position.open_step == step_;
  };
  BALLAST_RETURN_IF_ERROR(Survive({call.rank, adopt}, [&] {
    return side.stream->BeginStep(At(call.rank), ScriptOf(call).Settings());
  }));
  if (side.try_number == live_ && !std::exchange(live_begun_, true)) stage_.model().Begin(live());
  open_ = true;
  side.begun = true;
  return absl::OkStatus();
}

Contribution EnginePlayer::MakeContribution(const Call& call) {
  const Script& script = ScriptOf(call);
  const auto [begin, end] = script.Range(call.chunk, call.segment);
  return {.step = step_,
          .attempt = call.try_number,
          .chunk = call.chunk,
          .micro_step_begin = begin,
          .micro_step_end = end,
          .final = script.IsFinal(call.chunk, call.segment),
          .may_guess = script.MayGuess(call.chunk, call.segment),
          .empty = script.IsEmpty(call.chunk, call.segment)};
}

absl::Status EnginePlayer::Contribute(const Call& call) {
  Contribution contribution = MakeContribution(call);
  const bool is_new = next_micro_step_[call.chunk] == contribution.micro_step_begin;
  const std::vector<std::byte>& payload = ScriptOf(call).Payload(call.chunk, call.segment);
  // In two pieces, cut anywhere.
  const size_t cut = payload.size() / 3;
  const absl::Span<const std::byte> pieces[] = {absl::MakeConstSpan(payload).first(cut),
                                                absl::MakeConstSpan(payload).subspan(cut)};
  const HeapRankMemory* const memory = ranks_[call.rank].memory.get();
  contribution.in_place = GoesInPlace(call);
  if (!contribution.in_place) {
    contribution.payload = pieces;
  } else if (is_new) {
    memory->WriteGradient(call.chunk, payload);
  }
  bool was_taken = !is_new;
  const auto adopt = [&](const RankPosition& position) {
    for (const auto& [chunk, next] : position.delivered) {
      if (chunk != call.chunk || next != contribution.micro_step_end) continue;
      next_micro_step_[chunk] = next;
      was_taken = true;
    }
  };
  const auto contribute = [&]() -> absl::StatusOr<ContributionResult> {
    RankStream& stream = *ranks_[call.rank].stream;
    if (call.segment > 0 && ScriptOf(call).MayGuess(call.chunk, call.segment - 1)) {
      BALLAST_RETURN_IF_ERROR(
          stream.StopProvisional(At(call.rank), contribution.micro_step_begin, {contribution.chunk})
              .status());
    }
    return stream.Contribute(contribution);
  };
  BALLAST_ASSIGN_OR_RETURN(const ContributionResult result,
                           Survive({call.rank, adopt}, contribute));
  if ((result == ContributionResult::kAdded) == was_taken) {
    return Wrong("chunk ", call.chunk, " [", contribution.micro_step_begin, ", ",
                 contribution.micro_step_end, ") was taken as ", was_taken ? "new" : "a repeat");
  }
  if (!is_new) return absl::OkStatus();
  const bool borrowed = contribution.final && next_micro_step_[call.chunk] == 0;
  if (contribution.in_place) ++(borrowed ? stage_.tally().borrowed : stage_.tally().in_place);
  if (contribution.in_place && !borrowed) {  // It has been read.
    memory->WriteGradient(call.chunk, std::vector<std::byte>(payload.size(), std::byte{0xff}));
  }
  next_micro_step_[call.chunk] = contribution.micro_step_end;
  stage_.tally().not_last +=
      contribution.may_guess && contribution.micro_step_end < attempt_->micro_steps;
  payloads_[call.chunk] += !contribution.empty;
  return absl::OkStatus();
}

absl::Status EnginePlayer::EndMicroStep(const Call& call) {
  Rank& side = ranks_[call.rank];
  const auto adopt = [&](const RankPosition& position) {
    const bool was_taken = position.micro_steps_ended == call.micro_step + 1;
    if (was_taken) side.micro_steps_ended = std::max(side.micro_steps_ended, call.micro_step + 1);
  };
  BALLAST_RETURN_IF_ERROR(Survive({call.rank, adopt}, [&] {
    return side.stream->EndMicroStep(At(call.rank), call.micro_step,
                                     ScriptOf(call).Used(call.rank, call.micro_step));
  }));
  side.micro_steps_ended = std::max(side.micro_steps_ended, call.micro_step + 1);
  return absl::OkStatus();
}

bool EnginePlayer::AllSealed() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& side) { return side.sealed; });
}

// The parameters of the first micro-step that the rank has not sent, or the ends of micro-steps;
// nullopt: nothing is missing.
std::optional<ModelRefusal> EnginePlayer::WhatIsMissing(int rank, uint32_t micro_steps) const {
  std::map<uint32_t, std::set<int>> missing;
  for (const int chunk : stage_.layout().chunks_of_rank(rank)) {
    if (next_micro_step_[chunk] > micro_steps) return ModelRefusal{reason::kSendAndSealAgain};
    if (next_micro_step_[chunk] == micro_steps) continue;
    for (const ChunkPiece& piece : stage_.layout().Pieces(chunk)) {
      missing[next_micro_step_[chunk]].insert(piece.parameter);
    }
  }
  if (!missing.empty()) {
    const auto& [micro_step, parameters] = *missing.begin();
    // A final contribution may have closed its chunk, and then it cannot be sent.
    return ModelRefusal{.parameter = NameOf(history_.job.parameters[*parameters.begin()]),
                        .micro_step = micro_step};
  }
  if (ranks_[rank].micro_steps_ended != micro_steps) {
    return ModelRefusal{reason::kSendAndSealAgain};
  }
  return std::nullopt;
}

bool IsAsExpected(const SealRefusal& refusal, const ModelRefusal& expected, int rank) {
  if (!expected.reason.empty() && ReasonOf(refusal.status) != expected.reason) return false;
  if (expected.parameter.empty() && !expected.micro_step.has_value()) return true;
  if (refusal.missing.empty()) return false;
  const MissingContribution& first = refusal.missing.front();
  if (!expected.parameter.empty() && first.parameters.front() != expected.parameter) return false;
  return !expected.micro_step.has_value() ||
         (first.rank == rank && first.micro_step == *expected.micro_step);
}

absl::Status EnginePlayer::Seal(const Call& call, uint32_t micro_steps) {
  Rank& side = ranks_[call.rank];
  const bool dead = side.try_number < live_;
  std::optional<ModelRefusal> why =
      dead ? ModelRefusal{reason::kDiscardAndRedo}
           : stage_.model().Refusal(live(), call.rank, side.micro_steps_ended);
  hopeless_ = !dead && why.has_value();
  if (!why.has_value()) why = WhatIsMissing(call.rank, micro_steps);
  side.sealed = !why.has_value();
  const bool last = AllSealed();
  if (last) why = stage_.model().Refusal(live());
  std::vector<int64_t> refusals;
  for (const Rank& other : ranks_) refusals.push_back(other.ear->refusals());

  absl::StatusOr<std::optional<SealRefusal>> sealed;
  const auto seal = [&] {
    sealed = side.stream->Seal(At(call.rank), micro_steps, VoteWithSeal(call.rank));
  };
  if (!mortal_) {
    seal();
  } else if (DiesIn(seal)) {
    side.sealed = false;
    BALLAST_RETURN_IF_ERROR(TakeOver(/*may_be_decided=*/last && !why.has_value()));
    whole_ = carried_out_ || in_directions_;
    return whole_ ? absl::OkStatus() : Seal(call, micro_steps);
  }
  BALLAST_ASSIGN_OR_RETURN(const std::optional<SealRefusal> refusal, std::move(sealed));
  if (refusal.has_value() != why.has_value()) {
    return Wrong("the seal of rank ", call.rank, " with ", micro_steps,
                 " micro-steps: ", refusal.has_value() ? refusal->status.ToString() : "was taken",
                 ", expected ", why.has_value() ? why->reason : "it to be");
  }
  if (!refusal.has_value()) {
    whole_ = last;
    return absl::OkStatus();
  }
  ++stage_.tally().refused_seals;
  if (!IsAsExpected(*refusal, *why, call.rank)) {
    return Wrong("a seal was refused with ", refusal->status.ToString(), ", expected ", why->reason,
                 " to name ", why->parameter, " in micro-step ", why->micro_step.value_or(0));
  }
  if (dead) return Discard(call.rank);
  refused_ = last || hopeless_;
  if (!last) return absl::OkStatus();
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    ranks_[rank].sealed = false;
    const bool told = ranks_[rank].ear->refusals() == refusals[rank] + 1;
    if (rank != call.rank && !ranks_[rank].away && !told) {
      return Wrong("rank ", rank, " was not told that its seal is undone");
    }
  }
  return absl::OkStatus();
}

absl::Status EnginePlayer::Repeat(const Call& call) {
  Rank& side = ranks_[call.rank];
  if (side.away) return absl::OkStatus();
  ++stage_.tally().repeats;
  if (call.try_number < side.try_number) return RepeatDiscarded(call);
  if (call.kind == CallKind::kSeal) {
    // Of a rank whose seal was undone it would be a new one.
    return side.sealed ? Seal(call, attempt_->micro_steps) : absl::OkStatus();
  }
  return Make(call);
}

absl::Status EnginePlayer::RepeatDiscarded(const Call& call) {
  RankStream& stream = *ranks_[call.rank].stream;
  const StepAttempt at = {step_, call.try_number};
  switch (call.kind) {
    case CallKind::kBegin:
      return ExpectCode(absl::StatusCode::kFailedPrecondition,
                        stream.BeginStep(at, ScriptOf(call).Settings()),
                        "beginning a discarded try");
    case CallKind::kContribute: {
      Contribution late = MakeContribution(call);
      const std::vector<std::byte>& payload = ScriptOf(call).Payload(call.chunk, call.segment);
      const absl::Span<const std::byte> piece(payload);
      late.payload = {&piece, 1};
      BALLAST_ASSIGN_OR_RETURN(const ContributionResult result, stream.Contribute(late));
      if (result == ContributionResult::kDiscarded) return absl::OkStatus();
      return Wrong("chunk ", call.chunk, " of a discarded try was taken");
    }
    case CallKind::kEndMicroStep:
      return ExpectCode(absl::StatusCode::kFailedPrecondition,
                        stream.EndMicroStep(at, call.micro_step, {}), "ending in a discarded try");
    case CallKind::kSeal: {
      BALLAST_ASSIGN_OR_RETURN(const auto refusal, stream.Seal(at, attempt_->micro_steps));
      if (refusal.has_value() && refusal->attempt == call.try_number) return absl::OkStatus();
      return Wrong("the seal of a discarded try was taken");
    }
  }
  return absl::OkStatus();
}

absl::Status EnginePlayer::Discard(int rank) {
  Rank& side = ranks_[rank];
  std::vector<int64_t> refusals;
  for (const Rank& other : ranks_) refusals.push_back(other.ear->refusals());
  BALLAST_ASSIGN_OR_RETURN(const bool done, side.stream->Discard(At(rank)));
  if (!done) return Wrong("rank ", rank, " discards what is not decided, and is told that it is");
  ++stage_.tally().discarded;
  open_ = true;
  ++side.try_number;
  side.begun = side.sealed = false;
  side.micro_steps_ended = 0;
  for (const int chunk : stage_.layout().chunks_of_rank(rank)) {
    next_micro_step_[chunk] = 0;
    payloads_[chunk] = 0;
  }
  side.ear->Discarded();
  tries_->Redo(calls_, next_call_, rank, side.try_number);
  if (side.try_number <= live_) return absl::OkStatus();
  live_ = side.try_number;
  live_begun_ = false;
  for (int other = 0; other < history_.job.world_size; ++other) {
    if (!std::exchange(ranks_[other].sealed, false)) continue;  // It learns by its seal.
    if (ranks_[other].away) {
      BALLAST_RETURN_IF_ERROR(Open(other, /*over=*/false));
    } else if (ranks_[other].ear->refusals() != refusals[other] + 1) {
      return Wrong("rank ", other, " was not told that what it sealed is discarded");
    }
    BALLAST_RETURN_IF_ERROR(Discard(other));
  }
  return absl::OkStatus();
}

absl::Status EnginePlayer::ExpectAborted(RankStream& stream, int rank) {
  const auto expect = [rank](const absl::Status& status, const char* call) {
    return ExpectCode(absl::StatusCode::kAborted, status,
                      absl::StrCat(call, " on an old stream of rank ", rank));
  };
  BALLAST_RETURN_IF_ERROR(expect(stream.BeginStep(step_, {}), "BeginStep"));
  if (const auto chunks = stage_.layout().chunks_of_rank(rank); !chunks.empty()) {
    const absl::Status status =
        stream.Contribute({.step = step_, .chunk = chunks.front(), .empty = true}).status();
    BALLAST_RETURN_IF_ERROR(expect(status, "Contribute"));
  }
  BALLAST_RETURN_IF_ERROR(expect(stream.EndMicroStep(step_, 0, {}), "EndMicroStep"));
  return expect(stream.Seal(step_, 1).status(), "Seal");
}

}  // namespace ballast::histories
