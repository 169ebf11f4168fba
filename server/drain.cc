#include "server/drain.h"

#include "absl/strings/str_cat.h"

namespace ballast::server {
namespace {

void SaveOne(Job& job, const std::string& checkpoint_directory, DrainReport& report) {
  const JobStatus status = job.Status();
  const std::string what =
      absl::StrCat("job ", job.spec().name, " at step ", status.committed_step);
  if (checkpoint_directory.empty()) {
    report.lost.push_back(absl::StrCat(what, ": no --checkpoint-dir"));
    return;
  }
  if (status.phase == JobPhase::kAwaitingWeights) return;  // Nothing has been put into it.
  const std::string directory = absl::StrCat(checkpoint_directory, "/", job.spec().name);
  const absl::StatusOr<CheckpointInfo> saved = job.Save(directory);
  if (saved.ok()) {
    report.saved.push_back(absl::StrCat(what, ": ", saved->size_bytes, " bytes in ", directory));
  } else {
    report.lost.push_back(absl::StrCat(what, ": ", saved.status().message()));
  }
}

}  // namespace

DrainReport DrainAndSave(Engine& engine, double seconds, const std::string& checkpoint_directory) {
  engine.Drain(seconds);
  DrainReport report;
  for (const std::shared_ptr<Job>& job : engine.ListJobs()) {
    SaveOne(*job, checkpoint_directory, report);
  }
  return report;
}

}  // namespace ballast::server
