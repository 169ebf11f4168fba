// What both players need: the engine that a history is played on, or those of all members, its job,
// the model, and the comparison of the two.
#ifndef BALLAST_TESTS_HISTORIES_ENGINE_JOB_UNDER_TEST_H_
#define BALLAST_TESTS_HISTORIES_ENGINE_JOB_UNDER_TEST_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "tests/histories/engine/deaths.h"
#include "tests/histories/history.h"
#include "tests/histories/members/host.h"
#include "tests/histories/members/linked_engines.h"
#include "tests/histories/memory_file_system.h"
#include "tests/histories/model.h"

namespace ballast::histories {

// How often something happened, so that a generator that has gone blunt is noticed.
struct Tally {
  int64_t committed = 0;
  int64_t clipped = 0;
  int64_t skipped = 0;
  int64_t with_unused = 0;
  int64_t refused_seals = 0;
  int64_t spoilt = 0;
  int64_t repeats = 0;
  int64_t cuts = 0;
  int64_t discarded = 0;
  int64_t norms = 0;      // That ranks looked at,
  int64_t spikes = 0;     // and discarded an attempt for,
  int64_t abandoned = 0;  // or voted to abandon the step for.
  int64_t refused_votes = 0;
  int64_t given_up = 0;  // Steps that could not be kept, and were skipped.
  int64_t not_last = 0;  // Contributions that may_guess to be the last, and were not.
  int64_t aborted = 0;
  int64_t aborted_at_decision = 0;
  int64_t made_by_service = 0;  // Second rounds that were aborted.
  int64_t undone = 0;
  int64_t written = 0;
  int64_t derived = 0;
  int64_t replaced = 0;
  int64_t loaded = 0;
  int64_t refused_calls = 0;
  int64_t snapshots = 0;
  int64_t speculated = 0;
  int64_t published = 0;
  int64_t redone = 0;
  int64_t in_place = 0;                    // Contributions that were read at once where they lay,
  int64_t borrowed = 0;                    // and until their step was over.
  int64_t deaths = 0;                      // Of the service's process,
  int64_t carried_out = 0;                 // with a decided step that the next one carries out,
  std::map<std::string, int64_t> died_at;  // by the store.
  int64_t over_members = 0;                // Steps committed by several members, which
  int64_t words = 0;                       // said so many words,
  int64_t link_cuts = 0;                   // with so many links cut,
  int64_t member_deaths = 0;               // and so many deaths of a member.
};
std::string Describe(const Tally& tally);

// The engine that histories are played on, one after the other.
class Engines {
 public:
  // The same engine as long as neither changes: the number of threads is the process's, so there is
  // one engine at a time. The one before is gone, and all of its jobs are by then. The jobs of one
  // that `may_die` outlive it in named memory.
  Engine& WithThreads(int threads, bool may_die = false);
  // There is none from now on: members have their own.
  void Clear();
  // Of an engine that may die.
  Deaths& deaths() { return *deaths_; }
  // The engine has died, and nobody uses it any more: the next one, with what it left.
  absl::StatusOr<Engine*> TakeOver();
  MemoryFileSystem& files() { return files_; }
  Tally& tally() { return tally_; }
  std::string NewJobName() { return absl::StrCat("job", ++jobs_); }

 private:
  void Start();

  MemoryFileSystem files_;
  std::unique_ptr<Deaths> deaths_;  // Null: it does not die.
  std::unique_ptr<NamedMemory> memory_;
  std::unique_ptr<Engine> engine_;
  int threads_of_engine_ = 0;
  Tally tally_;
  int64_t jobs_ = 0;
};

// A failure of the history: what was expected, and what came.
template <typename... Parts>
absl::Status Wrong(const Parts&... parts) {
  return absl::InternalError(absl::StrCat(parts...));
}
absl::Status ExpectCode(absl::StatusCode expected, const absl::Status& came,
                        const std::string& what);

// One job, and what should become of it. Used from one thread.
//
// With members: between Expose and Settle one of them may die, links may be cut, and only Ask and
// the hosts reach the job. All else needs it to be settled.
class JobUnderTest {
 public:
  // Creates the job with its first weights. `may_die`: the engine.
  JobUnderTest(Engines& engines, const JobPlan& plan, bool may_die = false);
  ~JobUnderTest();  // Closes the job: streams and snapshots are gone by then.

  const JobPlan& plan() const { return plan_; }
  bool has_members() const { return linked_ != nullptr; }
  Job& job() { return *parts_[lead_]; }  // The lead's.
  Job& home(int rank) { return *parts_[spec_.home(rank)]; }
  const std::vector<std::shared_ptr<Job>>& parts() const { return parts_; }
  const JobSpec& spec() const { return spec_; }
  Host& host(int member) { return has_members() ? linked_->host(member) : host_; }
  Host& host_of(int rank) { return host(spec_.home(rank)); }
  LinkedEngines& linked() { return *linked_; }
  const Layout& layout() const { return layout_; }
  Engine& engine() { return *engine_; }
  Deaths& deaths() { return has_members() ? *linked_->deaths() : engines_.deaths(); }
  // The last step is undone, and with it what members heard with its decision.
  void Undone() {
    model_.Undo();
    changed_unheard_ |= changed_before_commit_;
  }
  Model& model() { return model_; }
  const Model& model() const { return model_; }
  Tally& tally() { return engines_.tally(); }
  uint64_t next_step() const { return model_.state().committed_step + 1; }

  // Members may die, if one is to, and are reached only by Ask.
  void Expose();
  // All members are there and have heard each other.
  absl::Status Settle();
  // A call of a member's job, of the process that is there. UNAVAILABLE: it has died since.
  template <typename T, typename Call>
  absl::StatusOr<T> Ask(int member, Call&& call) {
    const auto visit = host(member).Enter();
    BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, visit->engine().FindJob(spec_.name));
    return visit->template Await<T>([&](Done<T> done) { call(*job, std::move(done)); });
  }
  // The same of the lead, while members may die, until one has answered it. Then all are settled.
  template <typename T, typename Call>
  absl::StatusOr<T> AskLead(Call&& call) {
    for (int turn = 0;; ++turn) {
      if (has_members()) BALLAST_RETURN_IF_ERROR(Settle());
      Expose();
      absl::StatusOr<T> answer = Ask<T>(lead_, call);
      if (has_members()) BALLAST_RETURN_IF_ERROR(Settle());
      if (!has_members() || !IsPassing(answer.status()) || turn == kMostTurns) return answer;
    }
  }

  // With members: at all of them, before anything else.
  absl::Status Create();
  absl::Status UploadWeights();
  // With members: at all of them.
  absl::Status Close();
  // The engine has died, and nothing of it is held any more but this job: it goes on in the next.
  absl::Status TakeOver();
  // What has the job's name by now.
  absl::Status FindAgain();
  absl::Status Save();
  // nullopt: nothing has been saved.
  absl::StatusOr<std::optional<CheckpointInfo>> Load();
  absl::Status ChangeGroup(int group, const HyperParameterOverrides& changes);

  // What ranks are to give in the second round that is outstanding: O by chunk; empty: nothing.
  absl::StatusOr<std::vector<std::vector<uint16_t>>> MakeOrthogonal();
  // The weights of a chunk as they should be returned now.
  std::vector<std::byte> Shard(int chunk) const;
  absl::Status CheckShard(int chunk, const std::vector<std::byte>& came) const;
  // ReadShard of every chunk.
  absl::Status CheckShards();

  // After a commit. `summed_chunks`: how many needed an accumulator.
  absl::Status CheckCommit(const Attempt& attempt, const ModelOutcome& expected,
                           int64_t summed_chunks);
  // What ranks are told before they vote.
  absl::Status CheckNorm(const StepNorm& came, const Attempt& attempt);
  absl::Status CheckOutcome(const StepOutcome& came, const ModelOutcome& expected,
                            const Attempt& attempt) const;
  // A snapshot of all parameters against the model's state as it was when it was taken.
  absl::Status CheckSnapshot(const Snapshot& snapshot, const ModelState& state) const;
  absl::Status CheckAllState();

  absl::StatusOr<Snapshot> TakeSnapshot() { return TakeSnapshot(job()); }
  // Of all parts.
  absl::StatusOr<std::vector<Snapshot>> TakeSnapshots();
  absl::Status CheckSnapshots(const std::vector<Snapshot>& snapshots,
                              const ModelState& state) const;

 private:
  static constexpr int kMostTurns = 100;
  // What a task ends with where a link or a process ends.
  static bool IsPassing(const absl::Status& status) {
    return absl::IsUnavailable(status) || absl::IsAborted(status);
  }
  absl::Status UploadWeights(int chunk);
  absl::Status AwaitBegun();
  int ChunkAt(const Job& part, int chunk) const;  // Its number there.
  absl::StatusOr<Snapshot> TakeSnapshot(Job& part);
  absl::Status CheckSnapshot(const Snapshot& snapshot, const ModelState& state,
                             const Layout& layout) const;
  absl::Status CheckPart(const JobStatus& status, const Attempt& attempt,
                         const ModelOutcome& expected);
  absl::Status CheckStatus(const Attempt& attempt, const ModelOutcome& expected,
                           int64_t summed_chunks);
  // The record of the last step, after a load.
  absl::Status CheckLoadedRecord(const Job& part) const;
  absl::Status CheckSpeculation(const JobStatus& status, const Attempt& attempt,
                                const ModelOutcome& expected);

  Engines& engines_;
  const JobPlan plan_;
  std::unique_ptr<LinkedEngines> linked_;  // Null: one engine.
  Engine* engine_ = nullptr;               // Null: one each.
  Host host_;
  JobSpec spec_;
  int lead_ = 0;
  std::vector<std::shared_ptr<Job>> parts_;
  const Layout layout_;  // What is made of it outlives an engine.
  Model model_;
  std::string directory_;
  std::optional<ModelState> saved_;
  std::vector<StepRecord> saved_records_;
  uint64_t given_up_steps_ = 0;
  // An operator has changed a group since the last commit, which other members than the lead do not
  // know.
  bool changed_unheard_ = false;
  bool changed_before_commit_ = false;  // The same before the last commit, which has told them.
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_ENGINE_JOB_UNDER_TEST_H_
