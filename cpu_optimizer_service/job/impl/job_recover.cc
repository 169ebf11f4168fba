// Taking over what an earlier process left of a job (kept_job.h).
//
// Nobody else knows the job while it is taken over, so nothing here waits for a turn.
#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/rank_memory_layout.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/checked_word.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"
#include "cpu_optimizer_service/job/update/second_round.h"
#include "cpu_optimizer_service/kernels/packed_turn.h"

namespace ballast {

// Memory shared with a rank of whose process nothing has been heard yet.
class JobImpl::KeptRankMemory final : public RankMemory {
 public:
  KeptRankMemory(std::unique_ptr<NamedArena> arena, RankMemoryLayout places,
                 MemoryBudget::Reservation reservation)
      : reservation_(std::move(reservation)),
        arena_(std::move(arena)),
        places_(std::move(places)) {}

  absl::Span<const std::byte> gradient(int chunk) const override {
    return At(places_.gradient(chunk));
  }
  absl::Span<std::byte> weights(int chunk) const override { return At(places_.weights(chunk)); }
  absl::string_view kept_name() const override { return arena_->name(); }

 private:
  absl::Span<std::byte> At(const RankMemoryLayout::Place& place) const {
    if (place.offset_bytes < 0) return {};
    return {arena_->data() + place.offset_bytes, static_cast<size_t>(place.bytes)};
  }

  const MemoryBudget::Reservation reservation_;
  const std::unique_ptr<NamedArena> arena_;
  const RankMemoryLayout places_;
};

namespace {

// Whether a lane is as it was stored, and of a chunk that the job has.
// Asked of all lanes before a word is used as an index: a wrong one would have elements copied to
// anywhere.
bool Fits(const RedoLane& lane, const Layout& layout,
          absl::FunctionRef<int64_t(const Chunk&)> most_of_a_turn) {
  const RedoWord word = RedoWord::Unpack(lane.word);
  if (!RedoWord::IsWhole(lane.word) || !ValueOf(lane.tag).has_value() ||
      word.chunk >= layout.chunks().size()) {
    return false;
  }
  const Chunk& chunk = layout.chunks()[word.chunk];
  return word.done <= chunk.elements && word.count <= std::min(word.done, most_of_a_turn(chunk));
}

int64_t MostOfAnUpdatesTurn(const Chunk& chunk) {
  return chunk.format == StateFormat::kFloat32
             ? kUpdateTurnElements
             : static_cast<int64_t>(PackedTurnElements(chunk.format));
}

absl::Status NotAsStored(const std::string& what_it_is) {
  return absl::DataLossError(absl::StrCat(what_it_is, " is not as it was stored"));
}

}  // namespace

// ---------------------------------------------------------------- taking over

absl::StatusOr<std::shared_ptr<JobImpl>> JobImpl::TakeOver(const std::string& uid,
                                                           const JobEnvironment& environment,
                                                           std::string& story) {
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<KeptJob> kept,
                           KeptJob::TakeOver(*environment.named_memory, uid));
  const std::string name = kept->identity().spec.name;
  // The job that it was to be derived from goes on.
  if (!kept->identity().derivation.is_from_nothing() && !kept->weights_complete()) {
    return absl::NotFoundError(
        absl::StrCat("what is kept of derived job ", name, " has not all first weights"));
  }
  const auto take_over = [&]() -> absl::StatusOr<std::shared_ptr<JobImpl>> {
    BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<JobImpl> job,
                             Describe(kept->identity(), environment, /*is_there=*/true));
    job->journal_.TakeOver(std::move(kept));
    // Memory that is missing would otherwise be made anew, and its zeros taken for the job's state.
    job->journal_.kept()->arenas().MustBeLeft(true);
    BALLAST_RETURN_IF_ERROR(job->Allocate());
    job->journal_.kept()->arenas().MustBeLeft(false);
    BALLAST_RETURN_IF_ERROR(job->TakeOverState(story));
    return job;
  };
  absl::StatusOr<std::shared_ptr<JobImpl>> job = take_over();
  if (job.ok()) return job;
  const std::string why =
      absl::StrCat("job ", name, " cannot be taken over: ", job.status().message());
  // Room for it may come.
  if (absl::IsResourceExhausted(job.status())) return absl::ResourceExhaustedError(why);
  // NOT_FOUND would mean that there was no such job.
  return absl::DataLossError(why);
}

absl::Status JobImpl::TakeOverState(std::string& story) {
  std::optional<KeptLoad> loading;
  {
    JobCore::Lock lock(core_);
    is_established_ = true;
    core_.record = journal_.kept()->TakeRecord();
    const std::vector<KeptJob::Rank> ranks = journal_.kept()->TakeRanks();
    if (!AreValuesOf(spec(), core_.record.hyper_parameters) ||
        core_.record.update_counts.size() != spec().layout.parameters.size() ||
        core_.record.later_changes.size() != spec().groups.size() ||
        ranks.size() != static_cast<size_t>(members_.table.size())) {
      return absl::DataLossError("its record is not of its description");
    }
    for (const StepRecord& step : core_.record.history.recent_steps) core_.history.AddEarlier(step);
    // Ranks that come back may not have been told yet that the step was skipped.
    if (WasLost(core_.record.committed_step)) machine_.GiveUp(core_.record.committed_step);
    saver_.TakeOver();
    if (journal_.kept()->weights_complete()) core_.first_weights.CompleteAll();
    for (int chunk = 0; chunk < static_cast<int>(core_.layout.chunks().size()); ++chunk) {
      if (memory_.store->arrived(chunk)) core_.first_weights.Arrive(chunk);
    }
    if (!core_.first_weights.complete())
      core_.first_weights.BeginOtherState();  // There may have been one.
    story = absl::StrCat("job ", spec().name, " is back at step ", core_.record.committed_step);
    if (!core_.first_weights.complete()) absl::StrAppend(&story, ", and awaits first weights");
    TakeOverRanks(ranks, story);
    loading = core_.record.loading;
    // Of a step that the load had given up.
    if (loading.has_value() || !core_.record.torn_by.empty()) journal_.kept()->FreeLeftLanes();
    if (loading.has_value()) {
      core_.gate.StartLoading();
      absl::StrAppend(&story, ", and loads ", loading->path, " again");
    } else if (!core_.record.torn_by.empty()) {
      // The gate gets into this state only by its own moves.
      core_.gate.StartLoading();
      core_.gate.FinishLoading(/*torn=*/true);
      absl::StrAppend(&story, ", torn: loading ", core_.record.torn_by, " did not end");
    } else if (core_.record.decision.has_value()) {
      BALLAST_RETURN_IF_ERROR(CheckStepsInTable());
      const uint64_t step = core_.record.decision->terms.step;
      BALLAST_RETURN_IF_ERROR(RollForward());
      absl::StrAppend(&story, "; its step ", step, " was decided, and has been carried out to ",
                      core_.record.directions.has_value() ? "its second round" : "its end");
      if (core_.record.directions.has_value()) core_.gate.ResumeUpdating();
    } else if (core_.record.directions.has_value()) {
      BALLAST_RETURN_IF_ERROR(CheckStepsInTable());
      BALLAST_RETURN_IF_ERROR(TakeOverSecondRound(story));
    } else {
      journal_.kept()->update_lanes().FreeLeft();  // Only a decided step has updates.
      if (journal_.kept()->weights_complete()) BALLAST_RETURN_IF_ERROR(CheckStepsInTable());
      // A step that was given up, or undone, may be so in the record alone.
      // SwitchBack first: it sees by their steps which chunks have not gone back, and after SetStep
      // all steps are the same.
      if (core_.record.undid_update) memory_.store->SwitchBack(core_.record.committed_step);
      memory_.store->SetStep(core_.record.committed_step);
      BALLAST_RETURN_IF_ERROR(writes_.TakeOver(story));
      BALLAST_RETURN_IF_ERROR(TakeOverStep(story));
    }
    if (!core_.record.closing.empty() || core_.record.superseded_by != 0) core_.gate.Close();
    if (!core_.record.lost_part.empty()) AskLead(core_.record.lost_part, [](absl::Status) {});
  }
  {
    // A part that was reported: its sums are computed again.
    JobCore::Section section(core_);
    if (machine_.stage() == StepMachine::Stage::kSealed) {
      core_.gate.Seal();
      clock_.SealsAre(true);
      clock_.sealed = std::chrono::steady_clock::now();
      clock_.sealed_ns = core_.trace.Begin(machine_.agreement()->step());
      AwaitDecision();
    }
    // Large matrices take long, and other jobs are not to wait for them.
    if (core_.record.directions.has_value()) {
      BeginSecondRound();
      // They may have exchanged directions already.
      if (core_.gate.phase() == Phase::kDirections)
        second_round_->told.assign(members_.table.size(), true);
    }
  }
  // Without the lock, on a thread that may wait for the disk. The gate says meanwhile that the job
  // is loading.
  if (loading.has_value()) {
    // From now on, before anybody can have it deleted.
    const auto use = core_.environment.checkpoint_uses->Read(loading->path);
    core_.environment.disk_threads->Run(
        [self = Self(), load = *loading, use] { self->loader_.LoadAgain(load); });
  }
  return absl::OkStatus();
}

// A step that is being carried out, given up or undone may be one ahead or behind in the table.
absl::Status JobImpl::CheckStepsInTable() const {
  for (int chunk = 0; chunk < static_cast<int>(core_.layout.chunks().size()); ++chunk) {
    const uint64_t step = memory_.store->step(chunk);
    if (step <= core_.record.committed_step + 1 && step + 1 >= core_.record.committed_step)
      continue;
    return absl::DataLossError(
        absl::StrCat(journal_.kept()->arenas().WhatIs("table"), " has chunk ", chunk, " at step ",
                     step, ", and the job's record is of step ", core_.record.committed_step));
  }
  return absl::OkStatus();
}

// A rank whose process comes back finds its memory as it was; other memory goes.
void JobImpl::TakeOverRanks(const std::vector<KeptJob::Rank>& left, std::string& story) {
  for (int rank = 0; rank < members_.table.size(); ++rank) {
    const KeptJob::Rank& kept = left[rank];
    std::shared_ptr<const RankMemory> memory;
    if (!kept.memory.empty()) {
      // The name may be there without the memory: its process has let go of it, or all of the
      // service's processes have ended where a directory keeps the rest (NamedMemory::KeepsShared).
      auto arena = core_.environment.named_memory->Open(kept.memory);
      RankMemoryLayout places(core_.layout, spec().groups, rank);
      if (arena.ok() && (*arena)->size_bytes() >= places.size_bytes()) {
        memory = std::make_shared<KeptRankMemory>(
            *std::move(arena), std::move(places),
            core_.environment.budget->Take(members_.MemoryBytes(rank)));
      } else {
        absl::StrAppend(&story, ", without the memory that rank ", rank, " shared");
      }
    }
    members_.table.Restore(rank, kept.last_process_id, std::move(memory),
                           members_.MemoryBytes(rank));
  }
  // Memory that is not in the record: the process died before it stored that, or the rank has had
  // other memory since.
  for (const std::string& label : journal_.kept()->arenas().Left("rank ")) {
    core_.environment.named_memory->Forget(journal_.kept()->arenas().NameOf(label));
  }
}

// ---------------------------------------------------------------- a decided step

absl::Status JobImpl::RollForward() {
  const KeptDecision& decision = *core_.record.decision;
  const uint64_t step = decision.terms.step;
  if (step != core_.record.committed_step + 1) {
    return absl::DataLossError(absl::StrCat(
        "its decision is of step ", step, ", but it stands at step ", core_.record.committed_step));
  }
  StepUpdate update = {.step = step,
                       .hyper_parameters = decision.hyper_parameters,
                       .multipliers = decision.outcome.decision.multipliers,
                       .update_counts = decision.update_counts};
  if (!decision.outcome.decision.apply) {
    memory_.store->SetStep(step);
  } else {
    BALLAST_RETURN_IF_ERROR(CheckUpdateLanes(step));
    // Behind all that refuses the job without it, because it frees lanes.
    BALLAST_RETURN_IF_ERROR(
        RestoreContributions(std::vector<uint32_t>(members_.table.size(), decision.attempt)));
    // The gradients are all there, and the update depends on nothing else, so the bits are those of
    // the process that died.
    update.has_second_round = !MatricesOf(core_.layout, update).empty();
    RollForward(update, Round::kFirst);
  }
  memory_.gradients->ClearAll();
  machine_.Clear();
  Stored("all is rolled forward");
  RecordStep(*std::exchange(core_.record.decision, std::nullopt), /*times=*/{},
             update.has_second_round);
  core_.RunAfter([lenders = members_.table.TakeLenders()] {});
  return absl::OkStatus();
}

absl::Status JobImpl::CheckUpdateLanes(uint64_t step) {
  std::set<uint32_t> in_lanes;
  const auto is_of_step = [&](const RedoLane& lane) {
    return Fits(lane, core_.layout, MostOfAnUpdatesTurn) &&
           (lane.tag == Executor::LaneTag(step, Round::kFirst) ||
            lane.tag == Executor::LaneTag(step, Round::kSecond)) &&
           in_lanes.insert(RedoWord::Unpack(lane.word).chunk).second;
  };
  if (journal_.kept()->update_lanes().AllLeft(is_of_step)) return absl::OkStatus();
  return NotAsStored(journal_.kept()->arenas().WhatIs("redo"));
}

void JobImpl::RollForward(const StepUpdate& update, Round round) {
  LanePool& lanes = journal_.kept()->update_lanes();
  const uint64_t tag = Executor::LaneTag(update.step, round);
  // Chunks with a lane first: then all lanes are free for the others.
  for (const bool with_lane : {true, false}) {
    core_.environment.tasks->ForEach(
        static_cast<int64_t>(core_.layout.chunks().size()), [&](int64_t index) {
          const int chunk = static_cast<int>(index);
          if (round == Round::kSecond && !executor_.HasTwoRounds(chunk)) return;
          if (with_lane && !lanes.HasLeft(chunk, tag)) return;
          executor_.RollForward(update, chunk, round);
          if (!with_lane && update.has_second_round && round == Round::kFirst) {
            executor_.MakeDirections(update, chunk);
          }
        });
    lanes.FreeLeft();  // Of chunks that were whole.
  }
}

// ---------------------------------------------------------------- an undecided step

absl::Status JobImpl::TakeOverStep(std::string& story) {
  absl::Status status;
  const absl::Status read = journal_.kept()->ReadLog(
      core_.record.epoch, [&](StepWord word) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
        if (status.ok()) status = Replay(word);
      });
  if (status.ok()) status = read;
  // Seals and votes are not in the log: ranks that come back say them again.
  const StepAgreement* const open = machine_.agreement();
  if (status.ok() && open == nullptr) {
    const absl::StatusOr<bool> has_any = journal_.kept()->HasContributions(core_.record.epoch);
    if (has_any.ok() && !*has_any) {
      journal_.kept()->FreeLeftLanes();
      return absl::OkStatus();
    }
    // Each rank that gave one had begun, and said so first.
    status = has_any.ok()
                 ? absl::DataLossError(absl::StrCat(journal_.kept()->arenas().WhatIs("log"),
                                                    " is missing, or not as it was stored"))
                 : has_any.status();
  }
  if (status.ok()) {
    std::vector<uint32_t> attempts;
    for (const RankInStep& rank : open->ranks()) attempts.push_back(rank.attempt);
    status = RestoreContributions(attempts);
  }
  const uint64_t step = core_.record.committed_step + 1;
  if (status.ok()) {
    machine_.SetTakenOver();
    absl::StrAppend(&story, ", with all that its step ", step, " had been given");
    auto& prepared = core_.record.prepared;
    if (prepared.has_value() && prepared->attempt == open->attempt()) {
      machine_.TakeOverReport(prepared->micro_steps, prepared->vote);
    } else {
      prepared.reset();  // Of an attempt that was discarded since.
    }
    return absl::OkStatus();
  }
  // The lead may have decided it.
  if (core_.record.prepared.has_value()) return status;
  // What cannot be kept whole is skipped, or done again by its ranks: as GiveUpStep has it.
  std::optional<KeptDecision> skip;
  if (MaySkipStep()) skip = SkipOf(status.message());
  absl::StrAppend(&story, "; its step ", step, skip.has_value() ? " is skipped: " : "",
                  skip.has_value() ? "" : " is done again by its ranks: ", status.message());
  memory_.gradients->ClearAll();
  if (open != nullptr) {
    // Replaying the log has opened the step in the gate, too.
    core_.gate.StartClearing();
    core_.gate.FinishClearing();
  }
  machine_.Drop();
  machine_.Clear();
  (void)members_.table.TakeLenders();
  if (skip.has_value()) {
    TellDecided(step);
    RecordStep(*std::move(skip), /*times=*/{});
    machine_.GiveUp(step);
    journal_.kept()->ClearLedger();
    memory_.store->SetStep(step);
    return absl::OkStatus();
  }
  for (int rank = 0; rank < members_.table.size(); ++rank) ForgetUploads(rank);
  (void)members_.table.FreeAll();
  core_.record.later_changes.assign(core_.record.later_changes.size(), {});
  if (core_.identity.is_lead()) {
    core_.record.generation = core_.record.generation.Next();
  } else {
    core_.record.lost_part =
        absl::StrCat(seats_.NameOf(core_.identity.member), " has lost its part of step ", step,
                     ": ", status.message());
  }
  ++core_.record.epoch;
  journal_.Keep();
  journal_.kept()->FreeLeftLanes();
  journal_.kept()->ClearLedger();  // Of the epoch before.
  return absl::OkStatus();
}

absl::Status JobImpl::Replay(const StepWord& word) {
  // Nothing is computed ahead of the decision until another attempt begins: the executor has not
  // begun this one. Nor is anything said again of what the log has.
  StepEffects effects;
  const absl::Status replayed = machine_.Replay(Before(), word, effects);
  if (effects.opened) {
    core_.gate.BeginStep();
    clock_ = {.opened = std::chrono::steady_clock::now()};
  }
  return replayed;
}

absl::Status JobImpl::RestoreContributions(const std::vector<uint32_t>& attempts) {
  for (int chunk = 0; chunk < static_cast<int>(core_.layout.chunks().size()); ++chunk) {
    const int rank = core_.layout.chunks()[chunk].rank;
    BALLAST_ASSIGN_OR_RETURN(
        const KeptJob::Contribution found,
        journal_.kept()->ReadContribution(chunk, core_.record.epoch, attempts[rank]));
    // Nothing of this epoch and attempt: the chunk has no gradient yet, or its rank has discarded
    // it.
    if (found.next_micro_step == 0) continue;
    const std::byte* borrowed = nullptr;
    if (found.kept == GradientStore::Kept::kBorrowed && members_.table[rank].memory != nullptr) {
      borrowed = members_.table[rank].memory->gradient(chunk).data();
      members_.table.Lend(rank);
    }
    BALLAST_RETURN_IF_ERROR(memory_.gradients->Restore(chunk, found.kept, borrowed));
    machine_.Added(chunk, found.next_micro_step, found.closed);
  }
  LanePool& lanes = journal_.kept()->sum_lanes();
  if (!lanes.AllLeft([&](const RedoLane& lane) {
        return Fits(lane, core_.layout, [](const Chunk&) { return kSumTurnElements; });
      })) {
    return NotAsStored(journal_.kept()->arenas().WhatIs("sums"));
  }
  lanes.KeepLeft([&](const RedoLane& lane) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    const RedoWord word = RedoWord::Unpack(lane.word);
    // Nothing was added. The contribution may come again with other micro-steps, in another lane.
    if (word.done == 0) return false;
    const int chunk = static_cast<int>(word.chunk);
    const uint32_t attempt = attempts[core_.layout.chunks()[chunk].rank];
    const uint64_t next =
        kCheckedValueMask &
        KeptJob::TagOf(core_.record.epoch, attempt, machine_.ledger().next_micro_step(chunk));
    const uint64_t tag = kCheckedValueMask & lane.tag;
    // Of this attempt, and behind what the ledger has: a tag's last bits are its micro-steps.
    const bool is_current = (tag ^ next) >> KeptJob::kMicroStepBits == 0;
    // A tag that is not above is of a contribution that the ledger has: the process died before it
    // gave back the lane. Such a lane is freed.
    if (!is_current || tag <= next || !memory_.gradients->changes_sum(chunk)) return false;
    memory_.gradients->Resume(lane);
    return true;
  });
  return absl::OkStatus();
}

}  // namespace ballast
