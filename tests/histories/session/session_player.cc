#include "tests/histories/session/session_player.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "tests/histories/engine/engine_transport.h"

namespace ballast::histories {

absl::Time InstantClock::Now() {
  MutexLock lock(mutex_);
  return now_;
}
void InstantClock::SleepFor(absl::Duration duration) {
  MutexLock lock(mutex_);
  now_ += duration;
}
void InstantClock::WaitFor(Mutex& mutex, CondVar& changed, absl::Duration duration) {
  SleepFor(duration);
}

void Lending::Lend() {
  MutexLock lock(mutex_);
  ++lent_;
}
void Lending::GiveBack() {
  MutexLock lock(mutex_);
  --lent_;
  changed_.NotifyAll();
}
int Lending::lent() const {
  MutexLock lock(mutex_);
  return lent_;
}
bool Lending::AwaitAllBack() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  MutexLock lock(mutex_);
  while (lent_ > 0) {
    if (!changed_.WaitUntil(mutex_, deadline)) break;
  }
  return lent_ == 0;
}

SessionPlayer::SessionPlayer(Engines& engines, const History& history)
    : history_(history),
      small_window_(history.seed % 4 == 0),
      may_die_(history.layer == Layer::kMembers && HasDeath(history)),
      stage_(engines, history.job, may_die_),
      wires_(history.job.world_size),
      ranks_(history.job.world_size) {}

SessionPlayer::~SessionPlayer() {
  wires_.Release();
  for (Rank& side : ranks_) side.session.reset();
  wires_.Plan(std::vector<RankFaults>(ranks_.size()));
  stage_.tally().cuts += wires_.breaks();
  stage_.tally().repeats += wires_.repeats();
}

absl::Status SessionPlayer::Play() {
  BALLAST_RETURN_IF_ERROR(stage_.Create());
  for (const Event& event : history_.attempts.front().events) {
    if (event.kind == EventKind::kDeath && event.pick % 4 == 1) ArmDeath(event);
  }
  BALLAST_RETURN_IF_ERROR(stage_.UploadWeights());
  if (may_die_) stage_.deaths().Disarm();
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    ranks_[rank].process_id = absl::StrCat("process", ++processes_);
    BALLAST_RETURN_IF_ERROR(OpenSession(rank));
  }
  for (size_t i = 0; i < history_.attempts.size(); ++i) {
    const Attempt attempt = Normalize(history_.job, history_.attempts[i], stage_.layout());
    BALLAST_RETURN_IF_ERROR(Annotate(PlayAttempt(attempt), absl::StrCat("attempt ", i + 1)));
  }
  for (const auto& [snapshot, state] : snapshots_) {
    BALLAST_RETURN_IF_ERROR(stage_.CheckSnapshots(snapshot, state));
  }
  BALLAST_RETURN_IF_ERROR(stage_.CheckAllState());
  snapshots_.clear();
  for (Rank& side : ranks_) side.session.reset();
  wires_.Plan(std::vector<RankFaults>(ranks_.size()));
  return stage_.Close();
}

// ---------------------------------------------------------------- sessions

absl::Status SessionPlayer::OpenSession(int rank) {
  Rank& side = ranks_[rank];
  side.session.reset();
  for (const int chunk : stage_.layout().chunks_of_rank(rank)) {
    side.weights[chunk].assign(stage_.Shard(chunk).size(), std::byte{0xee});
  }
  client::SessionOptions options = {.job = stage_.spec(),
                                    .rank = rank,
                                    .process_id = side.process_id,
                                    .join_timeout = absl::Seconds(60)};
  const int first_of_rank = stage_.layout().first_of_rank(rank);
  options.weights = [&side, first_of_rank](int chunk) {
    return absl::MakeSpan(side.weights.at(first_of_rank + chunk));
  };
  options.seal_timeout = absl::Seconds(60);
  // On a clock that does not wait, a minute is over before a checkpoint is loaded.
  options.reconnect_timeout = absl::Hours(1000);
  if (small_window_) options.window_bytes = 3000;
  BALLAST_ASSIGN_OR_RETURN(
      side.session, client::SessionImpl::Open(
                        std::make_unique<EngineTransport>(stage_.host_of(rank), wires_, rank),
                        clock_, std::move(options)));
  BALLAST_RETURN_IF_ERROR(side.session->ReadWeights());
  if (side.session->committed_step() != stage_.model().state().committed_step) {
    return Wrong("rank ", rank, " finds step ", side.session->committed_step(), ", expected ",
                 stage_.model().state().committed_step);
  }
  const ModelState& state = stage_.model().state();
  if (side.session->trainer_state() != state.trainer_state ||
      side.session->last_step_applied() != state.last_step_applied) {
    return Wrong("rank ", rank, " finds the trainer's state '", side.session->trainer_state(),
                 "', expected '", state.trainer_state, "', of a step that was applied ",
                 side.session->last_step_applied());
  }
  return CheckWeights(rank);
}

absl::Status SessionPlayer::CheckWeights(int rank) const {
  for (const auto& [chunk, bytes] : ranks_[rank].weights) {
    BALLAST_RETURN_IF_ERROR(
        Annotate(stage_.CheckShard(chunk, bytes), absl::StrCat("in the memory of rank ", rank)));
  }
  return absl::OkStatus();
}

// Every session is at its end, and all are opened again.
absl::Status SessionPlayer::StartOver() {
  for (Rank& side : ranks_) {
    side.session.reset();
    if (const int lent = side.lending->lent(); lent != 0) {
      return Wrong(lent, " payloads were never released");
    }
  }
  wires_.Plan(std::vector<RankFaults>(ranks_.size()));
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    BALLAST_RETURN_IF_ERROR(OpenSession(rank));
  }
  return stage_.CheckAllState();
}

// ---------------------------------------------------------------- an attempt

std::vector<RankFaults> SessionPlayer::PlanFaults() const {
  std::vector<RankFaults> faults(ranks_.size());
  std::vector<int> messages(ranks_.size(), 0);
  for (const Call& call : calls_) ++messages[call.rank];
  for (const Event& event : attempt_->events) {
    RankFaults& of = faults[event.rank];
    const int up = Script::IndexOf(event.at, messages[event.rank]);
    switch (event.kind) {
      case EventKind::kCut: {
        auto where = static_cast<Break::Where>(event.pick % 4);
        // A process that dies leaves no stream.
        if (may_die_ && where == Break::kUpUnseen) where = Break::kUp;
        // Down come as many acknowledgements, and then the decision and the weights.
        const int down = event.at * (messages[event.rank] + 6) / kPositions;
        of.breaks.push_back({.where = where, .message = where == Break::kDown ? down : up});
        break;
      }
      case EventKind::kAway:
        of.breaks_at_seal = true;
        break;
      case EventKind::kRepeat:
        of.repeats.insert(up);
        break;
      case EventKind::kLate:
        // Somebody has to be in time. A late rank's pushes would wait for room. And it does not see
        // that its process dies.
        of.late = event.rank != 0 && !small_window_ && !may_die_;
        break;
      default:
        break;
    }
  }
  return faults;
}

void SessionPlayer::PlanLinkCuts(int words) {
  if (!stage_.has_members()) return;
  std::vector<LinkCut> cuts;
  for (const Event& event : attempt_->events) {
    if (event.kind != EventKind::kLinkCut) continue;
    const JobSpec& spec = stage_.spec();
    int member = spec.home(event.rank);
    if (member == spec.lead()) member = (member + 1) % spec.member_count();
    cuts.push_back({.member = member,
                    .word = event.at % words,
                    .how = static_cast<LinkCut::How>(event.pick % 3)});
  }
  stage_.linked().Plan(std::move(cuts));
}

absl::Status SessionPlayer::PlayAttempt(const Attempt& attempt) {
  attempt_ = &attempt;
  tries_ = std::make_unique<Tries>(history_.job, attempt, stage_.layout());
  live_ = 0;
  live_begun_ = false;
  spike_ = false;
  votes_otherwise_ = -1;
  for (const Event& event : attempt.events) {
    const bool differs = event.kind == EventKind::kOtherVote && history_.job.world_size > 1;
    if (differs) votes_otherwise_ = event.rank;
  }
  calls_ = tries_->script(0).Calls();
  broken_off_ = false;
  const std::vector<RankFaults> faults = PlanFaults();
  late_.clear();
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    late_.push_back(faults[rank].late);
    ranks_[rank].try_number = 0;
    ranks_[rank].begun = false;
    ranks_[rank].tail.clear();
    ranks_[rank].buffers.clear();
    ranks_[rank].ending = {};
  }
  wires_.Plan(faults);
  PlanLinkCuts(12);
  BALLAST_RETURN_IF_ERROR(PlayUpToSeals());
  BALLAST_RETURN_IF_ERROR(broken_off_ ? BreakOff() : PlaySeals());
  if (may_die_) stage_.deaths().Disarm();
  while (snapshots_.size() > 2) {
    BALLAST_RETURN_IF_ERROR(
        stage_.CheckSnapshots(snapshots_.front().first, snapshots_.front().second));
    snapshots_.erase(snapshots_.begin());
  }
  return absl::OkStatus();
}

absl::Status SessionPlayer::PlayUpToSeals() {
  const bool breaks_off = attempt_->end != End::kCommit && attempt_->end != End::kAbortAtDecision;
  const size_t planned = calls_.size();
  stage_.Expose();
  for (size_t i = 0; i < calls_.size(); ++i) {
    if (breaks_off && Script::IndexOf(attempt_->end_at, planned) == static_cast<int>(i)) {
      broken_off_ = true;
      calls_.erase(calls_.begin(), calls_.begin() + static_cast<ptrdiff_t>(i));
      return absl::OkStatus();
    }
    for (const Event& event : attempt_->events) {
      if (Script::IndexOf(event.at, planned) != static_cast<int>(i)) continue;
      BALLAST_RETURN_IF_ERROR(stage_.Settle());
      BALLAST_RETURN_IF_ERROR(Happen(event, i));
      stage_.Expose();
    }
    Rank& side = ranks_[calls_[i].rank];
    if (calls_[i].kind == CallKind::kSeal || !side.tail.empty()) {
      side.tail.push_back(calls_[i]);
    } else {
      BALLAST_RETURN_IF_ERROR(Make(calls_[i]));
    }
  }
  return absl::OkStatus();
}

absl::Status SessionPlayer::Begin(const Call& call) {
  Rank& side = ranks_[call.rank];
  BALLAST_RETURN_IF_ERROR(side.session->BeginStep(ScriptOf(call).Settings()));
  side.begun = true;
  if (late_[call.rank]) return absl::OkStatus();
  // So that what an operator does comes before or after, and not perhaps.
  if (!wires_.AwaitBegun(call.rank, side.try_number)) {
    return Wrong("rank ", call.rank, " has not begun");
  }
  // An operator's changes are in a step that the lead has not begun.
  if (stage_.spec().home(call.rank) != stage_.spec().lead()) return absl::OkStatus();
  if (side.try_number == live_ && !std::exchange(live_begun_, true)) stage_.model().Begin(live());
  return absl::OkStatus();
}

absl::Status SessionPlayer::Discard(int rank, size_t next_call) {
  Rank& side = ranks_[rank];
  if (!side.begun || !side.tail.empty() || late_[rank]) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(side.session->Discard());
  ++stage_.tally().discarded;
  if (++side.try_number > live_) {
    live_ = side.try_number;
    live_begun_ = false;
  }
  tries_->Redo(calls_, next_call, rank, side.try_number);
  const auto begin = std::find_if(calls_.begin() + static_cast<ptrdiff_t>(next_call), calls_.end(),
                                  [&](const Call& call) { return call.rank == rank; });
  const Call call = *begin;
  calls_.erase(begin);
  return Begin(call);
}

absl::Status SessionPlayer::Make(const Call& call) {
  client::SessionImpl& session = *ranks_[call.rank].session;
  switch (call.kind) {
    case CallKind::kBegin:
      return Begin(call);
    case CallKind::kContribute: {
      Script& script = ScriptOf(call);
      const auto [begin, end] = script.Range(call.chunk, call.segment);
      client::GradientPush push = {.chunk = call.chunk - stage_.layout().first_of_rank(call.rank),
                                   .micro_step_begin = begin,
                                   .micro_step_end = end,
                                   .final = script.IsFinal(call.chunk, call.segment),
                                   .may_guess = script.MayGuess(call.chunk, call.segment),
                                   .empty = script.IsEmpty(call.chunk, call.segment)};
      // A trainer uses its buffer again as soon as it may.
      const auto buffer =
          std::make_shared<std::vector<std::byte>>(script.Payload(call.chunk, call.segment));
      ranks_[call.rank].buffers.push_back(buffer);
      const auto lending = ranks_[call.rank].lending;
      lending->Lend();
      push.payload = *buffer;
      push.released = [buffer, lending] {
        std::fill(buffer->begin(), buffer->end(), std::byte{0x5a});
        lending->GiveBack();
      };
      return session.Push(std::move(push));
    }
    case CallKind::kEndMicroStep: {
      UsedParameters used = ScriptOf(call).Used(call.rank, call.micro_step);
      UsedParameters given = {.all = used.all, .parameters = std::move(used.parameters)};
      if (used.non_finite.has_value()) {
        given.non_finite = {.parameter = used.non_finite->parameter,
                            .element = used.non_finite->element,
                            .value = used.non_finite->value};
      }
      return session.EndMicroStep(call.micro_step, given);
    }
    case CallKind::kSeal:
      break;
  }
  return Wrong("a seal outside the tail");
}

void SessionPlayer::ArmDeath(const Event& event) {
  if (!may_die_) return;
  stage_.deaths().Arm(1 + event.pick % 16, event.pick % 8 == 0 ? 1 + event.pick / 8 % 16 : 0);
}

absl::Status SessionPlayer::Happen(const Event& event, size_t next_call) {
  switch (event.kind) {
    case EventKind::kOperator:
      return stage_.ChangeGroup(event.pick % static_cast<int>(history_.job.groups.size()),
                                event.changes);
    case EventKind::kSnapshot: {
      BALLAST_ASSIGN_OR_RETURN(std::vector<Snapshot> taken, stage_.TakeSnapshots());
      // They end with their process.
      if (may_die_) return stage_.CheckSnapshots(taken, stage_.model().state());
      snapshots_.emplace_back(std::move(taken), stage_.model().state());
      return absl::OkStatus();
    }
    case EventKind::kReadShards:
      return stage_.CheckShards();
    case EventKind::kSave:
      return stage_.Save();
    case EventKind::kDiscard:
      return Discard(event.rank, next_call);
    case EventKind::kTellWaiting:
      for (const auto& part : stage_.parts()) part->TellWaiting();
      return absl::OkStatus();
    case EventKind::kDeath:
      ArmDeath(event);
      return absl::OkStatus();
    default:
      return absl::OkStatus();
  }
}

}  // namespace ballast::histories
