// What of a job outlives this process (kept_job.h), and taking over what an earlier one left.
//
// Nobody else knows the job while it is taken over, so nothing here waits for a turn.
#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/rank_memory_layout.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/checked_word.h"
#include "cpu_optimizer_service/common/system/ordered_stores.h"
#include "cpu_optimizer_service/job/job_impl.h"

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

// Whether a lane's word is one of a chunk that the job has.
// Asked before a word is used as an index: a wrong one would have elements copied to anywhere.
template <typename Word>
bool Fits(const Word& word, const Layout& layout, int64_t most_of_a_turn) {
  return word.chunk < layout.chunks().size() && word.done <= layout.chunks()[word.chunk].elements &&
         word.count <= std::min(word.done, most_of_a_turn);
}

absl::Status NotAsStored(const std::string& what_it_is) {
  return absl::DataLossError(absl::StrCat(what_it_is, " is not as it was stored"));
}

}  // namespace

// ---------------------------------------------------------------- keeping

absl::Status JobImpl::AllocateKept() {
  if (environment_.named_memory == nullptr) return absl::OkStatus();
  if (kept_ != nullptr && kept_->taken_over()) {
    // As it was made, whatever there would be room for now.
    if (!kept_->arenas().Has("second versions")) need_.speculation_bytes = 0;
  } else {
    kept_ = std::make_unique<KeptJob>(*environment_.named_memory, identity_);
  }
  // A loop's bodies run on all threads, and on that of its caller.
  return kept_->Allocate(static_cast<int64_t>(layout_.chunks().size()),
                         2 * environment_.tasks->threads() + 2);
}

void JobImpl::Keep() {
  ++changes_;
  if (kept_ == nullptr) return;
  std::vector<KeptJob::Rank> ranks(ranks_.size());
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    const RankEntry& entry = ranks_[rank];
    // A rank's process may have let go of its memory, in which the step in progress still reads
    // gradients. Then a later process must find the lender.
    const auto& memory = entry.lender != nullptr ? entry.lender : entry.memory;
    ranks[rank] = {.last_process_id = entry.last_process_id,
                   .memory = memory == nullptr ? std::string() : std::string(memory->kept_name())};
  }
  if (absl::Status stored = kept_->Store(record_, first_weights_.complete(), ranks); !stored.ok()) {
    StopKeeping(stored);
  }
}

// Better than what the job was some time ago.
// A record that stays behind would have a later process go on from an older step, over chunks that
// are at a newer one.
void JobImpl::StopKeeping(const absl::Status& why) {
  kept_->GiveUp();
  if (!environment_.warn) return;
  RunAfter([warn = environment_.warn,
            line = absl::StrCat("job ", spec().name,
                                " would be lost with the service's process from now on: ",
                                why.message(), "; save it")] { warn(line); });
}

void JobImpl::KeepDecision(const UpdatePlan& plan, uint32_t attempt) {
  if (kept_ == nullptr) return;
  record_.decision = KeptDecision{.outcome = plan.outcome,
                                  .terms = plan.terms,
                                  .vote = plan.vote,
                                  .attempt = attempt,
                                  .micro_steps = plan.micro_steps,
                                  .coverage_complete = plan.coverage_complete,
                                  .hyper_parameters = plan.update.hyper_parameters,
                                  .update_counts = plan.update.update_counts,
                                  .speculation = plan.speculation.counts};
  Keep();
}

void JobImpl::KeepWord(const KeptWord& word) {
  if (kept_ == nullptr) return;
  if (absl::Status said = kept_->Say(record_.epoch, word); !said.ok()) StopKeeping(said);
}

void JobImpl::KeepContribution(const Contribution& given, uint64_t epoch) {
  if (kept_ == nullptr) return;
  kept_->StoreContribution(given.chunk, {.epoch = epoch,
                                         .attempt = given.attempt,
                                         .next_micro_step = given.micro_step_end,
                                         .closed = given.final,
                                         .kept = gradients_->kept(static_cast<int>(given.chunk))});
}

void JobImpl::KeepLost(const Contribution& given, uint64_t epoch) {
  kept_->StoreContribution(given.chunk, {.epoch = epoch,
                                         .attempt = given.attempt,
                                         .next_micro_step = given.micro_step_begin,
                                         .kept = GradientStore::Kept::kLost});
  // The word, then the first change of the sum.
  KeepOrderOfStores();
}

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
    job->kept_ = std::move(kept);
    // Memory that is missing would otherwise be made anew, and its zeros taken for the job's state.
    job->kept_->arenas().MustBeLeft(true);
    BALLAST_RETURN_IF_ERROR(job->Allocate());
    job->kept_->arenas().MustBeLeft(false);
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
    MutexLock lock(mutex_);
    record_ = kept_->TakeRecord();
    const std::vector<KeptJob::Rank> ranks = kept_->TakeRanks();
    if (record_.hyper_parameters.size() != spec().groups.size() ||
        record_.update_counts.size() != spec().layout.parameters.size() ||
        record_.later_changes.size() != spec().groups.size() ||
        ranks.size() != static_cast<size_t>(ranks_.size())) {
      return absl::DataLossError("its record is not of its description");
    }
    for (const StepRecord& step : record_.history.recent_steps) history_.AddEarlier(step);
    // Ranks that come back may not have been told yet that the step was skipped.
    if (const auto& steps = record_.history.recent_steps;
        !steps.empty() && steps.back().outcome.step == record_.committed_step &&
        steps.back().outcome.skip_cause == SkipCause::kNotKept) {
      given_up_step_ = record_.committed_step;
    }
    TakeOverSaves();
    if (kept_->weights_complete()) first_weights_.CompleteAll();
    for (int chunk = 0; chunk < static_cast<int>(layout_.chunks().size()); ++chunk) {
      if (store_->arrived(chunk)) first_weights_.Arrive(chunk);
    }
    if (!first_weights_.complete()) first_weights_.BeginOtherState();  // There may have been one.
    story = absl::StrCat("job ", spec().name, " is back at step ", record_.committed_step);
    if (!first_weights_.complete()) absl::StrAppend(&story, ", and awaits first weights");
    TakeOverRanks(ranks, story);
    loading = record_.loading;
    // Of a step that the load had given up.
    if (loading.has_value() || !record_.torn_by.empty()) kept_->FreeLeftSumLanes();
    if (loading.has_value()) {
      gate_.StartLoading();
      absl::StrAppend(&story, ", and loads ", loading->path, " again");
    } else if (!record_.torn_by.empty()) {
      // The gate gets into this state only by its own moves.
      gate_.StartLoading();
      gate_.FinishLoading(/*torn=*/true);
      absl::StrAppend(&story, ", torn: loading ", record_.torn_by, " did not end");
    } else if (record_.decision.has_value()) {
      BALLAST_RETURN_IF_ERROR(CheckStepsInTable());
      BALLAST_RETURN_IF_ERROR(RollForward(*std::exchange(record_.decision, std::nullopt)));
      absl::StrAppend(&story, "; its step ", record_.committed_step,
                      " was decided, and has been carried out to its end");
    } else {
      if (kept_->weights_complete()) BALLAST_RETURN_IF_ERROR(CheckStepsInTable());
      // A step that was given up, or undone, may be so in the record alone.
      // SwitchBack first: it sees by their steps which chunks have not gone back, and after SetStep
      // all steps are the same.
      if (record_.undid_update) store_->SwitchBack(record_.committed_step);
      store_->SetStep(record_.committed_step);
      BALLAST_RETURN_IF_ERROR(TakeOverWrite(story));
      TakeOverStep(story);
    }
  }
  // Without the lock, on a thread that may wait for the disk. The gate says meanwhile that the job
  // is loading.
  if (loading.has_value()) {
    const LoadRequest request = {.path = loading->path, .weights_only = loading->weights_only};
    // From now on, before anybody can have it deleted.
    const auto use = environment_.checkpoint_uses->Read(request.path);
    environment_.disk_threads->Run(
        [self = Self(), request, use] { self->Guarded([&] { self->LoadAgain(request); }); });
  }
  return absl::OkStatus();
}

// A step that is being carried out, given up or undone may be one ahead or behind in the table.
absl::Status JobImpl::CheckStepsInTable() const {
  for (int chunk = 0; chunk < static_cast<int>(layout_.chunks().size()); ++chunk) {
    const uint64_t step = store_->step(chunk);
    if (step <= record_.committed_step + 1 && step + 1 >= record_.committed_step) continue;
    return absl::DataLossError(absl::StrCat(kept_->arenas().WhatIs("table"), " has chunk ", chunk,
                                            " at step ", step, ", and the job's record is of step ",
                                            record_.committed_step));
  }
  return absl::OkStatus();
}

// A rank whose process comes back finds its memory as it was; other memory goes.
void JobImpl::TakeOverRanks(const std::vector<KeptJob::Rank>& left, std::string& story) {
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    const KeptJob::Rank& kept = left[rank];
    std::shared_ptr<const RankMemory> memory;
    if (!kept.memory.empty()) {
      // The name may be there without the memory: its process has let go of it, or all of the
      // service's processes have ended where a directory keeps the rest (NamedMemory::KeepsShared).
      auto arena = environment_.named_memory->Open(kept.memory);
      RankMemoryLayout places(layout_, spec().groups, rank);
      if (arena.ok() && (*arena)->size_bytes() >= places.size_bytes()) {
        memory = std::make_shared<KeptRankMemory>(*std::move(arena), std::move(places),
                                                  environment_.budget->Take(RankMemoryBytes(rank)));
      } else {
        absl::StrAppend(&story, ", without the memory that rank ", rank, " shared");
      }
    }
    ranks_.Restore(rank, kept.last_process_id, std::move(memory), RankMemoryBytes(rank));
  }
  // Memory that is not in the record: the process died before it stored that, or the rank has had
  // other memory since.
  for (const std::string& label : kept_->arenas().Left("rank ")) {
    environment_.named_memory->Forget(kept_->arenas().NameOf(label));
  }
}

void JobImpl::LoadAgain(const LoadRequest& request) {
  const auto began = std::chrono::steady_clock::now();
  absl::StatusOr<OpenedCheckpoint> opened = OrOutOfMemory([&] { return OpenToLoad(request); });
  const absl::Status status = opened.ok() ? CheckLoadable(opened->checkpoint) : opened.status();
  const auto tell = [warn = environment_.warn, name = spec().name,
                     path = request.path](const absl::Status& ended) {
    if (ended.ok() || !warn) return;
    warn(
        absl::StrCat("job ", name, " is torn: loading ", path, " again failed: ", ended.message()));
  };
  if (status.ok()) {
    return ReplaceState(*opened, began,
                        [tell](absl::StatusOr<CheckpointInfo> done) { tell(done.status()); });
  }
  {
    Section section(*this);
    // The earlier process may have replaced a part of the state already.
    gate_.FinishLoading(/*torn=*/true);
    record_.torn_by = request.path;
    record_.loading.reset();
    Keep();
  }
  tell(status);
}

// ---------------------------------------------------------------- a decided step

absl::Status JobImpl::RollForward(const KeptDecision& decision) {
  const uint64_t step = decision.terms.step;
  if (step != record_.committed_step + 1) {
    return absl::DataLossError(absl::StrCat("its decision is of step ", step,
                                            ", but it stands at step ", record_.committed_step));
  }
  if (decision.outcome.decision.apply) {
    const StepUpdate update = {.step = step,
                               .hyper_parameters = decision.hyper_parameters,
                               .multipliers = decision.outcome.decision.multipliers,
                               .update_counts = decision.update_counts};
    // Chunks with a lane are half new. Two lanes of one chunk cannot be: each chunk is updated
    // once.
    std::map<int, RedoLane*> lanes;
    BALLAST_ASSIGN_OR_RETURN(const std::vector<RedoLane*> in_use, kept_->LanesInUse(step));
    for (RedoLane* lane : in_use) {
      const RedoWord word = RedoWord::Unpack(lane->word);
      if (!Fits(word, layout_, kRedoTurnElements) ||
          !lanes.emplace(static_cast<int>(word.chunk), lane).second) {
        return NotAsStored(kept_->arenas().WhatIs("redo"));
      }
    }
    // Behind all that refuses the job without it, because it frees lanes.
    BALLAST_RETURN_IF_ERROR(
        RestoreContributions(std::vector<uint32_t>(ranks_.size(), decision.attempt)));
    // The gradients are all there, and the update depends on nothing else, so the bits are those of
    // the process that died.
    environment_.tasks->ForEach(static_cast<int64_t>(layout_.chunks().size()), [&](int64_t chunk) {
      const auto found = lanes.find(static_cast<int>(chunk));
      RollForwardChunk(update, static_cast<int>(chunk),
                       found == lanes.end() ? nullptr : found->second);
    });
    gradients_->ClearAll();
    ledger_.Clear();
  } else {
    store_->SetStep(step);
  }
  Stored("all is rolled forward");
  RecordStep(decision, /*times=*/{});
  (void)ranks_.TakeLenders();
  return absl::OkStatus();
}

// May itself be cut off by a death, and be done again by the next process.
void JobImpl::RollForwardChunk(const StepUpdate& update, int index, RedoLane* lane) {
  if (store_->step(index) == update.step) {
    // Its word is stored, so the update is whole: the process died before it gave back the lane.
    if (lane != nullptr) kept_->GiveLane(lane);
    return;
  }
  // A chunk with a lane is half new where it lies.
  auto write = store_->BeginWrite(
      index, lane != nullptr ? Destination::kInPlace : Destination::kInPlaceIfFree);
  Check(write.ok(), "nothing is pinned while a job is taken over");
  if (lane == nullptr && write->in_place) lane = kept_->TakeLane(index, update.step);
  ChunkUpdate chunk = UpdateOf(update, index, write->from);
  chunk.to = write->to;
  chunk.redo = lane;
  if (lane != nullptr) {
    const RedoWord word = RedoWord::Unpack(lane->word);
    // The turn that the word names is whole in the lane, and may be there in part in the planes, so
    // it is copied once more. A lane that was just taken names a turn of no elements.
    const RedoTurn& turn = lane->turns[word.turn];
    for (int plane = 0; plane < kMaxPlanes; ++plane) {
      float* const to = chunk.to.planes[plane];
      if (to == nullptr) continue;
      std::copy_n(turn.planes[plane], word.count, to + (word.done - word.count));
    }
    chunk.done = word.done;
  }
  UpdateChunk(chunk, [&](int parameter) { return update.update_counts[parameter]; });
  store_->Publish(*write, update.step);
  if (lane != nullptr) kept_->GiveLane(lane);
}

// ---------------------------------------------------------------- an undecided step

void JobImpl::TakeOverStep(std::string& story) {
  absl::Status status;
  const absl::Status read =
      kept_->ReadLog(record_.epoch, [&](KeptWord word) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        if (status.ok()) status = Replay(word);
      });
  if (status.ok()) status = read;
  // Seals and votes are not in the log: ranks that come back say them again.
  auto* open = std::get_if<OpenStep>(&step_);
  if (status.ok() && open == nullptr) {
    const absl::StatusOr<bool> has_any = kept_->HasContributions(record_.epoch);
    if (has_any.ok() && !*has_any) return kept_->FreeLeftSumLanes();
    // Each rank that gave one had begun, and said so first.
    status = has_any.ok()
                 ? absl::DataLossError(absl::StrCat(kept_->arenas().WhatIs("log"),
                                                    " is missing, or not as it was stored"))
                 : has_any.status();
  }
  if (status.ok()) {
    std::vector<uint32_t> attempts;
    for (const RankInStep& rank : open->ranks()) attempts.push_back(rank.attempt);
    status = RestoreContributions(attempts);
  }
  const uint64_t step = record_.committed_step + 1;
  if (status.ok()) {
    open->SetTakenOver();
    absl::StrAppend(&story, ", with all that its step ", step, " had been given");
    return;
  }
  // What cannot be kept whole is skipped, or done again by its ranks: as GiveUpStep has it.
  std::optional<KeptDecision> skip;
  if (MaySkipStep()) skip = SkipOf(*open, status.message());
  kept_->FreeLeftSumLanes();
  absl::StrAppend(&story, "; its step ", step, skip.has_value() ? " is skipped: " : "",
                  skip.has_value() ? "" : " is done again by its ranks: ", status.message());
  gradients_->ClearAll();
  ledger_.Clear();
  if (open != nullptr) {
    // Replaying the log has opened the step in the gate, too.
    gate_.StartClearing();
    gate_.FinishClearing();
  }
  step_ = std::monostate();
  (void)ranks_.TakeLenders();
  if (skip.has_value()) {
    RecordStep(*std::move(skip), /*times=*/{});
    given_up_step_ = step;
    kept_->ClearLedger();
    return store_->SetStep(step);
  }
  for (int rank = 0; rank < ranks_.size(); ++rank) ForgetUploads(rank);
  (void)ranks_.FreeAll();
  record_.later_changes.assign(record_.later_changes.size(), {});
  record_.generation = record_.generation.Next();
  ++record_.epoch;
  Keep();
  kept_->ClearLedger();  // Of the epoch before.
}

absl::Status JobImpl::Replay(const KeptWord& word) {
  if (word.step != record_.committed_step + 1 || word.rank < 0 || word.rank >= ranks_.size()) {
    return absl::DataLossError(absl::StrCat("what rank ", word.rank, " said of step ", word.step,
                                            " is not of the step in progress"));
  }
  // Until another attempt begins nothing is computed ahead of the decision: `speculation_` has not
  // begun this one.
  if (std::holds_alternative<std::monostate>(step_)) {
    gate_.BeginStep();
    step_ = OpenStep(word.step, layout_.world_size(),
                     static_cast<int64_t>(spec().layout.parameters.size()));
  }
  OpenStep& open = std::get<OpenStep>(step_);
  switch (word.kind) {
    case KeptWord::Kind::kBegin:
      if (word.terms.has_value()) open.SetTerms(*word.terms);
      return open.Begin(word.rank, word.terms.has_value() ? word.terms->settings : word.settings);
    case KeptWord::Kind::kEndMicroStep:
      return open.EndMicroStep(word.rank, word.micro_step, word.used);
    case KeptWord::Kind::kEmpty:
      open.RecordEmpty(word.chunk, word.begin, word.end);
      return absl::OkStatus();
    case KeptWord::Kind::kDiscard:
      (void)open.Discard(word.rank, layout_.chunks_of_rank(word.rank));
      return absl::OkStatus();
  }
  return absl::DataLossError("a word of the log is of no kind");
}

absl::Status JobImpl::RestoreContributions(const std::vector<uint32_t>& attempts) {
  for (int chunk = 0; chunk < static_cast<int>(layout_.chunks().size()); ++chunk) {
    const int rank = layout_.chunks()[chunk].rank;
    BALLAST_ASSIGN_OR_RETURN(const KeptJob::Contribution found,
                             kept_->ReadContribution(chunk, record_.epoch, attempts[rank]));
    // Nothing of this epoch and attempt: the chunk has no gradient yet, or its rank has discarded
    // it.
    if (found.next_micro_step == 0) continue;
    const std::byte* borrowed = nullptr;
    if (found.kept == GradientStore::Kept::kBorrowed && ranks_[rank].memory != nullptr) {
      borrowed = ranks_[rank].memory->gradient(chunk).data();
      ranks_.Lend(rank);
    }
    BALLAST_RETURN_IF_ERROR(gradients_->Restore(chunk, found.kept, borrowed));
    ledger_.Advance(chunk, found.next_micro_step, found.closed);
  }
  // First all words are checked, then one is used as an index.
  bool all_fit = true;
  kept_->LookAtSumLanes([&](const SumLane& lane) {
    all_fit = all_fit && ValueOf(lane.word).has_value() && ValueOf(lane.tag).has_value() &&
              Fits(SumWord::Unpack(lane.word), layout_, kSumTurnElements);
    return true;
  });
  if (!all_fit) return NotAsStored(kept_->arenas().WhatIs("sums"));
  kept_->LookAtSumLanes([&](const SumLane& lane) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const int chunk = static_cast<int>(SumWord::Unpack(lane.word).chunk);
    const uint32_t attempt = attempts[layout_.chunks()[chunk].rank];
    const uint64_t next =
        kCheckedValueMask & KeptJob::TagOf(record_.epoch, attempt, ledger_.next_micro_step(chunk));
    const uint64_t tag = kCheckedValueMask & lane.tag;
    // Of this attempt, and behind what the ledger has: a tag's last bits are its micro-steps.
    const bool is_current = (tag ^ next) >> KeptJob::kMicroStepBits == 0;
    // A tag that is not above is of a contribution that the ledger has: the process died before it
    // gave back the lane. Such a lane is freed.
    if (!is_current || tag <= next || !gradients_->changes_sum(chunk)) return false;
    gradients_->Resume(lane);
    return true;
  });
  return absl::OkStatus();
}

}  // namespace ballast
