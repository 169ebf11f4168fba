// A job that goes on from another one, or from a checkpoint, with other parameters (Derivation).
//
// Both jobs are there until the new one has all its weights. The old one may go on meanwhile: then
// the new one is given up. Otherwise one flip of the new one's record makes it the job, and the old
// one is closed.
#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"
#include "cpu_optimizer_service/job/state/index_record.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"

namespace ballast {

absl::Status JobImpl::CheckMayDerive() const {
  BALLAST_RETURN_IF_ERROR(core_.CheckUsable());
  if (!core_.first_weights.complete()) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          "job ", spec().name, " has no weights yet; derive from it when it has")),
                      reason::kNoWeightsYet);
  }
  const bool has_round = core_.record.directions.has_value();
  // A round without ranks is ended first (Lend).
  bool is_between = machine_.between_steps() && (!has_round || UseNow().streams == 0);
  // Of a step that all ranks have taken back, or left, nothing is wanted.
  if (const StepAgreement* open = machine_.agreement();
      machine_.stage() == StepMachine::Stage::kOpen) {
    is_between = true;
    for (int rank = 0; rank < members_.table.size(); ++rank) {
      if (open->ranks()[rank].begun && members_.table[rank].listener != nullptr) is_between = false;
    }
  }
  if (is_between && !writes_.under_way()) return absl::OkStatus();
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat(
          "one rank of job ", spec().name, " changes its parameters, but another one has begun ",
          "step ", core_.record.committed_step + (has_round ? 0 : 1),
          " or writes state before it; ", "all ranks must change them before the same step")),
      reason::kOtherSettings);
}

absl::StatusOr<JobImpl::Lent> JobImpl::Lend() {
  OrthogonalizeIfAbandoned();
  return Await<Lent>([&](Done<Lent> done) {
    core_.Enter(Admission::kRead, -1,
                [this, done = std::move(done)](absl::Status admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                    job_lock) mutable {
                  if (admitted.ok()) admitted = CheckMayDerive();
                  if (!admitted.ok()) return core_.Reply<Lent>(std::move(done), admitted);
                  core_.gate.StartReading();  // What would change its state waits.
                  core_.Reply<Lent>(std::move(done), Lent{.index = view_.MakeIndex(core_.record),
                                                          .history = core_.record.history,
                                                          .save_schedule = saver_.schedule,
                                                          .resumed_uid = core_.record.resumed_uid,
                                                          .ancestors = core_.Ancestry(),
                                                          .moves = core_.Lend()});
                });
  });
}

absl::Status JobImpl::Inherit(JobImpl& origin) {
  BALLAST_ASSIGN_OR_RETURN(Lent lent, origin.Lend());
  absl::Cleanup stop_reading = [&origin] { origin.core_.StopReading(); };
  const absl::Status inherited = origin_.Inherit(
      lent.index, [&](const std::string& name, Plane plane, int64_t offset, absl::Span<float> out) {
        origin.view_.Read(origin.core_.layout.FindParameter(name), plane, offset, out);
        return absl::OkStatus();
      });
  std::move(stop_reading).Invoke();
  BALLAST_RETURN_IF_ERROR(inherited);
  core_.history.GoOnFrom(origin.core_.history);
  JobCore::Lock lock(core_);
  origin_moves_ = lent.moves;
  saver_.schedule = lent.save_schedule;
  core_.record.resumed_uid = lent.resumed_uid;
  core_.record.ancestors = std::move(lent.ancestors);
  core_.record.history = std::move(lent.history);
  for (StepRecord& step : core_.record.history.recent_steps)
    step = WithGroups(step, lent.index.groups, core_);
  return absl::OkStatus();
}

absl::Status JobImpl::InheritCheckpoint(const std::string& path, JobImpl* origin) {
  uint64_t moves = 0;
  std::vector<std::string> ancestors;
  if (origin != nullptr) {
    JobCore::Lock lock(origin->core_);
    BALLAST_RETURN_IF_ERROR(origin->CheckMayDerive());
    moves = origin->core_.Lend();
    ancestors = origin->core_.Ancestry();
  }
  {
    JobCore::Lock lock(core_);
    origin_moves_ = moves;
    core_.record.ancestors = std::move(ancestors);
  }
  const auto progress =
      core_.BeginActivity(ActivityKind::kLoadingCheckpoint, memory_.need.state_bytes, path);
  const CountsIn here(*progress);
  BALLAST_ASSIGN_OR_RETURN(const OpenedCheckpoint opened,
                           OpenNewest(*core_.environment.file_system, path,
                                      std::max(kMostForeignIndexBytes, MostIndexBytes(spec())),
                                      core_.environment.checkpoint_uses));
  return origin_.Inherit(opened.checkpoint.index(), [&](const std::string& name, Plane plane,
                                                        int64_t offset, absl::Span<float> out) {
    return opened.checkpoint.Read(name, plane, offset, out);
  });
}

Pending JobImpl::GiveWayTo(std::shared_ptr<JobImpl> derived, Done<bool> done) {
  return core_.Enter(
      Admission::kClose, -1,
      [this, self = Self(), derived = std::move(derived), done = std::move(done)](
          absl::Status admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
        if (admitted.ok()) admitted = CheckMayDerive();
        if (!admitted.ok()) return core_.Reply<bool>(std::move(done), admitted);
        switch (derived->TakePlace(core_.moves())) {
          case Succession::kMoved:
            return core_.Reply<bool>(
                std::move(done),
                absl::FailedPreconditionError(absl::StrCat(
                    "job ", spec().name, " has gone on, to step ", core_.record.committed_step,
                    ", since another one was derived from it; derive it again")));
          case Succession::kMissing:
            return core_.Reply<bool>(std::move(done), false);
          case Succession::kDone:
            core_.RunAfter([derived] { const JobCore::Section section(derived->core_); });
            break;
        }
        closers_.push_back(std::move(done));
        CloseNow(absl::StrCat("job ", spec().name, " goes on as another one, uid ", derived->uid(),
                              ", which was derived from it"),
                 /*everywhere=*/false);
      });
}

JobImpl::Succession JobImpl::TakePlace(uint64_t origin_moves) {
  JobCore::Lock lock(core_);  // No section: what that would run must not meet the origin's lock.
  if (origin_moves != origin_moves_) return Succession::kMoved;
  // A rank was taken anew since the last of them came: it brings its own again.
  if (core_.first_weights.missing() > 0) return Succession::kMissing;
  origin_.Complete();
  return Succession::kDone;
}

}  // namespace ballast
