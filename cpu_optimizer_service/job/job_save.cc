// Saving: a checkpoint is written from pinned chunks on disk threads, a plane on each, while the
// job goes on.
#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {

struct JobImpl::Saving {
  using Clock = std::chrono::steady_clock;

  explicit Saving(Done<CheckpointInfo> done) : done(std::move(done)) {}

  Done<CheckpointInfo> done;
  // Made in its turn, and then constant.
  std::unique_ptr<CheckpointWriter> writer;
  std::optional<Snapshot> snapshot;  // None: the job's readers hold decisions back instead.
  CheckpointInfo info;
  Clock::time_point began;
  // Guarded by the job's lock: a disk thread has begun to write, or the caller had gone before.
  bool writes = false;
  bool cancelled = false;

  Mutex mutex;
  int planes_left ABSL_GUARDED_BY(mutex) = 0;
  absl::Status status ABSL_GUARDED_BY(mutex);  // The first error of a plane.
};

Pending JobImpl::Save(SaveRequest request, Done<CheckpointInfo> done) {
  const auto saving = std::make_shared<Saving>(std::move(done));
  const auto number = std::make_shared<uint64_t>(0);
  Enter(
      Admission::kSnapshot, -1,
      [this, self = Self(), request = std::move(request), saving, number](absl::Status admitted)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
            if (admitted.ok()) admitted = CheckMaySave(request.directory);
            if (!admitted.ok()) return Reply<CheckpointInfo>(std::move(saving->done), admitted);
            SaveNow(request, saving, number);
          },
      number);
  return Pending([weak = weak_from_this(), weak_saving = std::weak_ptr(saving), number] {
    const auto self = std::static_pointer_cast<JobImpl>(weak.lock());
    const auto saving = weak_saving.lock();
    if (self == nullptr || saving == nullptr) return;
    Section section(*self);
    self->gate_.Cancel(*number);  // No call has number 0.
    self->CancelSaving(saving);
  });
}

absl::Status JobImpl::CheckMaySave(const std::string& directory) const {
  if (!first_weights_.complete()) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", spec().name, " has no weights yet; there is nothing to save"));
  }
  for (const std::shared_ptr<Saving>& other : saves_) {
    if (other->writer->directory() != directory) continue;
    return absl::FailedPreconditionError(absl::StrFormat(
        "job %s is being saved to %s already, for %.0f s; wait until that has ended", spec().name,
        directory, std::chrono::duration<double>(Saving::Clock::now() - other->began).count()));
  }
  if (saves_.size() < kMostSaves) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(saves_.size(), " saves of job ", spec().name,
                   " are under way; wait until one has ended (ballast job shows them)"));
}

void JobImpl::SaveNow(const SaveRequest& request, std::shared_ptr<Saving> saving,
                      std::shared_ptr<uint64_t> number) {
  std::vector<int> chunks(layout_.chunks().size());
  std::iota(chunks.begin(), chunks.end(), 0);
  absl::StatusOr<Snapshot> snapshot = SnapshotOf({}, chunks);
  if (!snapshot.ok() && !absl::IsResourceExhausted(snapshot.status())) {
    return Reply<CheckpointInfo>(std::move(saving->done), snapshot.status());
  }
  if (snapshot.ok()) {
    saving->snapshot = *std::move(snapshot);
    saving->snapshot->keep_alive_ = nullptr;  // The job has this save; its tasks have the job.
  }
  const auto start = [this, request, saving]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    saving->began = Saving::Clock::now();
    saving->info = {.step = record_.committed_step, .generation = record_.generation};
    saving->writer = std::make_unique<CheckpointWriter>(
        *environment_.file_system,
        CheckpointWriter::Target{.directory = request.directory,
                                 .replace = request.replace,
                                 .resumed_uid = record_.resumed_uid,
                                 .most_index_bytes = MostIndexBytes(spec())},
        MakeIndex(record_));
    saves_.push_back(saving);
    StartSaving(saving);
  };
  if (saving->snapshot.has_value()) return start();
  const uint64_t waits =
      EnterHere(Admission::kRead, -1,
                [this, self = Self(), request, saving, start](absl::Status admitted)
                    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                      if (admitted.ok()) admitted = CheckMaySave(request.directory);
                      if (!admitted.ok()) {
                        return Reply<CheckpointInfo>(std::move(saving->done), admitted);
                      }
                      gate_.StartReading();
                      start();
                    });
  if (waits != 0) *number = waits;
}

void JobImpl::StartSaving(std::shared_ptr<Saving> saving) {
  // A disk may be slow or hang, so neither this thread nor the engine's wait for it.
  RunAfter([this, self = Self(), saving = std::move(saving)] {
    environment_.disk_threads->Run([this, self, saving] { Guarded([&] { BeginSaving(saving); }); });
  });
}

void JobImpl::BeginSaving(const std::shared_ptr<Saving>& saving) {
  {
    MutexLock lock(mutex_);
    if (saving->cancelled) return;
    saving->writes = true;
  }
  const absl::Status begun = OrOutOfMemory([&] { return saving->writer->Begin(); });
  if (!begun.ok()) return EndSaving(saving, begun);
  const std::vector<Plane> planes = PlanesOf(saving->writer->index());
  {
    MutexLock lock(saving->mutex);
    saving->planes_left = static_cast<int>(planes.size());
  }
  for (const Plane plane : planes) {
    environment_.disk_threads->Run(
        [this, self = Self(), saving, plane] { Guarded([&] { SavePlane(saving, plane); }); });
  }
}

void JobImpl::SavePlane(const std::shared_ptr<Saving>& saving, Plane plane) {
  const CheckpointIndex& index = saving->writer->index();
  const auto read = [&](int parameter, Plane of, int64_t offset, absl::Span<float> out) {
    const int p = layout_.FindParameter(index.parameters[parameter].name);
    if (saving->snapshot.has_value()) {
      saving->snapshot->Read(p, of, offset, out);
    } else {
      ReadCommitted(p, of, offset, out);
    }
  };
  const absl::Status status =
      OrOutOfMemory([&] { return saving->writer->WritePlane(plane, read); });
  absl::Status first_error;
  {
    MutexLock lock(saving->mutex);
    saving->status.Update(status);
    if (--saving->planes_left > 0) return;
    first_error = saving->status;
  }
  EndSaving(saving, first_error);
}

void JobImpl::EndSaving(const std::shared_ptr<Saving>& saving, const absl::Status& status) {
  absl::StatusOr<CheckpointInfo> result = saving->info;
  const absl::StatusOr<int64_t> bytes =
      OrOutOfMemory([&] { return saving->writer->Finish(status); });
  if (bytes.ok()) {
    result->size_bytes = *bytes;
    if (environment_.checkpoints != nullptr) {
      environment_.checkpoints->Saved({.directory = saving->writer->directory(),
                                       .job = spec().name,
                                       .uid = uid(),
                                       .step = saving->info.step});
    }
  } else {
    result = bytes.status();
  }
  {
    Section section(*this);
    ForgetSaving(saving);
  }
  std::move(saving->done)(std::move(result));
}

void JobImpl::CancelSaving(const std::shared_ptr<Saving>& saving) {
  if (saving->writer == nullptr || saving->writes || saving->cancelled) return;
  saving->cancelled = true;
  ForgetSaving(saving);
  Reply<CheckpointInfo>(std::move(saving->done), StatusOf(std::nullopt));
}

void JobImpl::ForgetSaving(const std::shared_ptr<Saving>& saving) {
  std::erase(saves_, saving);
  if (!saving->snapshot.has_value()) {
    gate_.StopReading();
    return StartDecisionIfDue();
  }
  // Unmapping takes long; the caller is told after it.
  RunAfter([snapshot = std::move(saving->snapshot)]() mutable { snapshot.reset(); });
}

std::vector<SaveProgress> JobImpl::SavesUnderWay() const {
  std::vector<SaveProgress> saves;
  for (const std::shared_ptr<Saving>& saving : saves_) {
    const CheckpointWriter& writer = *saving->writer;
    const std::chrono::duration<double> seconds = Saving::Clock::now() - saving->began;
    saves.push_back({.directory = writer.directory(),
                     .step = saving->info.step,
                     .seconds = seconds.count(),
                     .seconds_since_progress = writer.SecondsSinceProgress(),
                     .written_bytes = writer.written_bytes(),
                     .size_bytes = writer.size_bytes(),
                     .holds_back_decisions = !saving->snapshot.has_value()});
  }
  return saves;
}

}  // namespace ballast
