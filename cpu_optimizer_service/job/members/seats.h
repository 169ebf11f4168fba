// At a lead: which members have their part of the job, while it is created or closed.
//
//   created   every member reserves room; once all have, every member keeps its part
//   closed    every member has closed its part
//
// Thread-safe.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_SEATS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_SEATS_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/job/members/words.h"

namespace ballast {

class MemberSeats {
 public:
  using Seat = MemberWord::Seat;

  // The spec outlives it.
  explicit MemberSeats(const JobSpec& spec) : spec_(spec), members_(spec.member_count()) {}

  void Hear(int member, const Seat& seat);
  // There is no link to it, because of `why`. What it has said stays, except a reservation.
  void Lose(int member, const absl::Status& why);

  // Waits end with this.
  void GiveUp(const absl::Status& why);

  // ---- While the job is created. `here`: the lead's own.
  // Waits until every member has reserved, or said why not. RESOURCE_EXHAUSTED: some have no room;
  // the message has what each member needs and has. UNAVAILABLE: some have no link after `timeout`.
  // Otherwise the first member's error.
  absl::Status AwaitRoom(const Seat& here, std::chrono::steady_clock::duration timeout);
  // After that: waits until every member keeps its part. Otherwise the first member's error.
  // UNAVAILABLE: a link has ended meanwhile.
  absl::Status AwaitKept();

  // For people: whom these wait for, in a line; empty: no other member.
  std::string WaitsFor() const;
  // Of its part, as it has said last; 0: unknown.
  int64_t NeededBytes(int member) const;

  std::string NameOf(int member) const;  // "member gpu3:7070"
  // The first member, other than the lead, that has not said that its part is closed; -1: all have.
  int FirstNotClosed() const;

 private:
  struct Member {
    std::optional<Seat> seat;                                                  // The last one.
    absl::Status unreachable = absl::UnavailableError("it has not answered");  // OK: it is there.
  };

  absl::Status WhyNone(int member, const Seat& seat) const;
  absl::Status WhyNoRoom(const Seat& here) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const JobSpec& spec_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<Member> members_ ABSL_GUARDED_BY(mutex_);
  bool has_room_ ABSL_GUARDED_BY(mutex_) = false;  // AwaitRoom has returned OK.
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);      // A link has ended since, or it is given up.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_SEATS_H_
