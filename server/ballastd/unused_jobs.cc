#include "server/ballastd/unused_jobs.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast::server {
namespace {

// A save that failed is tried again then, or after --forget-after, if that is less.
constexpr absl::Duration kTryAgain = absl::Minutes(10);

// What is said of it when it is closed; empty without weights.
absl::StatusOr<std::string> SaveState(const Engine& engine, Job& job) {
  if (job.Position().awaiting_weights) return "it had no weights yet";
  const auto saved = Await<CheckpointInfo>([&](Done<CheckpointInfo> done) {
    job.Save({.folder = engine.checkpoints()->PathOf(job.spec().name), .asked_for = false},
             std::move(done));
  });
  if (!saved.ok()) return saved.status();
  return absl::StrCat("saved at step ", saved->step, " in ", saved->directory, "; ",
                      HowToResume(job.spec().name));
}

}  // namespace

void UnusedJobs::Look(absl::Time now) {
  std::map<std::string, Seen> seen;  // Without those that are closed.
  for (const std::shared_ptr<Job>& job : engine_.ListJobs()) {
    // Of several members none knows alone whether the job is used.
    if (job->spec().member_count() > 1 && !job->is_superseded()) continue;
    const auto before = seen_.find(job->uid());
    const Seen news = {.use = job->use(), .since = now, .next = now};
    Seen& known = seen[job->uid()];
    known = before == seen_.end() || !(before->second.use == news.use) || news.use.streams > 0
                ? news
                : before->second;
    if (now - known.since >= after_ && now >= known.next) Forget(job, known, now);
  }
  seen_ = std::move(seen);
}

void UnusedJobs::Forget(const std::shared_ptr<Job>& job, Seen& seen, absl::Time now) {
  seen.next = now + std::min(after_, kTryAgain);
  const std::string& name = job->spec().name;
  if (job->is_superseded()) {
    engine_.CloseJob(
        job, [](const absl::StatusOr<bool>&) {}, /*here=*/true);
    return;
  }
  const absl::StatusOr<std::string> saved = SaveState(engine_, *job);
  if (!saved.ok()) {
    if (job->Status().phase == JobPhase::kClosed) return;  // Whoever has closed it wants no save.
    spdlog::warn(
        "job {} has had no rank for {}, and stays, because it could not be saved: {}; this is "
        "tried again",
        name, absl::FormatDuration(after_), std::string(saved.status().message()));
    return;
  }
  // Whoever has come since the look keeps it: what they have done is not in the checkpoint.
  const auto closed =
      Await<bool>([&](Done<bool> done) { engine_.CloseUnusedJob(job, seen.use, std::move(done)); });
  if (!closed.ok()) return;
  spdlog::info("job {} closed, because it had no rank for {}: {}", name,
               absl::FormatDuration(after_), *saved);
}

}  // namespace ballast::server
