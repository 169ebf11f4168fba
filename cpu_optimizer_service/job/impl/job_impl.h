// The implementation of Job. The gate says what may happen, the parts have the state, and the
// functions here put them together, by subject in the sources of this folder (README.md).
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_IMPL_JOB_IMPL_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_IMPL_JOB_IMPL_H_

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/core/job_core.h"
#include "cpu_optimizer_service/job/core/job_memory.h"
#include "cpu_optimizer_service/job/core/job_record.h"
#include "cpu_optimizer_service/job/core/membership.h"
#include "cpu_optimizer_service/job/job.h"
#include "cpu_optimizer_service/job/kept/journal.h"
#include "cpu_optimizer_service/job/kept/kept_job.h"
#include "cpu_optimizer_service/job/members/seats.h"
#include "cpu_optimizer_service/job/members/tasks.h"
#include "cpu_optimizer_service/job/members/words.h"
#include "cpu_optimizer_service/job/state/loader.h"
#include "cpu_optimizer_service/job/state/saver.h"
#include "cpu_optimizer_service/job/state/state_origin.h"
#include "cpu_optimizer_service/job/state/state_view.h"
#include "cpu_optimizer_service/job/state/state_writes.h"
#include "cpu_optimizer_service/job/step/orthogonal_parts.h"
#include "cpu_optimizer_service/job/step/step_decision.h"
#include "cpu_optimizer_service/job/step/step_machine.h"
#include "cpu_optimizer_service/job/update/decider.h"
#include "cpu_optimizer_service/job/update/executor.h"

namespace ballast {

// The times of a step's stages.
struct StepClock {
  using Time = std::chrono::steady_clock::time_point;
  Time opened;
  std::optional<Time> first_seal;  // From then on ranks wait for each other.
  Time sealed;
  Time decided;
  int64_t sealed_ns = 0;  // For the trace.

  // Whether any rank has sealed now.
  void SealsAre(bool there) {
    if (!there) first_seal.reset();
    if (there && !first_seal.has_value()) first_seal = std::chrono::steady_clock::now();
  }
  std::optional<double> SecondsSinceFirstSeal() const;
  StepTimes TimesUntilNow() const;
};

class JobImpl : public Job {
 public:
  // A job without its memory. INVALID_ARGUMENT, with the reason. Before Allocate only spec(),
  // uid(), derivation() and layout() may be called. `is_there`: it has its memory, whatever the
  // limit.
  static absl::StatusOr<std::shared_ptr<JobImpl>> Describe(JobIdentity identity,
                                                           const JobEnvironment& environment,
                                                           bool is_there = false);
  // Takes the job's share of the budget. RESOURCE_EXHAUSTED.
  absl::Status Reserve();
  // `origin`: the job that it is derived from; null: none, or from a checkpoint. Reserves, too.
  absl::Status Allocate(JobImpl* origin = nullptr);
  // From here on a later process finds the job.
  absl::Status Establish();
  // The job that an earlier process left in named memory under this uid, ready, with a decided step
  // completed. NOT_FOUND: the earlier process had not finished creating it. Other errors, in one
  // line: it cannot be taken over. `story` gets its history for the log.
  static absl::StatusOr<std::shared_ptr<JobImpl>> TakeOver(const std::string& uid,
                                                           const JobEnvironment& environment,
                                                           std::string& story);

  using Job::AbortStep;
  using Job::Attach;
  using Job::Load;
  using Job::OpenStream;
  using Job::Save;
  using Job::TakeSnapshot;
  using Job::UndoStep;

  const JobSpec& spec() const override { return core_.identity.spec; }
  const Layout& layout() const override { return core_.layout; }
  const std::string& uid() const override { return core_.identity.uid; }
  const Derivation& derivation() const override { return core_.identity.derivation; }
  JobStatus Status() const override;
  HistoryView History(const HistoryQuery& query) const override {
    return core_.history.Read(query);
  }
  Attachment Position() const override;
  Pending Attach(AttachRequest request, Done<Attachment> done) override;
  Pending OpenStream(OpenStreamRequest request, std::shared_ptr<RankListener> listener,
                     Done<std::unique_ptr<RankStream>> done) override;
  absl::StatusOr<Uploader> BeginFirstWeights(const RankHolder& holder, FirstState state) override;
  absl::StatusOr<bool> WriteInitialWeights(int64_t chunk,
                                           absl::Span<const absl::Span<const std::byte>> payload,
                                           const std::optional<Uploader>& uploader) override;
  absl::StatusOr<StateWriter> BeginStateWrite(const RankHolder& holder, StateWrite write) override {
    BALLAST_RETURN_IF_ERROR(CheckAlone("write state"));
    return writes_.Begin(holder, std::move(write));
  }
  absl::Status WriteStateChunk(const StateWriter& writer, int64_t chunk,
                               absl::Span<const absl::Span<const std::byte>> payload) override {
    return writes_.WriteChunk(writer, chunk, payload);
  }
  Pending EndStateWrite(const StateWriter& writer, Done<bool> done) override {
    return writes_.End(writer, std::move(done));
  }
  void DropStateWrite(const StateWriter& writer) override { writes_.Drop(writer); }
  absl::StatusOr<std::unique_ptr<StateWriting>> PrepareStateWrite(StateWrite write) override {
    BALLAST_RETURN_IF_ERROR(CheckAlone("write state"));
    return writes_.Prepare(std::move(write));
  }
  Pending CommitStateWrite(std::shared_ptr<StateWriting> writing, Done<uint64_t> done) override {
    return writes_.Commit(std::move(writing), std::move(done));
  }
  absl::Status ReadShard(Generation generation, uint64_t step, int chunk,
                         absl::Span<std::byte> out) override;
  absl::Status ReadDirections(uint64_t step, int chunk, absl::Span<std::byte> out) override;
  absl::StatusOr<bool> ShareDirections(uint64_t step, int chunk,
                                       const std::string& process_id) override;
  absl::StatusOr<std::vector<HyperParameters>> ValuesOfDirections(uint64_t step) override;
  absl::Status GiveOrthogonal(const RankHolder& holder, uint64_t step, int64_t chunk,
                              absl::Span<const absl::Span<const std::byte>> payload) override;
  void TellWaiting() override;
  std::optional<double> SecondsSinceFirstSeal() const override;
  Pending AbortStep(Done<uint64_t> done) override;
  Pending UndoStep(UndoRequest request, Done<uint64_t> done) override;
  absl::StatusOr<HyperParameters> UpdateGroup(int group,
                                              const HyperParameterOverrides& changes) override;
  Pending TakeSnapshot(std::vector<int> parameters, Done<Snapshot> done) override;
  Pending Save(SaveRequest request, Done<CheckpointInfo> done) override;
  Pending Load(LoadRequest request, Done<CheckpointInfo> done) override;
  std::string StateHash() override;

  uint64_t OpenLinkToMember(int member, std::shared_ptr<WordSink<LeadWord>> sink) override;
  uint64_t OpenLinkToLead(std::shared_ptr<WordSink<MemberWord>> sink) override;
  void CloseLink(uint64_t number, const absl::Status& why) override;
  void NoteRoundTrip(uint64_t link, double seconds) override;
  Follow FollowOf(int member) const override;
  void CannotReach(int member, const absl::Status& why) override;
  void HearMember(int member, uint64_t link, MemberWord word) override;
  void HearLead(uint64_t link, LeadWord word) override;
  absl::StatusOr<MemoryBudget::Reservation> ReserveRankMemory(int rank) override;
  absl::Status GiveRankMemory(const RankHolder& holder,
                              std::shared_ptr<const RankMemory> memory) override;
  void DropRankMemory(int rank, const RankMemory* memory) override;
  absl::StatusOr<Trace> TraceSteps(uint32_t steps,
                                   const std::function<bool()>& still_wanted) override;
  TraceRecorder& trace() override { return core_.trace; }
  Use use() const override;

  uint64_t creation() const { return core_.identity.creation; }
  bool has_link_to_lead() const {
    JobCore::Lock lock(core_);
    return to_lead_.sink != nullptr;
  }
  int member() const { return core_.identity.member; }
  const std::string& lead_principal() const { return core_.identity.lead_principal; }
  bool is_lead() const { return core_.identity.is_lead(); }
  // No step has begun, and none is being decided.
  bool IsBetweenSteps() const;
  // A step has begun that no rank with a stream can finish.
  bool IsAbandoned() const;
  // Ends all streams with this, as a broken transport would.
  void TellStreams(const absl::Status& why);
  // Waits for a running update, then clears the step and detaches all streams. Closing again is OK.
  // With `unused`: FAILED_PRECONDITION if it has been used since then, or has a stream. With `here`
  // only this member's part. Otherwise the lead closes the job at all members and waits for them;
  // another member: FAILED_PRECONDITION (OTHER_MEMBER_LEADS).
  Pending Close(std::optional<Use> unused, bool here, Done<bool> done);
  Pending Supersede(uint64_t epoch, Done<bool> done) override;
  bool is_superseded() const override {
    JobCore::Lock lock(core_);
    return core_.record.superseded_by != 0;
  }
  // Being closed, and some member has not closed its part yet.
  bool is_closing() const {
    JobCore::Lock lock(core_);
    return !core_.record.closing.empty() && !core_.record.closed;
  }
  std::string CreationWaitsFor() const override;
  std::string WhoHasNotClosed() const;  // "member gpu3:7070"
  // For all other members.
  void TellAll(const LeadWord& word);
  MemberSeats& seats() { return seats_; }
  // Whoever waits for other members gets this.
  void GiveUpOthers(const absl::Status& why);
  // This member's; `error`: why it has none.
  MemberWord::Seat Seat(absl::Status error) const;
  // Closes this job and makes `derived` continue, in that order for a later process. False, without
  // a change: `derived` lacks weights again. FAILED_PRECONDITION: this job has advanced since, or
  // has a step in progress.
  Pending GiveWayTo(std::shared_ptr<JobImpl> derived, Done<bool> done);
  bool has_all_first_weights() const {
    JobCore::Lock lock(core_);
    return core_.first_weights.missing() == 0;
  }

 private:
  class Stream;

  JobImpl(JobIdentity identity, Layout layout, const JobEnvironment& environment);
  std::shared_ptr<JobImpl> Self() { return std::static_pointer_cast<JobImpl>(shared_from_this()); }

  // ---- job_impl.cc
  // The visible step: 0 while first weights are awaited, whichever step they begin at. In a derived
  // job it is known from the start.
  uint64_t committed_step() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return core_.first_weights.complete() || origin_.is_derived() ? core_.record.committed_step : 0;
  }
  Attachment PositionNow() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  Use UseNow() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status CheckUnused(const Use& unused) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Gets again without second versions, if those do not fit.
  absl::Status OrWithoutSpeculation(absl::FunctionRef<absl::Status()> get);
  // All that memory_.need says.
  absl::Status ReserveNeed();
  absl::Status AllocateParts();
  // Ends this job; its listeners get `why`. With `everywhere` at the lead of others, it waits for
  // these.
  void CloseNow(const std::string& why, bool everywhere) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The generation has risen, and nothing is in progress: whoever still asks or waits is refused.
  void StopServing() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // It is over once all members have closed their parts, or, with `here`, now.
  void EndClosing(bool here = false) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // UNIMPLEMENTED with several members: `what` would act on one of them alone.
  absl::Status CheckAlone(absl::string_view what) const;
  // FAILED_PRECONDITION (OTHER_MEMBER_LEADS).
  absl::Status CheckLeads() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // ---- job_tasks.cc
  // To a member that stands, or stood, behind this lead; the end of a task to any.
  MemberTasks::Sent SendTo(int member, const LeadWord& word)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeFrom(int member, MemberWord::Done& done, std::vector<ToMember>& told)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeFrom(int member, MemberWord::NotLoaded& not_loaded, std::vector<ToMember>& told)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeFrom(int member, MemberWord::WantsSave& wants, std::vector<ToMember>& told)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // One save answers all members that want one.
  void SaveForOthers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void AnswerWanted(const absl::StatusOr<CheckpointInfo>& saved)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Take(LeadWord::Task& task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Take(LeadWord::Load& load) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Take(LeadWord::Saved& saved) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Another member's call for a save, to its lead. Fails with its link.
  void AskForSave(Done<CheckpointInfo> done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void FailSaves(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  bool OthersHaveLoaded() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // A part of a load has ended.
  void SayLoaded(uint64_t loads, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // ---- job_derive.cc. The first ones are called before any other code knows the job.
  // Its own state during a read (StopReading).
  struct Lent {
    CheckpointIndex index;
    StepHistory history;
    SaveSchedule save_schedule;
    std::string resumed_uid;
    std::vector<std::string> ancestors;
    uint64_t moves = 0;
  };
  absl::StatusOr<Lent> Lend();
  absl::Status Inherit(JobImpl& origin);
  absl::Status InheritCheckpoint(const std::string& path, JobImpl* origin);
  // For the origin.
  absl::Status CheckMayDerive() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  enum class Succession : uint8_t { kDone, kMissing, kMoved };
  Succession TakePlace(uint64_t origin_moves);

  // ---- job_ranks.cc
  // Where a call that attaches waits; 0: not there.
  struct AttachWaits {
    uint64_t turn = 0;  // In the gate.
    uint64_t ask = 0;   // For the lead's answer.
    // The step that the lead was asked to give up; 0: none.
    uint64_t given_up = 0;
  };
  void AttachInTurn(AttachRequest request, std::shared_ptr<AttachWaits> waits,
                    Done<Attachment> done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void AttachByLead(AttachRequest request, std::optional<std::string> give_up,
                    std::shared_ptr<AttachWaits> waits, Done<Attachment> done)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void AttachNow(const AttachRequest& request, std::shared_ptr<AttachWaits> waits,
                 Done<Attachment> done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::StatusOr<std::unique_ptr<RankStream>> OpenNow(const OpenStreamRequest& request,
                                                      std::shared_ptr<RankListener> listener)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void EndOlderStream(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void CloseStream(const StreamKey& key, const std::string& why);
  // Whether the rank takes part in the step in progress.
  bool HasBegun(int rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  RankPosition PositionOf(int rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // ---- job_generation.cc
  // Clears the undecided step and frees all ranks and their shared memory; tells their listeners
  // `reason`. `then` runs under the lock once all is cleared, before any other call's turn.
  void RaiseGeneration(std::string reason, absl::AnyInvocable<void() &&> then)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void RaiseTo(const Generation& generation, std::string reason, absl::AnyInvocable<void() &&> then)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The rank's part of first weights, or of a write of state, has to be sent again.
  void ForgetUploads(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The step in progress is lost. If the job skips such steps (OnAbort) and all ranks have begun
  // it, decides it as a skip because of `why`; otherwise raises the generation. `then` is as above.
  void GiveUpStep(const std::string& why, absl::AnyInvocable<void() &&> then)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  bool MaySkipStep() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // For the log.
  void TellDecided(uint64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void SkipStep(KeptDecision skip, absl::AnyInvocable<void() &&> then)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // What is known of the part, when the step is given up. Before the record's flip.
  void ForgetPart() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Whether this is the last step, and was skipped because it was lost.
  bool WasLost(uint64_t step) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The decision of SkipStep.
  KeptDecision SkipOf(absl::string_view why) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void FinishClearing() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Drops everything given; the job is between steps.
  void ClearStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // ---- job_step.cc
  absl::Status BeginStep(const StreamKey& key, StepAttempt at, const StepSettings& settings);
  absl::Status EndMicroStep(const StreamKey& key, StepAttempt at, uint32_t micro_step,
                            UsedParameters used);
  absl::StatusOr<std::optional<SealRefusal>> Seal(const StreamKey& key, StepAttempt at,
                                                  uint32_t micro_steps,
                                                  const std::optional<StepVote>& vote,
                                                  uint32_t refusals_heard);
  absl::Status Report(const StreamKey& key, StepAttempt at, const RankReport& report);
  absl::Status Vote(const StreamKey& key, StepAttempt at, const StepVote& vote,
                    uint32_t refusals_heard);
  Pending Discard(const StreamKey& key, StepAttempt at, Done<bool> done);
  absl::StatusOr<bool> DiscardNow(const StreamKey& key, StepAttempt at)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The state before the step in progress, or the next one.
  StepBefore Before() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status CheckHasWeights() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The next step may begin: UNAVAILABLE if the service is stopping.
  absl::Status CheckMayOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Carries out what follows from a rank's input.
  void Perform(StepEffects effects) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void UseTerms(const StepTerms& terms) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void ForgetGiven(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TellRanks(std::vector<StepEffects::ToRank> told) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // `end` counts the micro-steps up to the one that `what` names.
  absl::Status CheckMicroSteps(absl::string_view what, int64_t end) const;

  // ---- job_contribution.cc
  Pending StopProvisional(const StreamKey& key, StepAttempt at, uint32_t micro_step_begin,
                          absl::Span<const int64_t> chunks, Done<bool> done);
  // For these chunks, see StopProvisional.
  void SupersedeUpdates(int rank, StepAttempt at, uint32_t micro_step_begin,
                        absl::Span<const int64_t> chunks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::StatusOr<ContributionResult> Contribute(const StreamKey& key, const Contribution& given);
  absl::Status CheckContribution(int rank, const Contribution& given) const;
  // A contribution that the ledger accepts: the rest of its work, outside the lock.
  struct Accepted {
    // kRepeat, kDiscarded: no more work.
    ContributionResult result = ContributionResult::kAdded;
    bool borrowed = false;                     // It stays in its place; only its sums are computed.
    std::shared_ptr<const RankMemory> memory;  // Its memory, if in place.
    Executor::Ahead ahead;
    uint64_t epoch = 0;  // For KeepContribution.
  };
  absl::StatusOr<Accepted> Accept(const StreamKey& key, const Contribution& given)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void AddToGradient(const Contribution& given, const RankMemory* memory, RedoLane* lane);
  // ---- job_members.cc
  // Since when there is no link to another member, and why. At first there is one.
  struct NoLink {
    std::optional<std::chrono::steady_clock::time_point> since;
    std::string why;

    void Begin(const absl::Status& because);
    // For people, after who is meant.
    std::string Of(absl::string_view who) const;
  };
  // At the lead, by member.
  struct Link {
    std::shared_ptr<WordSink<LeadWord>> sink;  // Null: there is no link.
    uint64_t number = 0;
    MemberWord::Standing stands;  // Its last one on this link, without settings.
    bool has_stood = false;  // It was behind this lead: so it is, or what it needs is on the link.
    uint64_t report = 0;     // The number of its last one.
    NoLink no_link;
    double round_trip_seconds = 0;  // 0: unknown.
  };
  // At another member.
  struct LeadLink {
    struct Asked {
      MemberWord word;
      JobCore::Turn then;
    };
    std::shared_ptr<WordSink<MemberWord>> sink;  // Null: there is no link.
    uint64_t number = 0;
    std::optional<MemberWord> report;  // Of the reported part.
    std::optional<int> wants_discard;
    uint64_t norm_round = 0;
    NoLink no_link;
    std::string waits;               // What the lead has said of the reported step.
    std::map<uint64_t, Asked> asks;  // Without an answer yet.
    std::map<uint64_t, Done<CheckpointInfo>> saves;
    uint64_t last_ask = 0;  // Of both.
  };
  // Whom a step waits for, and who is to be told.
  struct Awaited {
    uint64_t step = 0;
    std::vector<int> ranks;
    std::map<int, std::string> members;  // And what is known of them, in a line.
    std::string why;                     // RankListener::OnWaiting.
    Listeners waiting;                   // Of ranks here.
  };
  // Of the ranks here; the lead's, of all ranks.
  Awaited AwaitedHere() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  Awaited AwaitedByAll() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Other members that a load, a save or the step waits for, with what is known of them.
  std::map<int, std::string> AwaitedMembers() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void AddMembers(JobStatus& status) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // This member's, if all of its first weights are there and may not be brought again meanwhile.
  std::optional<FirstState> FirstStateHere() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The lead begins the job, once all members have their first weights.
  void BeginIfAllHaveWeights() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void RefuseFirstStates(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Ends the ranks' streams.
  void EndForOtherStates(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  FirstState StateNow() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void BeginWith(const FirstState& state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // What happens to the reported part where nothing else works on it: the lead decides, if it is
  // ready; the update is tried; the lead's decision is carried out.
  using NextForReported = std::variant<std::monostate, LeadWord::OfStep::Try, LeadWord::Decided>;

  bool is_alone() const { return spec().member_count() == 1; }
  bool is_reported() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return core_.gate.phase() == Phase::kReported;
  }
  MemberWord::Seat SeatNow(absl::Status error) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  uint64_t DecidedStep() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The member has taken all that this lead has told it.
  bool IsBehind(const MemberWord::Standing& stands) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Of the step after the decided one.
  StepLead& LeadOfStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  bool IsInStep(int member) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void HearNow(int member, uint64_t link, MemberWord word) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeFrom(int member, MemberWord::Seat& seat, std::vector<ToMember>& told)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeFrom(int member, MemberWord::Standing& stands, std::vector<ToMember>& told)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeFrom(int member, MemberWord::Report& report, std::vector<ToMember>& told)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeFrom(int member, MemberWord::Checked& checked, std::vector<ToMember>& told)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeFrom(int member, MemberWord::Vote& vote, std::vector<ToMember>& told)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeFrom(int member, MemberWord::Tried& tried, std::vector<ToMember>& told)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeFrom(int member, MemberWord::Ask& ask, std::vector<ToMember>& told)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TellMembers(std::vector<ToMember> told) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // In a section, as TellAll.
  void TellAllNow(const LeadWord& word) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TellDecision(int member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TellAllDecision() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Of the last generation.
  std::string WhyRaised() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // As Loader::Others has it.
  absl::Status CheckNoneHasBegun() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // True: the member has not heard of the last undo.
  bool TellUndo(int member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Say(MemberWord word) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The lead says it to itself, as the next two.
  void SayStanding() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void SayVote() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void SayTrial(uint64_t round, StateTrial trial) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // `then` runs under the lock when the answer has come, and this member stands where the lead
  // stood. UNAVAILABLE: ask again.
  uint64_t AskLead(std::optional<std::string> give_up, JobCore::Turn then)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Its caller has gone.
  void CancelAsk(uint64_t id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Takes the word in its turn.
  void Hear(LeadWord word) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Take(LeadWord::OfStep& word) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Take(LeadWord::Decided& decided) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Take(LeadWord::Raised& raised) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Take(LeadWord::Undo& undo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Take(LeadWord::Answer& answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Take(LeadWord::Begin& begin) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Take(LeadWord::OtherStates& other) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Take(LeadWord::Keep& /*keep*/) {}  // The engine's to hear, as the next.
  void Take(LeadWord::Close& /*close*/) {}
  void TakeOfStep(uint64_t step, ToMember::Live& live) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeOfStep(uint64_t step, ToMember::OtherSettings& other)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeOfStep(uint64_t step, ToMember::Refused& refused)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeOfStep(uint64_t step, ToMember::CheckUses& check)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeOfStep(uint64_t step, LeadWord::OfStep::Norm& known)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeOfStep(uint64_t step, LeadWord::OfStep::VoteAgain& again)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeOfStep(uint64_t step, LeadWord::OfStep::Try& tried)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeOfStep(uint64_t step, LeadWord::OfStep::Waits& waits)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The error of a rank that begins an attempt whose settings have been refused.
  absl::Status CheckSettings(int rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void GoOnIfReady() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void GoOnWith(NextForReported next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void DoNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void AwaitLead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The part is not reported any more.
  void ForgetReport() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // ---- job_decision.cc
  // The step is sealed, with all known votes: decides it once there are no readers.
  void AwaitDecision() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // On an engine's thread: waits in the gate for running computations.
  void RunDecision();
  // Then, alone: sums what no task has summed, and what chunks share, and decides.
  void SumAndDecide(const std::vector<bool>& claimed, uint64_t step);
  // Calls `then` under the lock, unless the step was aborted meanwhile.
  void GoOnDeciding(absl::FunctionRef<void()> then);
  // The sums are known: reports them, and goes on.
  void Report(PartSums sums) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The lead, once all have reported and voted. Has the draft tried without the lock, if necessary.
  void DecideFromReports() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Decide(Draft draft) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Decide(LeadWord::Decided decided) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The commit point of this member.
  void KeepDecision(KeptDecision decision, Draft draft) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The hyper-parameters once such a step is over: with its changes, and those by operators.
  std::vector<HyperParameters> ValuesAfter(const StepSettings& settings, const StepVote& vote) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Commit(UpdatePlan plan);
  // For a step that is skipped, or whose chunks are all at their new state, or half of it.
  void RecordStep(KeptDecision decided, const StepTimes& times, bool has_second_round = false)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void AddToHistory(StepRecord record, bool coverage_complete)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The step is over, for ranks and all that wait.
  void EndStep(Listeners listeners, uint64_t step, double update_seconds, std::string left)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // ---- job_second_round.cc
  // While it is outstanding.
  struct SecondRoundNow {
    std::shared_ptr<const StepUpdate> update;
    std::vector<uint64_t> streams;  // By rank: which got the first round's weights.
    std::vector<bool> told;         // By rank: it knows of the round, in this generation.
    bool is_told = false;           // All ranks with a stream.
    std::optional<StepClock::Time> first_given;  // A rank has given all, since then.
  };
  // The job's record says that it is outstanding.
  void BeginSecondRound() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // All of O is there. bounds, largest: Executor::DecideSecond.
  void DecideSecondRound(const StepUpdate& update, const std::vector<StateBounds>& bounds,
                         const std::vector<double>& largest);
  // Once all is given, and the ranks have been told of the round: its end is to come after that.
  void GoOnIfGiven() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // By the service, beside this thread.
  void Orthogonalize() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The service does it instead of the ranks, once none of them is writing. Precondition: it is
  // awaited.
  void StopAwaitingOrthogonal(const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // If it is awaited, and no rank has a stream.
  void OrthogonalizeIfAbandoned();
  std::optional<double> SecondsSinceFirstGiven() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The generation rises, or the state becomes another one.
  void ForgetOrthogonal() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status CheckNoSecondRound(int rank, absl::string_view does, uint64_t step) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status CheckIsAtStep(uint64_t step) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // nullopt: they are in shared memory.
  absl::Status CheckOwnChunk(int rank, int64_t chunk, std::optional<int64_t> bytes) const;
  absl::Status CheckHasDirections(uint64_t step, int chunk) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // All chunks are at the new state.
  void RecordSecondRound() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status TakeOverSecondRound(std::string& story) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // ---- job_state.cc
  int64_t MostTraceEvents(uint32_t steps) const;

  // ---- job_status.cc
  int64_t RankMemoryBytesNow() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  RankProgress ProgressOf(int rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // ---- job_recover.cc
  class KeptRankMemory;
  absl::Status TakeOverState(std::string& story);
  void TakeOverRanks(const std::vector<KeptJob::Rank>& left, std::string& story)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status CheckStepsInTable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The decided step. It may have a second round.
  absl::Status RollForward() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // All chunks, through one round.
  void RollForward(const StepUpdate& update, Round round);
  absl::Status CheckUpdateLanes(uint64_t step);
  absl::Status TakeOverStep(std::string& story) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status Replay(const StepWord& word) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Of each rank's attempt, into the gradients' memory and the ledger.
  absl::Status RestoreContributions(const std::vector<uint32_t>& attempts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore core_;
  JobMemory memory_;
  Membership members_;
  Journal journal_;
  const StateView view_;
  MemberTasks tasks_;
  Saver saver_;
  StateOrigin origin_;
  Loader loader_;
  StateWrites writes_;
  StepMachine machine_ ABSL_GUARDED_BY(job_lock);
  OrthogonalParts orthogonal_ ABSL_GUARDED_BY(job_lock);
  std::optional<SecondRoundNow> second_round_ ABSL_GUARDED_BY(job_lock);
  StepLead lead_ ABSL_GUARDED_BY(job_lock);
  std::vector<Link> links_ ABSL_GUARDED_BY(job_lock);
  struct WantedSave {
    int member = 0;
    uint64_t link = 0;
    uint64_t id = 0;
  };
  std::vector<WantedSave> wanted_saves_ ABSL_GUARDED_BY(job_lock);
  MemberSeats seats_;
  bool is_established_ ABSL_GUARDED_BY(job_lock) = false;
  std::vector<Done<bool>> closers_ ABSL_GUARDED_BY(job_lock);  // They wait until it is closed.
  // What members have said before Establish.
  struct Early {
    int member = 0;
    uint64_t link = 0;
    MemberWord word;
  };
  std::vector<Early> early_ ABSL_GUARDED_BY(job_lock);
  LeadLink to_lead_ ABSL_GUARDED_BY(job_lock);
  uint64_t last_link_ ABSL_GUARDED_BY(job_lock) = 0;
  // Of the step that the lead has begun; of any member.
  std::optional<StepClock::Time> first_report_ ABSL_GUARDED_BY(job_lock);
  NextForReported next_ ABSL_GUARDED_BY(job_lock);
  // The last attempt that this member's ranks began otherwise than others.
  struct RefusedSettings {
    Generation generation = 0;
    StepAttempt at = 0;
    absl::Status why;
  };
  RefusedSettings refused_settings_ ABSL_GUARDED_BY(job_lock);
  absl::Status other_states_ ABSL_GUARDED_BY(job_lock);   // Of the last first weights.
  std::string raised_because_ ABSL_GUARDED_BY(job_lock);  // The last generation.
  StepClock clock_ ABSL_GUARDED_BY(job_lock);
  std::optional<StepNorm> told_norm_ ABSL_GUARDED_BY(job_lock);  // The last one.
  Executor executor_;
  const Decider decider_;
  uint64_t origin_moves_ ABSL_GUARDED_BY(job_lock) = 0;  // The origin's, when this was derived.
  int64_t last_accumulators_in_use_ ABSL_GUARDED_BY(job_lock) = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_IMPL_JOB_IMPL_H_
