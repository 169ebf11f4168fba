// Which members have their part of the job: while it is created, and while it is closed.
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"

namespace ballast {

Follow JobImpl::FollowOf(int member) const {
  JobCore::Lock lock(core_);
  return {.uid = uid(),
          .spec = spec(),
          .member = member,
          .is_new = !is_established_,
          .creation = core_.identity.creation};
}

void JobImpl::CannotReach(int member, const absl::Status& why) {
  seats_.Lose(member, why);
  JobCore::Lock lock(core_);
  if (links_[member].sink == nullptr) links_[member].no_link.Begin(why);
}

MemberWord::Seat JobImpl::Seat(absl::Status error) const {
  JobCore::Lock lock(core_);
  return SeatNow(std::move(error));
}

MemberWord::Seat JobImpl::SeatNow(absl::Status error) const {
  using State = MemberWord::Seat::State;
  const MemoryBudget& budget = *core_.environment.budget;
  const int64_t reserved = memory_.reservation.bytes();
  const bool is_none = !error.ok() || core_.gate.phase() == Phase::kClosed;
  return {.state = is_none           ? State::kNone
                   : is_established_ ? State::kKept
                                     : State::kReserved,
          .error = std::move(error),
          .needed_bytes = memory_.need.total_bytes(),
          .free_bytes = budget.limit_bytes() - budget.used_bytes() + reserved};
}

void JobImpl::TellAll(const LeadWord& word) {
  const JobCore::Section section(core_);
  TellAllNow(word);
}

void JobImpl::TellAllNow(const LeadWord& word) {
  for (const Link& link : links_) {
    if (link.sink != nullptr) link.sink->Send(word);
  }
}

void JobImpl::TakeFrom(int member, MemberWord::Seat& seat, std::vector<ToMember>& /*told*/) {
  seats_.Hear(member, seat);
  const bool is_kept = seat.state == MemberWord::Seat::State::kKept;
  if (!core_.record.closing.empty()) {
    if (is_kept) return links_[member].sink->Send({LeadWord::Close{core_.record.closing}});
    return EndClosing();
  }
  if (is_established_ && !is_kept) {
    core_.Tell(absl::StrCat(seats_.NameOf(member), " has not its part of the job: ",
                            seat.error.ok() ? "it is closed there" : seat.error.message(),
                            "; close the job, and load its last checkpoint into a new one"));
  }
}

// ---------------------------------------------------------------- closing

Pending JobImpl::Close(std::optional<Use> unused, bool here, Done<bool> done) {
  if (!is_alone() && !unused.has_value()) {
    // A load may wait for other members for ever, and this would wait for it. It may still have to
    // begin.
    const JobCore::Section section(core_);
    if (core_.identity.is_lead()) {
      loader_.EndWaits(absl::CancelledError("the job is being closed"));
    }
  }
  return core_.Enter(Admission::kClose, -1,
                     [this, self = shared_from_this(), unused, here, done = std::move(done)](
                         absl::Status admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                       const bool is_superseded = core_.record.superseded_by != 0;
                       if (admitted.ok() && unused.has_value()) admitted = CheckUnused(*unused);
                       if (admitted.ok() && !here) admitted = CheckLeads();
                       // Another call has closed the job: then this one is done, too.
                       if (absl::IsNotFound(admitted) || is_superseded) admitted = absl::OkStatus();
                       here = here || is_superseded;  // Others are closed where they are.
                       if (!admitted.ok()) {
                         loader_.EndWaits(absl::OkStatus());
                         return core_.Reply<bool>(std::move(done), admitted);
                       }
                       closers_.push_back(std::move(done));
                       if (core_.gate.phase() == Phase::kClosed) return EndClosing(here);
                       CloseNow(absl::StrCat("job ", spec().name, " has been closed"), !here);
                     });
}

void JobImpl::CloseNow(const std::string& why, bool everywhere) {
  RaiseGeneration(why,
                  [this, self = Self(), why, everywhere]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
                    StopServing();
                    core_.Tell(absl::StrCat("closed at step ", committed_step()));
                    if (everywhere && core_.identity.is_lead() && !is_alone()) {
                      core_.record.closing = why;
                      journal_.Keep();
                      TellAllNow({LeadWord::Close{why}});
                    }
                    EndClosing(/*here=*/core_.record.closing.empty());
                  });
}

void JobImpl::StopServing() {
  core_.gate.Close();
  const absl::Status why = core_.StatusOf(Answer::kClosed);
  for (auto& [id, ask] : std::exchange(to_lead_.asks, {})) std::move(ask.then)(why);
  FailSaves(why);
  tasks_.GiveUp(why);
  core_.NotifyStepOver();
}

Pending JobImpl::Supersede(uint64_t epoch, Done<bool> done) {
  {
    // As in Close.
    const JobCore::Section section(core_);
    if (!is_alone() && core_.identity.is_lead()) {
      loader_.EndWaits(absl::CancelledError("the job is superseded"));
    }
  }
  return core_.Enter(
      Admission::kClose, -1,
      [this, self = shared_from_this(), epoch, done = std::move(done)](absl::Status admitted)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
            if (core_.gate.phase() == Phase::kClosed)
              return core_.Reply<bool>(std::move(done), false);
            if (!admitted.ok()) {
              loader_.EndWaits(absl::OkStatus());
              return core_.Reply<bool>(std::move(done), admitted);
            }
            core_.record.superseded_by = epoch;  // Kept with the generation's flip.
            const std::string why = std::string(core_.StatusOf(Answer::kClosed).message());
            RaiseGeneration(why, [this, self = Self(), why, done = std::move(done)]()
                                     ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                                       StopServing();
                                       core_.Tell(why);
                                       core_.Reply<bool>(std::move(done), true);
                                     });
          });
}

void JobImpl::EndClosing(bool here) {
  if (!here && !core_.record.closed && seats_.FirstNotClosed() != -1) return;
  // After this flip a later process finds no job, so that memory may go part by part.
  if (!std::exchange(core_.record.closed, true)) journal_.Keep();
  for (Done<bool>& done : std::exchange(closers_, {})) core_.Reply<bool>(std::move(done), true);
}

std::string JobImpl::CreationWaitsFor() const {
  if (is_alone()) return "";
  if (core_.identity.is_lead()) return seats_.WaitsFor();
  return absl::StrCat(seats_.NameOf(spec().lead()), ", the lead, is creating the job");
}

std::string JobImpl::WhoHasNotClosed() const {
  const int member = seats_.FirstNotClosed();
  return member == -1 ? "none" : seats_.NameOf(member);
}

absl::Status JobImpl::CheckAlone(absl::string_view what) const {
  if (is_alone()) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("job ", spec().name, " has several members and cannot ", what, " yet"));
}

absl::Status JobImpl::CheckLeads() const {
  if (core_.identity.is_lead()) return absl::OkStatus();
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat(seats_.NameOf(spec().lead()), " leads job ",
                                                 spec().name, "; call it there")),
      reason::kOtherMemberLeads);
}

}  // namespace ballast
