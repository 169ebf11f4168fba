// The second round of a step with rules of two rounds (common/rule.h), after the commit of the first.
//
// The first commit's flip keeps what the round needs: the directions, and what they are for. So
// gradients are free, and a later process begins the round again. Its decision is one flip more: from
// there on O counts, and the round only rolls forward.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/steady_time.h"
#include "cpu_optimizer_service/host/kept_record.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"
#include "cpu_optimizer_service/job/update/second_round.h"

namespace ballast {

void JobImpl::BeginSecondRound() {
  const int ranks = members_.table.size();
  second_round_ = {
      .update = std::make_shared<const StepUpdate>(SecondUpdateOf(*core_.record.directions)),
      .streams = {},
      .told = std::vector<bool>(ranks, false),
      .first_given = std::nullopt};
  for (int rank = 0; rank < ranks; ++rank) {
    second_round_->streams.push_back(members_.table[rank].stream);
  }
  if (spec().newton_schulz == Orthogonalizer::kService || core_.record.directions->is_by_service) {
    return Orthogonalize();
  }
  core_.gate.AwaitDirections();
  orthogonal_.Begin(MatricesOf(core_.layout, *second_round_->update));
  Listeners listeners = members_.table.ByRank();
  for (int rank = 0; rank < ranks; ++rank) second_round_->told[rank] = listeners[rank] != nullptr;
  core_.RunAfter(
      [this, self = Self(), listeners = std::move(listeners), update = second_round_->update] {
        for (const auto& listener : listeners) {
          if (listener != nullptr) listener->OnDirections(update->step);
        }
        const JobCore::Section section(core_);
        if (!second_round_.has_value() || second_round_->update != update)
          return;  // Undone, loaded.
        second_round_->is_told = true;
        GoOnIfGiven();
      });
}

void JobImpl::Orthogonalize() {
  core_.RunAfter([this, self = Self(), update = second_round_->update, bounds = core_.bounds] {
    executor_.Orthogonalize(update,
                            [this, self, update, bounds](const std::vector<double>& largest) {
                              DecideSecondRound(*update, bounds, largest);
                            });
  });
}

// ---------------------------------------------------------------- what ranks give

absl::Status JobImpl::CheckIsAtStep(uint64_t step) const {
  BALLAST_RETURN_IF_ERROR(core_.CheckUsable());
  if (step == core_.record.committed_step) return absl::OkStatus();
  return WithReason(absl::FailedPreconditionError(absl::StrCat("job ", spec().name, " is at step ",
                                                               core_.record.committed_step,
                                                               ", and not in a round of ", step)),
                    reason::kOtherStep);
}

absl::Status JobImpl::CheckOwnChunk(int rank, int64_t chunk, std::optional<int64_t> bytes) const {
  const absl::Span<const Chunk> chunks = core_.layout.chunks();
  if (chunk < 0 || chunk >= static_cast<int64_t>(chunks.size()) || chunks[chunk].rank != rank ||
      !executor_.HasTwoRounds(static_cast<int>(chunk))) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", chunk, " of job ", spec().name,
                                                   " is no chunk of rank ", rank,
                                                   " whose rule has directions"));
  }
  const int64_t expected = chunks[chunk].elements * SizeBytes(DType::kBFloat16);
  if (bytes.value_or(expected) == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("chunk ", chunk, " from rank ", rank, " has ",
                                                 *bytes, " bytes, expected ", expected, ": ",
                                                 chunks[chunk].elements, " elements of bf16"));
}

absl::Status JobImpl::CheckHasDirections(uint64_t step, int chunk) const {
  BALLAST_RETURN_IF_ERROR(CheckIsAtStep(step));
  if (core_.gate.phase() == Phase::kDirections && executor_.HasTwoRounds(chunk)) {
    return absl::OkStatus();
  }
  return WithReason(absl::FailedPreconditionError(
                        absl::StrCat("no rank is to orthogonalize directions of chunk ", chunk,
                                     " in step ", step, " of job ", spec().name)),
                    reason::kOtherStep);
}

absl::Status JobImpl::ReadDirections(uint64_t step, int chunk, absl::Span<std::byte> out) {
  {
    const JobCore::Lock lock(core_);
    BALLAST_RETURN_IF_ERROR(CheckHasDirections(step, chunk));
    core_.gate.StartReading();  // The next decision waits.
  }
  std::memcpy(out.data(), memory_.directions->direction(chunk).data(), out.size());
  core_.traffic.CountWeights(static_cast<int64_t>(out.size()), /*in_place=*/false);
  core_.StopReading();
  return absl::OkStatus();
}

absl::StatusOr<bool> JobImpl::ShareDirections(uint64_t step, int chunk,
                                              const std::string& process_id) {
  const int rank = core_.layout.chunks()[chunk].rank;
  std::shared_ptr<const RankMemory> memory;
  {
    const JobCore::Lock lock(core_);
    BALLAST_RETURN_IF_ERROR(CheckHasDirections(step, chunk));
    if (members_.table.IsHeldBy(rank, process_id)) memory = members_.table[rank].WeightsMemory();
    if (memory == nullptr) return false;
    // The round's weights go to the same place: its end waits.
    orthogonal_.BeginSharing();
  }
  const absl::Span<const uint16_t> direction = memory_.directions->direction(chunk);
  const auto bytes = static_cast<int64_t>(direction.size() * sizeof(uint16_t));
  std::memcpy(memory->weights(chunk).data(), direction.data(), bytes);
  core_.traffic.CountWeights(bytes, /*in_place=*/true);
  const JobCore::Section section(core_);
  orthogonal_.EndSharing();
  GoOnIfGiven();
  return true;
}

absl::StatusOr<std::vector<HyperParameters>> JobImpl::ValuesOfDirections(uint64_t step) {
  const JobCore::Lock lock(core_);
  BALLAST_RETURN_IF_ERROR(CheckIsAtStep(step));
  if (core_.gate.phase() == Phase::kDirections) return second_round_->update->hyper_parameters;
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat("no rank is to orthogonalize directions in step ",
                                                 step, " of job ", spec().name)),
      reason::kOtherStep);
}

absl::Status JobImpl::GiveOrthogonal(const RankHolder& holder, uint64_t step, int64_t index,
                                     absl::Span<const absl::Span<const std::byte>> payload) {
  int64_t bytes = 0;
  for (const auto& piece : payload) bytes += static_cast<int64_t>(piece.size());
  const bool in_place = payload.empty();
  BALLAST_RETURN_IF_ERROR(
      CheckOwnChunk(holder.rank, index, in_place ? std::nullopt : std::optional(bytes)));
  const int chunk = static_cast<int>(index);
  std::shared_ptr<const RankMemory> memory;
  {
    const JobCore::Lock lock(core_);
    BALLAST_RETURN_IF_ERROR(CheckIsAtStep(step));
    BALLAST_RETURN_IF_ERROR(members_.CheckGeneration(holder.generation));
    BALLAST_RETURN_IF_ERROR(members_.CheckHolder(holder.rank, holder.process_id));
    if (in_place) memory = members_.table[holder.rank].memory;
    if (in_place && memory == nullptr) {
      return absl::UnavailableError(absl::StrCat("what rank ", holder.rank,
                                                 " has orthogonalized is declared to be in shared "
                                                 "memory, but job ",
                                                 spec().name, " shares none with that rank"));
    }
    // In another phase it is there already.
    const bool is_awaited =
        core_.gate.phase() == Phase::kDirections && !core_.record.directions->is_by_service;
    const auto wants =
        is_awaited ? orthogonal_.BeginWriting(chunk) : OrthogonalParts::Wants::kRepeat;
    if (wants == OrthogonalParts::Wants::kBusy) {
      return absl::UnavailableError(
          absl::StrCat("another call is giving chunk ", chunk, " of job ", spec().name));
    }
    if (wants != OrthogonalParts::Wants::kIt) return absl::OkStatus();
  }
  const absl::Span<uint16_t> orthogonal = memory_.directions->orthogonal(chunk);
  auto* to = reinterpret_cast<std::byte*>(orthogonal.data());
  const size_t size_bytes = orthogonal.size() * sizeof(uint16_t);
  if (in_place) std::memcpy(to, memory->gradient(chunk).data(), size_bytes);
  for (const auto& piece : payload) to = std::copy(piece.begin(), piece.end(), to);
  core_.traffic.CountGradient(static_cast<int64_t>(size_bytes), in_place);
  std::vector<OrthogonalParts::Largest> largest;
  core_.layout.VisitParts(chunk, [&](const ChunkPart& part) {
    largest.push_back(
        {part.parameter, LargestOf(orthogonal.subspan(part.chunk_offset, part.elements))});
    return true;
  });
  const JobCore::Section section(core_);
  const bool counts = core_.gate.phase() == Phase::kDirections &&
                      step == core_.record.committed_step &&
                      holder.generation == core_.record.generation;
  orthogonal_.EndWriting(chunk, counts, largest);
  if (counts && !second_round_->first_given.has_value() && !orthogonal_.Awaits(holder.rank)) {
    second_round_->first_given = std::chrono::steady_clock::now();
  }
  GoOnIfGiven();
  return counts ? absl::OkStatus() : members_.CheckGeneration(holder.generation);
}

void JobImpl::GoOnIfGiven() {
  if (core_.gate.phase() != Phase::kDirections || !second_round_->is_told) return;
  const SecondRoundNow& now = *second_round_;
  if (orthogonal_.are_being_shared()) return;
  if (core_.record.directions->is_by_service) {
    if (orthogonal_.are_being_written()) return;
    core_.gate.EndDirections();
    return Orthogonalize();
  }
  if (!orthogonal_.all_given()) return;
  core_.gate.EndDirections();
  executor_.StartTask(
      [this, self = Self(), update = now.update, bounds = core_.bounds,
       largest = orthogonal_.largest()] { DecideSecondRound(*update, bounds, largest); });
}

void JobImpl::StopAwaitingOrthogonal(const std::string& why) {
  core_.record.directions->is_by_service = true;
  journal_.Keep();
  core_.Tell(absl::StrCat("step ", core_.record.committed_step, ": ", why,
                          ", so the service orthogonalizes its directions"));
  GoOnIfGiven();
}

void JobImpl::OrthogonalizeIfAbandoned() {
  const JobCore::Section section(core_);
  if (core_.gate.phase() != Phase::kDirections || UseNow().streams > 0) return;
  if (!core_.record.directions->is_by_service) StopAwaitingOrthogonal("no rank is there");
}

void JobImpl::ForgetOrthogonal() {
  if (!second_round_.has_value()) return;
  if (core_.record.directions.has_value()) {
    orthogonal_.Forget();
    second_round_->told.assign(second_round_->told.size(), false);
    second_round_->first_given.reset();
  } else {
    orthogonal_.End();
    second_round_.reset();
  }
}

absl::Status JobImpl::CheckNoSecondRound(int rank, absl::string_view does, uint64_t step) const {
  if (!core_.record.directions.has_value()) return absl::OkStatus();
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat(
          "rank ", rank, " ", does, " step ", step, ", but step ", core_.record.committed_step,
          " of job ", spec().name,
          " is not over: its ranks have to orthogonalize the directions that it gave them")),
      reason::kOtherStep);
}

std::optional<double> JobImpl::SecondsSinceFirstGiven() const {
  if (!second_round_.has_value() || !second_round_->first_given.has_value()) return std::nullopt;
  return SecondsSince(*second_round_->first_given);
}

// ---------------------------------------------------------------- its decision

void JobImpl::DecideSecondRound(const StepUpdate& update, const std::vector<StateBounds>& bounds,
                                const std::vector<double>& largest) {
  const SecondRound round = executor_.DecideSecond(update, bounds, largest);
  const JobCore::Section section(core_);
  KeptDirections& directions = *core_.record.directions;
  directions.second = round.decision;
  std::string& left = directions.record.outcome.left;
  left = WhatWasLeft(spec().layout, round.decision);
  core_.bounds = round.bounds;
  journal_.Keep();
  if (!left.empty()) core_.Tell(absl::StrCat("step ", directions.record.outcome.step, ": ", left));
  const auto plan = std::make_shared<UpdatePlan>(
      executor_.MakeSecondPlan(SecondUpdateOf(directions), second_round_->streams));
  core_.RunAfter([this, self = Self(), plan] {
    executor_.CarryOutSecond(plan, [this, self, plan] {
      plan->weights_in_place.clear();  // Without the lock: the last reference unmaps the memory.
      const JobCore::Section section(core_);
      StepRecord& record = core_.record.directions->record;
      // A process that took the step over does not know when it was decided.
      const bool is_known = clock_.decided != StepClock::Time();
      if (is_known) record.times.updating = SecondsSince(clock_.decided);
      const double seconds = record.times.updating;
      std::string left = record.outcome.left;
      RecordSecondRound();
      EndStep(std::move(plan->listeners), plan->update.step, seconds, std::move(left));
    });
  });
}

void JobImpl::RecordSecondRound() {
  KeptDirections directions = *std::exchange(core_.record.directions, std::nullopt);
  AddToHistory(std::move(directions.record), directions.coverage_complete);
  ForgetOrthogonal();
  core_.Move();
  journal_.Keep();
}

// ---------------------------------------------------------------- after a death

absl::Status JobImpl::TakeOverSecondRound(std::string& story) {
  const uint64_t step = core_.record.committed_step;
  if (core_.record.directions->record.outcome.step != step || memory_.directions == nullptr) {
    return absl::DataLossError("its second round is not of its last step");
  }
  BALLAST_RETURN_IF_ERROR(CheckUpdateLanes(step));
  journal_.kept()->sum_lanes().FreeLeft();
  core_.gate.ResumeUpdating();
  if (!core_.record.directions->second.has_value()) {
    journal_.kept()->update_lanes().FreeLeft();
    absl::StrAppend(&story, "; the second round of step ", step, " begins again");
    return absl::OkStatus();
  }
  RollForward(SecondUpdateOf(*core_.record.directions), Round::kSecond);
  Stored("all is rolled forward");
  RecordSecondRound();
  core_.gate.Commit();
  absl::StrAppend(&story, "; the second round of step ", step, " has been carried out to its end");
  return absl::OkStatus();
}

}  // namespace ballast
