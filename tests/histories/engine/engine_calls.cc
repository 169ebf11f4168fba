// One call at a time, and what the engine should say to it.
#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
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
  BALLAST_RETURN_IF_ERROR(ranks_[call.rank].stream->BeginStep(step_, script_->Settings()));
  if (!open_) stage_.model().Begin(*attempt_);
  open_ = true;
  ranks_[call.rank].begun = true;
  return absl::OkStatus();
}

Contribution EnginePlayer::MakeContribution(const Call& call) {
  const auto [begin, end] = script_->Range(call.chunk, call.segment);
  return {.step = step_,
          .chunk = call.chunk,
          .micro_step_begin = begin,
          .micro_step_end = end,
          .final = script_->IsFinal(call.chunk, call.segment),
          .empty = script_->IsEmpty(call.chunk, call.segment)};
}

absl::Status EnginePlayer::Contribute(const Call& call) {
  Contribution contribution = MakeContribution(call);
  const bool is_new = next_micro_step_[call.chunk] == contribution.micro_step_begin;
  const std::vector<std::byte>& payload = script_->Payload(call.chunk, call.segment);
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
  BALLAST_ASSIGN_OR_RETURN(const ContributionResult result,
                           ranks_[call.rank].stream->Contribute(contribution));
  if ((result == ContributionResult::kAdded) != is_new) {
    return Wrong("chunk ", call.chunk, " [", contribution.micro_step_begin, ", ",
                 contribution.micro_step_end, ") was taken as ", is_new ? "a repeat" : "new");
  }
  if (!is_new) return absl::OkStatus();
  const bool borrowed = contribution.final && next_micro_step_[call.chunk] == 0;
  if (contribution.in_place) ++(borrowed ? stage_.tally().borrowed : stage_.tally().in_place);
  if (contribution.in_place && !borrowed) {  // It has been read.
    memory->WriteGradient(call.chunk, std::vector<std::byte>(payload.size(), std::byte{0xff}));
  }
  next_micro_step_[call.chunk] = contribution.micro_step_end;
  payloads_[call.chunk] += !contribution.empty;
  return absl::OkStatus();
}

absl::Status EnginePlayer::EndMicroStep(const Call& call) {
  Rank& side = ranks_[call.rank];
  BALLAST_RETURN_IF_ERROR(
      side.stream->EndMicroStep(step_, call.micro_step, script_->Used(call.rank, call.micro_step)));
  side.micro_steps_ended = std::max(side.micro_steps_ended, call.micro_step + 1);
  return absl::OkStatus();
}

bool EnginePlayer::AllSealed() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& side) { return side.sealed; });
}

// The parameters of the first micro-step that the rank has not sent; "" if only the ends of
// micro-steps are missing; nullopt if nothing is.
std::optional<std::string> EnginePlayer::WhatIsMissing(int rank, uint32_t micro_steps) const {
  std::map<uint32_t, std::set<int>> missing;
  for (const int chunk : stage_.layout().chunks_of_rank(rank)) {
    if (next_micro_step_[chunk] > micro_steps) return "";
    if (next_micro_step_[chunk] == micro_steps) continue;
    for (const ChunkPiece& piece : stage_.layout().Pieces(chunk)) {
      missing[next_micro_step_[chunk]].insert(piece.parameter);
    }
  }
  if (!missing.empty()) {
    return NameOf(history_.job.parameters[*missing.begin()->second.begin()]);
  }
  if (ranks_[rank].micro_steps_ended != micro_steps) return "";
  return std::nullopt;
}

absl::Status EnginePlayer::Seal(const Call& call, uint32_t micro_steps) {
  Rank& side = ranks_[call.rank];
  std::optional<std::string> why =
      stage_.model().Refusal(*attempt_, call.rank, side.micro_steps_ended);
  hopeless_ = why.has_value();
  if (!hopeless_) why = WhatIsMissing(call.rank, micro_steps);
  side.sealed = !why.has_value();
  const bool last = AllSealed();
  if (last) why = stage_.model().Refusal(*attempt_);
  std::vector<int64_t> refusals;
  for (const Rank& other : ranks_) refusals.push_back(other.ear->refusals());

  BALLAST_ASSIGN_OR_RETURN(const std::optional<SealRefusal> refusal,
                           side.stream->Seal(step_, micro_steps));
  if (refusal.has_value() != why.has_value()) {
    return Wrong("the seal of rank ", call.rank, " with ", micro_steps,
                 " micro-steps: ", refusal.has_value() ? refusal->status.ToString() : "was taken",
                 ", expected ",
                 why.has_value() ? absl::StrCat("a refusal naming '", *why, "'") : "it to be");
  }
  if (!refusal.has_value()) {
    whole_ = last;
    return absl::OkStatus();
  }
  ++stage_.tally().refused_seals;
  if (!absl::StrContains(refusal->status.message(), *why)) {
    return Wrong("a seal was refused with '", refusal->status.message(), "', expected it to name ",
                 *why);
  }
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
  if (call.kind == CallKind::kSeal) {
    // Of a rank whose seal was undone it would be a new one.
    return side.sealed ? Seal(call, attempt_->micro_steps) : absl::OkStatus();
  }
  return Make(call);
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
