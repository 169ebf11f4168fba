#include "server/ballastd/drain.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/text/amounts.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"

namespace ballast::server {
namespace {

// The workers could still finish a step that is left open, after the save.
void AbortUndecided(Job& job, const std::string& why, DrainReport& report) {
  // A step that all ranks have sealed is decided before the save.
  if (job.Status().phase == JobPhase::kSealed) return;
  // Its lead may not answer. Nor can the step be finished here, which the lead finds out.
  if (job.spec().member_count() > 1) return;
  const absl::StatusOr<uint64_t> step = job.AbortStep();
  if (!step.ok()) return;  // Between steps, or decided: then the save waits for the update.
  report.aborted.push_back(absl::StrCat("job ", job.spec().name, ": step ", *step, " ", why));
}

// Returns when no save to `folder` is under way that began before, or when each of them has written
// nothing for `seconds`: the process will end, and they with it.
void AwaitSaves(const Job& job, const std::string& folder, double seconds) {
  for (;;) {
    const std::vector<SaveProgress> saves = job.Status().saves;
    // One that hangs on its disk must not hold up the end of the process for ever.
    const bool writes = std::any_of(saves.begin(), saves.end(), [&](const SaveProgress& save) {
      return save.directory == folder && save.seconds_since_progress <= seconds;
    });
    if (!writes) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

std::string LastSaved(const Engine& engine, const Job& job) {
  const CheckpointDirectory* const checkpoints = engine.checkpoints();
  const auto found = checkpoints == nullptr ? std::nullopt : checkpoints->Find(job.spec().name);
  if (!found.has_value()) return "no checkpoint of it is known";
  return absl::StrCat("its last checkpoint is that of step ", found->step, " in ",
                      found->directory);
}

// The checkpoint of a job with several members as it is now. All may be told to end at once, and what
// one has asked for is the save of all. NOT_FOUND.
absl::StatusOr<CheckpointInfo> SavedByOthers(const Job& job, const std::string& folder) {
  const absl::Status none = absl::NotFoundError(folder);
  if (job.spec().member_count() == 1) return none;
  const JobStatus status = job.Status();
  const auto found = ListCheckpoints(PosixFileSystem(), folder);
  for (const FoundCheckpoint& each : found.value_or(std::vector<FoundCheckpoint>())) {
    const CheckpointFacts& facts = each.facts;
    if (each.problem.ok() && facts.uid == job.uid() && facts.step == status.committed_step &&
        facts.generation == status.generation.count) {
      return CheckpointInfo{.directory = facts.directory,
                            .step = facts.step,
                            .generation = status.generation,
                            .size_bytes = facts.size_bytes};
    }
  }
  return none;
}

void SaveOne(const Engine& engine, Job& job, const std::string& checkpoint_directory,
             double seconds, DrainReport& report) {
  if (job.is_superseded()) return;  // It is over.
  const JobStatus status = job.Status();
  const auto at_step = [&](uint64_t step) {
    return absl::StrCat("job ", job.spec().name, " at step ", step);
  };
  if (checkpoint_directory.empty()) {
    report.lost.push_back(absl::StrCat(at_step(status.committed_step), ": no --checkpoint-dir"));
    return;
  }
  if (status.phase == JobPhase::kAwaitingWeights) return;  // It has no state yet.
  // A save would be refused. To count that as failed would keep the service alive for a state that
  // cannot be saved.
  if (status.phase == JobPhase::kBroken) {
    report.lost.push_back(absl::StrCat(at_step(status.committed_step), ": ", status.problem, "; ",
                                       LastSaved(engine, job)));
    return;
  }
  const std::string folder = absl::StrCat(checkpoint_directory, "/", job.spec().name);
  AwaitSaves(job, folder, seconds);
  // This thread may block: it does nothing but drain.
  absl::StatusOr<CheckpointInfo> saved = SavedByOthers(job, folder);
  if (!saved.ok()) {
    saved = Await<CheckpointInfo>([&](Done<CheckpointInfo> done) {
      job.Save({.folder = folder, .asked_for = false}, std::move(done));
    });
  }
  if (!saved.ok()) {  // They may have ended right after theirs.
    if (auto by_others = SavedByOthers(job, folder); by_others.ok()) saved = *std::move(by_others);
  }
  if (saved.ok()) {
    report.saved.push_back(absl::StrCat(at_step(saved->step), ": ", FormatBytes(saved->size_bytes),
                                        " in ", saved->directory));
  } else if (job.Status().phase != JobPhase::kClosed) {  // Whoever has closed it wants no save.
    report.failed.push_back(
        absl::StrCat(at_step(status.committed_step), ": ", saved.status().message()));
  }
}

}  // namespace

DrainReport DrainAndSave(Engine& engine, double seconds, const std::string& checkpoint_directory) {
  DrainReport report;
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(seconds));
  if (!engine.Drain(seconds)) {
    // Drain returns before the deadline where only steps are left that no rank is connected for.
    const std::string why =
        Clock::now() < deadline
            ? "had begun, and no worker is there to finish it"
            : absl::StrCat("had not been sealed by all ranks after ", seconds, " s");
    for (const std::shared_ptr<Job>& job : engine.ListJobs()) AbortUndecided(*job, why, report);
  }
  // One job after the other: each save writes several files at once by itself.
  for (const std::shared_ptr<Job>& job : engine.ListJobs()) {
    SaveOne(engine, *job, checkpoint_directory, seconds, report);
  }
  return report;
}

}  // namespace ballast::server
