// One save, within the sources of Saver.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_SAVING_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_SAVING_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/job/members/tasks.h"
#include "cpu_optimizer_service/job/state/saver.h"
#include "cpu_optimizer_service/state/checkpoint_writer.h"
#include "cpu_optimizer_service/state/snapshot.h"

namespace ballast {

struct Saver::Saving {
  using Clock = std::chrono::steady_clock;

  Saving(SaveRequest request, Done<CheckpointInfo> done)
      : request(std::move(request)), done(std::move(done)) {}

  const SaveRequest request;
  Done<CheckpointInfo> done;
  // Made in its turn, and then constant.
  std::unique_ptr<CheckpointWriter> writer;
  std::optional<Snapshot> snapshot;  // None: the job's readers hold decisions back instead.
  CheckpointInfo info;
  Clock::time_point began;
  // Guarded by the job's lock, as the next: null until the disk thread begins to write.
  std::shared_ptr<Progress> progress;
  bool makes_memory = false;  // Second versions are being made for it.
  // A disk thread has begun to write, or the caller had gone before.
  bool writes = false;
  bool cancelled = false;
  bool told_that_next_is_due = false;
  bool is_unpinned = false;

  // With several members. At the lead:
  std::shared_ptr<MemberTasks::Task> others;
  // At another one: the lead's number of this part, and what has been done of it. `at_work`: of a
  // round that is not answered yet.
  std::optional<uint64_t> part;
  MemberWord::Done last_done;
  bool at_work = false;
  bool starts_with_memory = false;  // It is to be written once its memory is made.

  Mutex mutex;
  CondVar part_ended;
  int next_part ABSL_GUARDED_BY(mutex) = 0;
  int writing ABSL_GUARDED_BY(mutex) = 0;      // Threads.
  absl::Status status ABSL_GUARDED_BY(mutex);  // The first error of a part.
  bool has_more() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return status.ok() && next_part < writer->parts();
  }
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_SAVING_H_
