#include "cpu_optimizer_service/job/members/seats.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/amounts.h"

namespace ballast {

using State = MemberWord::Seat::State;

namespace {

// It will not answer otherwise, however often it is dialled.
bool WillNotAnswer(const absl::Status& why) {
  return absl::IsPermissionDenied(why) || absl::IsUnauthenticated(why) ||
         absl::IsFailedPrecondition(why) || absl::IsUnimplemented(why) ||
         absl::IsInvalidArgument(why);
}

}  // namespace

void MemberSeats::Hear(int member, const Seat& seat) {
  MutexLock lock(mutex_);
  members_[member] = {.seat = seat, .unreachable = absl::OkStatus()};
  changed_.NotifyAll();
}

void MemberSeats::Lose(int member, const absl::Status& why) {
  MutexLock lock(mutex_);
  Member& lost = members_[member];
  lost.unreachable = why;
  if (lost.seat.has_value() && lost.seat->state == State::kReserved) lost.seat.reset();
  if (has_room_) {
    lost_.Update(
        absl::UnavailableError(absl::StrCat("job ", spec_.name, " is not created: the link to ",
                                            NameOf(member), " has ended: ", why.message())));
  }
  changed_.NotifyAll();
}

void MemberSeats::GiveUp(const absl::Status& why) {
  MutexLock lock(mutex_);
  lost_.Update(why);
  changed_.NotifyAll();
}

absl::Status MemberSeats::WhyNone(int member, const Seat& seat) const {
  if (seat.error.ok())
    return absl::AbortedError(absl::StrCat(NameOf(member), " has closed its part"));
  const absl::Status why = Annotate(seat.error, NameOf(member));
  // It does not exist at the lead, which whoever creates it would take that for.
  return absl::IsAlreadyExists(why) ? absl::FailedPreconditionError(why.message()) : why;
}

std::string MemberSeats::NameOf(int member) const {
  return absl::StrCat("member ", spec_.members[member].address);
}

absl::Status MemberSeats::AwaitRoom(const Seat& here, std::chrono::steady_clock::duration timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  MutexLock lock(mutex_);
  while (true) {
    BALLAST_RETURN_IF_ERROR(lost_);
    bool has_all = true;
    for (int member = 0; member < spec_.member_count(); ++member) {
      const Member& each = members_[member];
      const bool has_answered = each.seat.has_value() || WillNotAnswer(each.unreachable);
      if (member != spec_.lead() && !has_answered) has_all = false;
    }
    if (!has_all && changed_.WaitUntil(mutex_, deadline)) continue;
    absl::Status room = WhyNoRoom(here);
    has_room_ = room.ok();
    return room;
  }
}

absl::Status MemberSeats::WhyNoRoom(const Seat& here) const {
  std::vector<std::string> sizes;
  bool lacks_room = false;
  std::vector<std::string> silent;
  absl::Status other;
  for (int member = 0; member < spec_.member_count(); ++member) {
    const bool leads = member == spec_.lead();
    const absl::Status& unreachable = members_[member].unreachable;
    if (!leads && !members_[member].seat.has_value() && WillNotAnswer(unreachable)) {
      other.Update(Annotate(unreachable, NameOf(member)));
      continue;
    }
    if (!leads && !members_[member].seat.has_value()) {
      silent.push_back(absl::StrCat(NameOf(member), " cannot be reached from ",
                                    spec_.members[spec_.lead()].address, ": ",
                                    members_[member].unreachable.message()));
      continue;
    }
    const Seat& seat = leads ? here : *members_[member].seat;
    if (absl::IsResourceExhausted(seat.error)) {
      lacks_room = true;
      sizes.push_back(absl::StrCat(NameOf(member), " is short: ", seat.error.message()));
    } else if (seat.state == State::kNone) {
      other.Update(WhyNone(member, seat));
    } else {
      sizes.push_back(absl::StrCat(NameOf(member), " has room: it needs ",
                                   FormatBytes(seat.needed_bytes), " and has ",
                                   FormatBytes(seat.free_bytes), " free"));
    }
  }
  BALLAST_RETURN_IF_ERROR(other);
  if (!silent.empty()) {
    return absl::UnavailableError(
        absl::StrCat("job ", spec_.name, " is not created: ", absl::StrJoin(silent, "; "),
                     "; start a service there, or describe the job without it"));
  }
  if (!lacks_room) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("job ", spec_.name, " is not created: ", absl::StrJoin(sizes, "; ")));
}

absl::Status MemberSeats::AwaitKept() {
  MutexLock lock(mutex_);
  while (lost_.ok()) {
    bool has_all = true;
    for (int member = 0; member < spec_.member_count(); ++member) {
      if (member == spec_.lead()) continue;
      const Seat& seat = *members_[member].seat;
      if (seat.state == State::kNone) return WhyNone(member, seat);
      if (seat.state != State::kKept) has_all = false;
    }
    if (has_all) return absl::OkStatus();
    changed_.Wait(mutex_);
  }
  return lost_;
}

std::string MemberSeats::WaitsFor() const {
  MutexLock lock(mutex_);
  std::vector<std::string> who;
  for (int member = 0; member < spec_.member_count(); ++member) {
    const auto& [seat, unreachable] = members_[member];
    if (member == spec_.lead() || (seat.has_value() && seat->state == State::kKept)) continue;
    if (!unreachable.ok()) {
      who.push_back(absl::StrCat(NameOf(member), " cannot be reached: ", unreachable.message()));
    } else if (has_room_) {
      who.push_back(absl::StrCat(NameOf(member), " is making its memory"));
    }
  }
  return absl::StrJoin(who, "; ");
}

int64_t MemberSeats::NeededBytes(int member) const {
  MutexLock lock(mutex_);
  const std::optional<Seat>& seat = members_[member].seat;
  return seat.has_value() ? seat->needed_bytes : 0;
}

int MemberSeats::FirstNotClosed() const {
  MutexLock lock(mutex_);
  for (int member = 0; member < spec_.member_count(); ++member) {
    if (member == spec_.lead()) continue;
    const auto& seat = members_[member].seat;
    if (!seat.has_value() || seat->state != State::kNone) return member;
  }
  return -1;
}

}  // namespace ballast
