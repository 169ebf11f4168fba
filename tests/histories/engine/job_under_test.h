// What both players need: the engine that a history is played on, its job, the model, and the
// comparison of the two.
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
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "tests/histories/engine/deaths.h"
#include "tests/histories/history.h"
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
};
std::string Describe(const Tally& tally);

// The engine that histories are played on, one after the other.
class Engines {
 public:
  // The same engine as long as neither changes: the number of threads is the process's, so there is
  // one engine at a time. The one before is gone, and all of its jobs are by then. The jobs of one
  // that `may_die` outlive it in named memory.
  Engine& WithThreads(int threads, bool may_die = false);
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
class JobUnderTest {
 public:
  // Creates the job with its first weights. `may_die`: the engine.
  JobUnderTest(Engines& engines, const JobPlan& plan, bool may_die = false);
  ~JobUnderTest();  // Closes the job: streams and snapshots are gone by then.

  const JobPlan& plan() const { return plan_; }
  Job& job() { return *job_; }
  const Layout& layout() const { return layout_; }
  Engine& engine() { return *engine_; }
  Deaths& deaths() { return engines_.deaths(); }
  Model& model() { return model_; }
  const Model& model() const { return model_; }
  Tally& tally() { return engines_.tally(); }
  uint64_t next_step() const { return model_.state().committed_step + 1; }

  absl::Status UploadWeights();
  // The engine has died, and nothing of it is held any more but this job: it goes on in the next.
  absl::Status TakeOver();
  // What has the job's name by now.
  absl::Status FindAgain();
  absl::Status Save();
  // nullopt: nothing has been saved.
  absl::StatusOr<std::optional<CheckpointInfo>> Load();
  absl::Status ChangeGroup(int group, const HyperParameterOverrides& changes);

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

  absl::StatusOr<Snapshot> TakeSnapshot();

 private:
  absl::Status CheckStatus(const Attempt& attempt, const ModelOutcome& expected,
                           int64_t summed_chunks);
  // The record of the last step, after a load.
  absl::Status CheckLoadedRecord() const;
  absl::Status CheckSpeculation(const JobStatus& status, const Attempt& attempt,
                                const ModelOutcome& expected);

  Engines& engines_;
  const JobPlan plan_;
  Engine* engine_;
  std::shared_ptr<Job> job_;
  const Layout layout_;  // What is made of it outlives an engine.
  Model model_;
  std::string directory_;
  std::optional<ModelState> saved_;
  std::vector<StepRecord> saved_records_;
  uint64_t given_up_steps_ = 0;
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_ENGINE_JOB_UNDER_TEST_H_
