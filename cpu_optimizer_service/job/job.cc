#include "cpu_optimizer_service/job/job.h"

#include <utility>

namespace ballast {

absl::StatusOr<Attachment> Job::Attach(const AttachRequest& request) {
  return Await<Attachment>([&](Done<Attachment> done) { Attach(request, std::move(done)); });
}

absl::StatusOr<std::unique_ptr<RankStream>> Job::OpenStream(
    const OpenStreamRequest& request, std::shared_ptr<RankListener> listener) {
  return Await<std::unique_ptr<RankStream>>([&](Done<std::unique_ptr<RankStream>> done) {
    OpenStream(request, std::move(listener), std::move(done));
  });
}

absl::StatusOr<uint64_t> Job::AbortStep() {
  return Await<uint64_t>([&](Done<uint64_t> done) { AbortStep(std::move(done)); });
}

absl::StatusOr<Snapshot> Job::TakeSnapshot(absl::Span<const int> parameters) {
  return Await<Snapshot>([&](Done<Snapshot> done) {
    TakeSnapshot(std::vector<int>(parameters.begin(), parameters.end()), std::move(done));
  });
}

absl::StatusOr<CheckpointInfo> Job::Save(const std::string& directory) {
  return Await<CheckpointInfo>(
      [&](Done<CheckpointInfo> done) { Save(directory, std::move(done)); });
}

absl::StatusOr<CheckpointInfo> Job::Load(const std::string& directory) {
  return Await<CheckpointInfo>(
      [&](Done<CheckpointInfo> done) { Load(directory, std::move(done)); });
}

}  // namespace ballast
