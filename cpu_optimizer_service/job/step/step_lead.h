// The lead's half of a step: what all members have to agree on. It takes the members' words and
// says what each of them does next. A job on one host has one member.
//
//   members stand in attempts --all report the live one--> checked --> norm --votes--> ready
//
// The highest attempt of any member is the live one: only its reports count. Reports are merged by
// pure functions (step_report.h), so which member has which ranks changes no bit.
//
// Pure: no lock, no thread, no clock, no link.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_LEAD_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_LEAD_H_

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/job/step/seal_refusal.h"
#include "cpu_optimizer_service/job/step/state_trial.h"
#include "cpu_optimizer_service/job/step/step_report.h"

namespace ballast {

// What a member is told of its step.
struct ToMember {
  // Another attempt is live: what it has of older ones cannot be decided.
  struct Live {
    uint32_t attempt = 0;
    int by = 0;  // The rank that discarded the one before.
  };
  // Its ranks began the live attempt with other settings than the others. FAILED_PRECONDITION.
  struct OtherSettings {
    uint32_t attempt = 0;
    absl::Status why;
  };
  // Its report is void: no rank has sealed.
  struct Refused {
    SealRefusal why;
  };
  // All ranks' uses: is what this member has complete with them?
  struct CheckUses {
    uint64_t round = 0;
    StepUses uses;
  };
  // The norm is known, and this member's vote is missing.
  struct Norm {
    uint64_t round = 0;
  };
  // It tries the update.
  struct Try {
    uint64_t round = 0;
  };
  // As Norm, after a vote that differed. FAILED_PRECONDITION with the reason VOTE_AGAIN.
  struct VoteAgain {
    uint64_t round = 0;
    absl::Status why;
  };

  int member = 0;
  std::variant<Live, OtherSettings, Refused, CheckUses, Norm, VoteAgain, Try> what;
};

class StepLead {
 public:
  // `first_ranks`: by member, its lowest rank. Spec and layout outlive it; of the layout only the
  // parameters' sizes are used.
  StepLead(const JobSpec& spec, const Layout& layout, std::vector<int> first_ranks);

  // Another step: nothing is known of it.
  void Begin(uint64_t step);
  uint64_t step() const { return step_; }
  uint32_t attempt() const { return attempt_; }

  // ---- A member's words. Each call appends to `told`.
  // Its live attempt, which its rank `by` has begun by a discard, and the settings with which the
  // first rank began that. A report of an older one is void.
  void Stand(int member, uint32_t attempt, int by, const std::optional<StepSettings>& settings,
             std::vector<ToMember>& told);
  // Of this attempt, with its ranks' vote, if all have sealed with the same. If that attempt is not
  // live here, the member is told of that instead.
  void Report(int member, uint32_t attempt, StepReport report, std::optional<StepVote> vote,
              std::vector<ToMember>& told);
  // Some member's ranks have begun the step, or an attempt at it.
  bool has_begun() const;
  // Its report counts no more.
  void Withdraw(int member);
  // Answers to CheckUses, and to Norm or VoteAgain. Those to an older round are void: a report has
  // been withdrawn since, or votes differed.
  void Checked(int member, uint64_t round, std::optional<SealRefusal> refusal,
               std::vector<ToMember>& told);
  void Vote(int member, uint64_t round, StepVote vote, std::vector<ToMember>& told);

  // ---- Trials, of a draft that bounds do not settle (state_trial.h). Precondition: is_ready.
  void Try(std::vector<ToMember>& told);
  void Tried(int member, uint64_t round, StateTrial trial);
  bool awaits_trials() const;
  // Of all members. Null: it is not complete.
  std::optional<StateTrial> trial() const;

  // ---- The result
  uint64_t round() const { return round_; }
  // Of all reports, once they are there and checked. Null before.
  const StepSummary* summary() const { return is_checked() ? &*summary_ : nullptr; }
  // All members have voted the same on that: it can be decided.
  bool is_ready() const;
  // Precondition: is_ready.
  const StepVote& vote() const { return *members_[0].vote; }
  // The members that have not reported the live attempt; those that have not voted.
  std::vector<int> Unreported() const;
  std::vector<int> Unvoted() const;

 private:
  struct Member {
    uint32_t attempt = 0;
    std::optional<StepSettings> settings;
    std::optional<StepReport> report;
    std::optional<StepVote> first_vote;  // With its report.
    bool checked = false;                // In this round, as the next.
    std::optional<StepVote> vote;
    bool tries = false;
    std::optional<StateTrial> trial;
  };

  bool is_checked() const;
  // Tells every member that began the live attempt otherwise than the lowest one that has.
  // Returns them.
  std::vector<int> CompareSettings(std::vector<ToMember>& told);
  // All have reported.
  void TakeReports(std::vector<ToMember>& told);
  void AskForVotes(std::vector<ToMember>& told);
  void RefuseAll(const SealRefusal& why, std::vector<ToMember>& told);
  void VoidReports();
  void CompareVotes(std::vector<ToMember>& told);

  const JobSpec& spec_;
  const Layout& layout_;
  const std::vector<int> first_ranks_;
  uint64_t step_ = 0;
  uint32_t attempt_ = 0;
  int live_since_ = 0;  // The rank whose discard began the live attempt.
  std::vector<Member> members_;
  uint64_t round_ = 0;  // Counts the summaries, and the votes that differed.
  std::optional<StepSummary> summary_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_LEAD_H_
