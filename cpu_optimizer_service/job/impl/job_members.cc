// A job that several members hold: what its lead and the others say to each other
// (members/words.h), and what follows from it. A job on one host has one member, and no links.
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"

namespace ballast {

// ---------------------------------------------------------------- links

uint64_t JobImpl::OpenLinkToMember(int member, std::shared_ptr<WordSink<LeadWord>> sink) {
  const JobCore::Section section(core_);
  if (links_[member].sink != nullptr) links_[member].sink->Replaced();
  links_[member] = {.sink = std::move(sink), .number = ++last_link_, .stands = {}, .no_link = {}};
  // What it has reported on an older link, it reports again on this one.
  LeadOfStep().Withdraw(member);
  return last_link_;
}

uint64_t JobImpl::OpenLinkToLead(std::shared_ptr<WordSink<MemberWord>> sink) {
  const JobCore::Section section(core_);
  if (to_lead_.sink != nullptr) to_lead_.sink->Replaced();
  FailSaves(absl::UnavailableError("another link to the lead has taken the place of this one"));
  to_lead_.sink = std::move(sink);
  to_lead_.number = ++last_link_;
  to_lead_.no_link = {};
  Say({SeatNow(absl::OkStatus())});
  SayStanding();
  if (to_lead_.report.has_value()) Say(*to_lead_.report);
  saver_.SayParts();
  loader_.SayChecked();
  for (const auto& [id, ask] : to_lead_.asks) Say(ask.word);
  return last_link_;
}

void JobImpl::NoteRoundTrip(uint64_t link, double seconds) {
  JobCore::Lock lock(core_);
  for (Link& each : links_) {
    if (each.number == link) each.round_trip_seconds = seconds;
  }
}

void JobImpl::CloseLink(uint64_t number, const absl::Status& why) {
  const JobCore::Section section(core_);
  if (to_lead_.number == number) {
    to_lead_.sink = nullptr;
    to_lead_.no_link.Begin(why);
    FailSaves(why);
  }
  for (int member = 0; member < static_cast<int>(links_.size()); ++member) {
    if (links_[member].number != number) continue;
    links_[member] = {};
    links_[member].no_link.Begin(why);
    seats_.Lose(member, why);
    tasks_.Lose(member, why);
    LeadOfStep().Withdraw(member);
  }
}

// ---------------------------------------------------------------- the lead hears

uint64_t JobImpl::DecidedStep() const {
  const auto& decision = core_.record.decision;
  return decision.has_value() ? decision->terms.step : core_.record.committed_step;
}

StepLead& JobImpl::LeadOfStep() {
  if (lead_.step() != DecidedStep() + 1) {
    lead_.Begin(DecidedStep() + 1);
    first_report_.reset();
  }
  return lead_;
}

void JobImpl::HearMember(int member, uint64_t link, MemberWord word) {
  const JobCore::Section section(core_);
  HearNow(member, link, std::move(word));
}

void JobImpl::HearNow(int member, uint64_t link, MemberWord word) {
  if (links_[member].number != link) return;
  const bool is_seat = std::holds_alternative<MemberWord::Seat>(word.what);
  if (!is_seat && !is_established_) {
    early_.push_back({member, link, std::move(word)});
    return;
  }
  if (core_.gate.phase() == Phase::kClosed && !is_seat) return;
  std::vector<ToMember> told;
  std::visit([&](auto& what)
                 ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { TakeFrom(member, what, told); },
             word.what);
  TellMembers(std::move(told));
  GoOnIfReady();
}

void JobImpl::TakeFrom(int member, MemberWord::Standing& stands, std::vector<ToMember>& told) {
  Link& link = links_[member];
  link.stands = stands;
  link.stands.settings.reset();
  const bool has_weights = core_.first_weights.complete();
  const uint64_t decided = DecidedStep();
  const auto& loading = core_.record.loading;
  const auto tell_generation = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    link.sink->Send({LeadWord::Raised{core_.record.generation, WhyRaised()}});
  };
  if (loading.has_value() || core_.gate.state().torn) {
    // Its step does not count: a load replaces it.
    if (!std::exchange(link.has_stood, true)) tasks_.Link(member);
    if (stands.generation < core_.record.generation) return tell_generation();
    if (!loading.has_value()) return;
    if (stands.loads == core_.record.loads) return loader_.OtherHasLoaded();
    return link.sink->Send(
        {LeadWord::Load{.loads = loading->loads,
                        .name = core_.environment.checkpoints == nullptr
                                    ? loading->path
                                    : core_.environment.checkpoints->NameOf(loading->path),
                        .weights_only = loading->weights_only,
                        .sha256 = loading->sha256}});
  }
  if (TellUndo(member)) return;
  if (stands.generation > core_.record.generation || stands.loads != core_.record.loads ||
      (stands.has_weights && !has_weights) ||
      (stands.has_weights && stands.committed_step > decided)) {
    // It has followed another lead, or this one is not what it was.
    return core_.Tell(absl::StrCat(seats_.NameOf(member), " is at step ", stands.committed_step,
                                   " of generation ", ToString(stands.generation),
                                   ", ahead of its lead at step ", decided, " of ",
                                   ToString(core_.record.generation), "; close the job at both"));
  }
  // What it is told first, it stands behind before it hears the rest.
  if (has_weights && !stands.has_weights) return link.sink->Send({LeadWord::Begin{StateNow()}});
  if (has_weights && stands.committed_step < decided) return TellDecision(member);
  if (stands.generation < core_.record.generation) return tell_generation();
  if (!std::exchange(link.has_stood, true)) tasks_.Link(member);
  if (!has_weights) return BeginIfAllHaveWeights();
  StepLead& lead = LeadOfStep();
  lead.Stand(member, stands.attempt, stands.by, stands.settings, told);
  if (!stands.wants_discard.has_value() || stands.attempt < lead.attempt()) return;
  // Granted: nothing of the attempt is decided. The asking member is told as all others are.
  const uint32_t next = stands.attempt + 1;
  lead.Stand(member, next, *stands.wants_discard, std::nullopt, told);
  told.push_back({member, ToMember::Live{.attempt = next, .by = *stands.wants_discard}});
}

std::string JobImpl::WhyRaised() const {
  if (!raised_because_.empty()) return raised_because_;
  return absl::StrCat("the generation of job ", spec().name, " is now ",
                      ToString(core_.record.generation), "; attach again");
}

bool JobImpl::IsBehind(const MemberWord::Standing& stands) const {
  const bool has_weights = core_.first_weights.complete();
  return stands.generation == core_.record.generation && stands.has_weights == has_weights &&
         (!has_weights || stands.committed_step == DecidedStep());
}

bool JobImpl::IsInStep(int member) const {
  const MemberWord::Standing& stands = links_[member].stands;
  // A load that has begun is the next thing that it hears of.
  const uint64_t loaded = core_.record.loads - (core_.record.loading.has_value() ? 1 : 0);
  return links_[member].sink != nullptr && stands.loads == loaded && IsBehind(stands);
}

void JobImpl::TakeFrom(int member, MemberWord::Report& report, std::vector<ToMember>& told) {
  if (!IsInStep(member)) return;
  links_[member].report = report.number;
  StepLead& lead = LeadOfStep();
  if (!first_report_.has_value()) first_report_ = std::chrono::steady_clock::now();
  lead.Report(member, report.attempt, std::move(report.report), std::move(report.vote), told);
}

void JobImpl::TakeFrom(int member, MemberWord::Checked& checked, std::vector<ToMember>& told) {
  if (!IsInStep(member)) return;
  LeadOfStep().Checked(member, checked.round, std::move(checked.refusal), told);
}

void JobImpl::TakeFrom(int member, MemberWord::Vote& vote, std::vector<ToMember>& told) {
  if (IsInStep(member)) LeadOfStep().Vote(member, vote.round, std::move(vote.vote), told);
}

void JobImpl::TakeFrom(int member, MemberWord::Tried& tried, std::vector<ToMember>& /*told*/) {
  if (IsInStep(member)) LeadOfStep().Tried(member, tried.round, std::move(tried.trial));
}

void JobImpl::TakeFrom(int member, MemberWord::Ask& ask, std::vector<ToMember>& /*told*/) {
  const auto answer = [this, self = Self(), member, link = links_[member].number,
                       id = ask.id](absl::Status may) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    if (links_[member].number != link || core_.gate.phase() == Phase::kClosed) return;
    if (may.ok() && core_.gate.state().torn) may = core_.StatusOf(Answer::kTorn);
    links_[member].sink->Send({LeadWord::Answer{.id = id,
                                                .refused = std::move(may),
                                                .generation = core_.record.generation,
                                                .committed_step = DecidedStep(),
                                                .has_weights = core_.first_weights.complete()}});
  };
  // Where the answer was lost it is asked again, in the generation that has ended since.
  const auto is_lost = [this, stood = MemberWord::Standing{.generation = ask.generation,
                                                           .committed_step = ask.committed_step,
                                                           .has_weights = ask.has_weights}]()
                           ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return IsBehind(stood); };
  // Where the job stands after a load, only its end says.
  const auto answer_after_load = [this, answer]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    core_.EnterHere(Admission::kHear, -1,
                    [answer](absl::Status /*admitted*/)
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { answer(absl::OkStatus()); });
  };
  if (core_.record.loading.has_value()) return answer_after_load();
  if (!ask.give_up.has_value() || !is_lost()) return answer(absl::OkStatus());
  core_.EnterHere(Admission::kAttach, -1,
                  [this, self = Self(), answer, answer_after_load, is_lost,
                   why = *std::move(ask.give_up)](absl::Status admitted)
                      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                        if (!admitted.ok()) return answer_after_load();
                        if (!is_lost()) return answer(absl::OkStatus());
                        GiveUpStep(why, [answer]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
                          answer(absl::OkStatus());
                        });
                      });
}

// ---------------------------------------------------------------- the lead speaks

void JobImpl::TellMembers(std::vector<ToMember> told) {
  for (ToMember& each : told) {
    LeadWord::OfStep word = {
        .generation = core_.record.generation, .step = lead_.step(), .what = ToMember::Live()};
    std::visit(
        [&](auto& what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
          using What = std::decay_t<decltype(what)>;
          if constexpr (std::is_same_v<What, ToMember::Norm>) {
            word.what = LeadWord::OfStep::Norm{what.round, decider_.Norm()};
          } else if constexpr (std::is_same_v<What, ToMember::VoteAgain>) {
            word.what = LeadWord::OfStep::VoteAgain{what.round, decider_.Norm(), what.why};
          } else if constexpr (std::is_same_v<What, ToMember::Try>) {
            word.what = LeadWord::OfStep::Try{what.round, decider_.MakeDraft()};
          } else {
            word.what = std::move(what);
          }
        },
        each.what);
    if (each.member == core_.identity.member) {
      Hear({std::move(word)});
    } else if (links_[each.member].sink != nullptr) {
      links_[each.member].sink->Send({std::move(word)});
    }
  }
}

void JobImpl::TellDecision(int member) {
  const Link& link = links_[member];
  const auto& decision =
      core_.record.decision.has_value() ? core_.record.decision : core_.record.last_decision;
  const bool is_next =
      decision.has_value() && decision->terms.step == link.stands.committed_step + 1;
  if (link.sink != nullptr && is_next) {
    link.sink->Send({LeadWord::Decided{decision->reports[member], *decision}});
  }
}

void JobImpl::TellAllDecision() {
  for (int member = 0; member < static_cast<int>(links_.size()); ++member) TellDecision(member);
}

absl::Status JobImpl::CheckNoneHasBegun() {
  for (int member = 0; member < static_cast<int>(links_.size()); ++member) {
    const Link& link = links_[member];
    if (member == core_.identity.member || link.has_stood) continue;
    const std::string who = seats_.NameOf(member);
    return absl::UnavailableError(absl::StrCat(
        link.sink == nullptr ? link.no_link.Of(who)
                             : absl::StrCat(who, " has not said yet where it stands"),
        "; its ranks may have begun the next step of job ", spec().name, "; try again"));
  }
  return LeadOfStep().has_begun() ? core_.StatusOf(Answer::kHasStep) : absl::OkStatus();
}

bool JobImpl::TellUndo(int member) {
  const Link& link = links_[member];
  const UndoneStep& undone = core_.record.undone;
  // All had the load before: without it they could not have reported the step.
  const bool is_before = undone.loads != 0 && undone.loads == core_.record.loads &&
                         link.stands.loads + 1 == undone.loads;
  if (link.sink == nullptr || !is_before) return false;
  link.sink->Send({LeadWord::Undo{.step = undone.step,
                                  .loads = undone.loads,
                                  .generation = core_.record.generation,
                                  .why = WhyRaised()}});
  return true;
}

// ---------------------------------------------------------------- a member speaks

void JobImpl::Say(MemberWord word) {
  if (to_lead_.sink != nullptr) to_lead_.sink->Send(std::move(word));
}

void JobImpl::SayStanding() {
  MemberWord::Standing stands = {.generation = core_.record.generation,
                                 .committed_step = core_.record.committed_step,
                                 .has_weights = core_.first_weights.complete(),
                                 .loads = core_.record.loads,
                                 .first_state = FirstStateHere(),
                                 .fits_any_state = core_.layout.chunks().empty()};
  if (const StepAgreement* given = machine_.undecided(); given != nullptr) {
    stands.attempt = given->attempt();
    stands.by = given->live_since();
    stands.all_have_begun = given->all_have_begun();
    if (!given->lacks_terms()) stands.settings = given->terms().settings;
    if (is_reported()) stands.wants_discard = to_lead_.wants_discard;
  }
  if (!core_.identity.is_lead()) return Say({std::move(stands)});
  if (!stands.has_weights) return BeginIfAllHaveWeights();
  std::vector<ToMember> told;
  LeadOfStep().Stand(core_.identity.member, stands.attempt, stands.by, stands.settings, told);
  TellMembers(std::move(told));
}

void JobImpl::SayVote() {
  const uint64_t round = to_lead_.norm_round;
  StepVote vote = machine_.agreement()->vote();
  if (!core_.identity.is_lead()) return Say({MemberWord::Vote{round, std::move(vote)}});
  std::vector<ToMember> told;
  LeadOfStep().Vote(core_.identity.member, round, std::move(vote), told);
  TellMembers(std::move(told));
  GoOnIfReady();
}

uint64_t JobImpl::AskLead(std::optional<std::string> give_up, JobCore::Turn then) {
  if (core_.gate.phase() == Phase::kClosed) {
    std::move(then)(core_.StatusOf(Answer::kClosed));
    return 0;
  }
  const uint64_t id = ++to_lead_.last_ask;
  MemberWord word = {MemberWord::Ask{.id = id,
                                     .generation = core_.record.generation,
                                     .committed_step = core_.record.committed_step,
                                     .has_weights = core_.first_weights.complete(),
                                     .give_up = std::move(give_up)}};
  to_lead_.asks.emplace(id, LeadLink::Asked{word, std::move(then)});
  // From here on the rank that asks may bring other first weights.
  if (core_.first_weights.only_held()) SayStanding();
  Say(std::move(word));
  return id;
}

void JobImpl::CancelAsk(uint64_t id) {
  auto ask = to_lead_.asks.extract(id);
  if (ask.empty()) return;
  std::move(ask.mapped().then)(core_.StatusOf(std::nullopt));
  if (core_.first_weights.only_held()) SayStanding();
}

// ---------------------------------------------------------------- a member hears

void JobImpl::HearLead(uint64_t link, LeadWord word) {
  const JobCore::Section section(core_);
  if (to_lead_.number != link) return;
  // A step may wait for the pins of a save, so what ends that does not wait for the step.
  const auto* task = std::get_if<LeadWord::Task>(&word.what);
  if (task != nullptr && saver_.TakePart(*task)) return;
  Hear(std::move(word));
}

void JobImpl::Hear(LeadWord word) {
  core_.EnterHere(
      Admission::kHear, -1,
      [this, self = Self(), link = to_lead_.number, word = std::move(word)](absl::Status admitted)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
            if (!admitted.ok() || to_lead_.number != link) return;
            std::visit([&](auto& what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { Take(what); },
                       word.what);
          });
}

void JobImpl::Take(LeadWord::OfStep& word) {
  if (word.generation != core_.record.generation || word.step != core_.record.committed_step + 1) {
    return;
  }
  std::visit([&](auto& what)
                 ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { TakeOfStep(word.step, what); },
             word.what);
}

void JobImpl::TakeOfStep(uint64_t step, ToMember::Live& live) {
  StepEffects effects;
  machine_.RaiseLive(Before(), {step, live.attempt}, live.by, effects);
  Perform(std::move(effects));
}

void JobImpl::TakeOfStep(uint64_t step, ToMember::OtherSettings& other) {
  const StepAgreement* given = machine_.undecided();
  if (given == nullptr || given->attempt() != other.attempt) return;
  // Those that have begun, and those that will.
  refused_settings_ = {core_.record.generation, {step, other.attempt}, other.why};
  Detached detached;
  for (const int rank : core_.layout.ranks()) {
    const bool began = given->IsLive(rank) && given->ranks()[rank].begun;
    if (began) members_.table.TakeListener(rank, detached.listeners);
  }
  members_.Detach(std::move(detached), other.why);
}

absl::Status JobImpl::CheckSettings(int rank) const {
  const StepAgreement* given = machine_.undecided();
  const bool is_it = given != nullptr && given->IsLive(rank) &&
                     refused_settings_.generation == core_.record.generation &&
                     refused_settings_.at == StepAttempt(given->step(), given->attempt());
  return is_it ? refused_settings_.why : absl::OkStatus();
}

void JobImpl::TakeOfStep(uint64_t /*step*/, ToMember::Refused& refused) {
  if (!is_reported()) return;
  StepEffects effects;
  machine_.Refuse(std::move(refused.why), effects);
  Perform(std::move(effects));
}

void JobImpl::TakeOfStep(uint64_t /*step*/, ToMember::CheckUses& check) {
  if (!is_reported()) return;
  const auto has_gradient = [&](const ChunkPiece& piece) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return memory_.gradients->HasNonZero(piece, executor_.sums_are_current(piece.chunk));
  };
  std::optional<SealRefusal> refusal = machine_.CheckAllUses(check.uses, has_gradient);
  if (!core_.identity.is_lead()) {
    return Say({MemberWord::Checked{check.round, std::move(refusal)}});
  }
  std::vector<ToMember> told;
  LeadOfStep().Checked(core_.identity.member, check.round, std::move(refusal), told);
  TellMembers(std::move(told));
  GoOnIfReady();
}

void JobImpl::TakeOfStep(uint64_t /*step*/, LeadWord::OfStep::Norm& known) {
  if (!is_reported()) return;
  to_lead_.norm_round = known.round;
  told_norm_ = std::move(known.norm);
  StepEffects effects;
  effects.voted = machine_.NormIsKnown(effects);
  Perform(std::move(effects));
}

void JobImpl::TakeOfStep(uint64_t /*step*/, LeadWord::OfStep::VoteAgain& again) {
  if (!is_reported()) return;
  to_lead_.norm_round = again.round;
  told_norm_ = std::move(again.norm);
  // What ranks have sealed with is refused: before they are told, it is not what is kept.
  if (auto& prepared = core_.record.prepared; prepared.has_value() && prepared->vote.has_value()) {
    prepared->vote.reset();
    journal_.Keep();
    std::get<MemberWord::Report>(to_lead_.report->what).vote.reset();
  }
  StepEffects effects;
  machine_.VoteAgain(again.why, effects);
  Perform(std::move(effects));
}

void JobImpl::TakeOfStep(uint64_t /*step*/, LeadWord::OfStep::Try& tried) {
  if (is_reported()) GoOnWith(std::move(tried));
}

void JobImpl::Take(LeadWord::Decided& decided) {
  if (decided.decision.terms.step != core_.record.committed_step + 1) return;
  if (decided.decision.outcome.skip_cause == SkipCause::kNotKept) {
    return SkipStep(std::move(decided.decision),
                    [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { SayStanding(); });
  }
  const auto& prepared = core_.record.prepared;
  if (!is_reported() || !prepared.has_value() || prepared->number != decided.report) {
    return core_.Tell(absl::StrCat(
        "the lead has decided step ", decided.decision.terms.step, " from report ", decided.report,
        ", which is not this member's last one; close the job at all members"));
  }
  GoOnWith(std::move(decided));
}

void JobImpl::Take(LeadWord::Raised& raised) {
  if (raised.generation <= core_.record.generation) return;
  RaiseTo(raised.generation, std::move(raised.why), [] {});
}

void JobImpl::Take(LeadWord::Undo& undo) {
  if (undo.loads <= core_.record.loads) return SayStanding();
  if (!loader_.UndoPart(undo)) {
    core_.Tell(absl::StrCat("the lead has undone step ", undo.step,
                            ", which is not this member's last one; close the job at all members"));
  }
}

void JobImpl::Take(LeadWord::Answer& answer) {
  const auto found = to_lead_.asks.find(answer.id);
  if (found == to_lead_.asks.end()) return;  // Answered on an older link, or given up.
  JobCore::Turn then = std::move(found->second.then);
  to_lead_.asks.erase(found);
  if (!answer.refused.ok()) return std::move(then)(answer.refused);
  // Words come in their order, so this member has taken all that the answer is behind.
  const bool is_there = IsBehind({.generation = answer.generation,
                                  .committed_step = answer.committed_step,
                                  .has_weights = answer.has_weights});
  std::move(then)(is_there ? absl::OkStatus()
                           : absl::UnavailableError("the job's lead has gone on meanwhile"));
  if (core_.first_weights.only_held()) SayStanding();
}

// ---------------------------------------------------------------- going on

void JobImpl::GoOnIfReady() {
  if (core_.gate.phase() != Phase::kReported) return;
  if (LeadOfStep().is_ready() && !lead_.awaits_trials()) GoOnWith({});
}

void JobImpl::GoOnWith(NextForReported next) {
  next_ = std::move(next);
  machine_.GoOn();
  core_.gate.GoOn();
  AwaitDecision();
}

// On an engine's thread, where nothing else works on the part.
void JobImpl::DoNext() {
  NextForReported next = std::exchange(next_, {});
  if (auto* decided = std::get_if<LeadWord::Decided>(&next)) return Decide(std::move(*decided));
  if (auto* attempt = std::get_if<LeadWord::OfStep::Try>(&next)) {
    core_.RunAfter([this, self = Self(), attempt = std::move(*attempt)] {
      StateTrial trial = decider_.Try(attempt.draft);
      GoOnDeciding([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
        AwaitLead();
        SayTrial(attempt.round, std::move(trial));
      });
    });
    return;
  }
  // A member may have taken back its report.
  if (!LeadOfStep().is_ready()) return AwaitLead();
  DecideFromReports();
}

void JobImpl::SayTrial(uint64_t round, StateTrial trial) {
  if (!core_.identity.is_lead()) return Say({MemberWord::Tried{round, std::move(trial)}});
  LeadOfStep().Tried(core_.identity.member, round, std::move(trial));
  GoOnIfReady();
}

void JobImpl::ForgetReport() {
  if (core_.identity.is_lead()) LeadOfStep().Withdraw(core_.identity.member);
  to_lead_.report.reset();
  to_lead_.wants_discard.reset();
  to_lead_.waits.clear();
  next_ = {};
  // Before anything more of the step is taken: what was reported is not what there is then.
  if (std::exchange(core_.record.prepared, std::nullopt).has_value()) journal_.Keep();
}

void JobImpl::AwaitLead() {
  machine_.AwaitLead();
  core_.gate.AwaitLead();
  // It has waited for the sums, or a trial.
  if (!core_.identity.is_lead() && to_lead_.wants_discard.has_value()) SayStanding();
}

}  // namespace ballast
