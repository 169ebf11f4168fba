#include "cpu_optimizer_service/job/core/membership.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/rank_memory_layout.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {

absl::Status Membership::CheckGeneration(const Generation& generation) const {
  if (generation == core_.record.generation) return absl::OkStatus();
  return WithReason(absl::AbortedError(absl::StrCat("job ", core_.spec().name, " is at generation ",
                                                    ToString(core_.record.generation), ", not ",
                                                    ToString(generation), "; attach again")),
                    reason::kOlderGeneration);
}

absl::Status Membership::CheckCurrent(const StreamKey& key) const {
  if (table.IsCurrent(key)) return core_.CheckUsable();
  return WithReason(
      absl::AbortedError(absl::StrCat("this stream of rank ", key.rank, " of job ",
                                      core_.spec().name, " is no longer its stream; attach again")),
      reason::kStreamReplaced);
}

absl::Status Membership::CheckHolder(int rank, const std::string& process_id) const {
  if (table.IsHeldBy(rank, process_id)) return absl::OkStatus();
  return WithReason(
      absl::AbortedError(absl::StrCat("rank ", rank, " of job ", core_.spec().name,
                                      " is not held by this process; attach again")),
      table.IsTakenFrom(rank, process_id) ? reason::kRankReplaced : reason::kRankNotHeld);
}

absl::Status Membership::CheckAttachRequest(const AttachRequest& request) const {
  if (request.rank < 0 || request.rank >= core_.layout.world_size()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", request.rank, " is not in job ",
                                                   core_.spec().name, ", whose world size is ",
                                                   core_.layout.world_size()));
  }
  if (request.process_id.empty() || request.process_id.size() > kMaxProcessIdBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("process_id must have 1 to ", kMaxProcessIdBytes, " bytes"));
  }
  if (!request.uid.empty() && request.uid != core_.identity.uid) {
    return WithReason(
        absl::NotFoundError(absl::StrCat("job ", core_.spec().name, " is not the one with uid ",
                                         request.uid, "; it was created again")),
        reason::kOtherJob);
  }
  if (request.spec.has_value()) {
    if (const std::string difference = FirstDifference(core_.spec(), *request.spec);
        !difference.empty()) {
      return WithReason(absl::FailedPreconditionError(absl::StrCat(
                            "rank ", request.rank, " describes job ", core_.spec().name,
                            " differently: ", difference,
                            " (here: the service's job); train with the same description, or save "
                            "and close the job and load its checkpoint into a new one")),
                        reason::kOtherDescription);
    }
  }
  // After the descriptions: where they differ, so may the homes.
  if (!core_.layout.has_rank(request.rank)) {
    const int home = core_.spec().home(request.rank);
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", request.rank, " of job ", core_.spec().name, " has its home at ",
                     core_.spec().members[home].address, "; attach there"));
  }
  return absl::OkStatus();
}

absl::Status Membership::CheckMayAttach(const AttachRequest& request,
                                        uint64_t committed_step) const {
  if (request.generation.has_value()) {
    BALLAST_RETURN_IF_ERROR(CheckGeneration(*request.generation));
    // Clients reopen streams by themselves. If that took the rank back, two processes would take it
    // from each other again and again.
    if (table.IsTakenFrom(request.rank, request.process_id)) {
      return WithReason(
          absl::AbortedError(absl::StrCat("another process has taken rank ", request.rank,
                                          " of job ", core_.spec().name, " in generation ",
                                          ToString(core_.record.generation))),
          reason::kRankReplaced);
    }
  }
  const std::string& last = table[request.rank].last_process_id;
  if (request.rejoin && !last.empty() && last != request.process_id) {
    return WithReason(absl::FailedPreconditionError(
                          absl::StrCat("another process has taken rank ", request.rank, " of job ",
                                       core_.spec().name, ": ", last, "; this one was replaced")),
                      reason::kRankReplaced);
  }
  if (request.expected_committed_step.has_value() &&
      *request.expected_committed_step != committed_step) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          "job ", core_.spec().name, " is at step ", committed_step, ", rank ",
                          request.rank, " expected ", *request.expected_committed_step)),
                      reason::kOtherStep);
  }
  return absl::OkStatus();
}

absl::Status Membership::CheckMayOpen(const OpenStreamRequest& request) const {
  // First: closing raises the generation, too, and the caller is to learn that the job is gone.
  if (core_.gate.phase() == Phase::kClosed) return core_.CheckUsable();
  BALLAST_RETURN_IF_ERROR(CheckGeneration(request.generation));
  BALLAST_RETURN_IF_ERROR(core_.CheckUsable());
  BALLAST_RETURN_IF_ERROR(CheckHolder(request.rank, request.process_id));
  if (request.weights_in_place && table[request.rank].memory == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", request.rank, " wants its weights in shared memory, but job ",
                     core_.spec().name, " shares none with it"));
  }
  return absl::OkStatus();
}

void Membership::Detach(Detached detached, absl::Status why) {
  if (detached.listeners.empty() && detached.memories.empty()) return;
  core_.RunAfter([detached = std::move(detached), why = std::move(why)]() mutable {
    for (const auto& listener : detached.listeners) listener->OnDetached(why);
    detached.memories.clear();
  });
}

void Membership::EndStream(int rank, absl::string_view reason, std::string why) {
  Detached ended;
  table.TakeListener(rank, ended.listeners);
  Detach(std::move(ended), WithReason(absl::AbortedError(std::move(why)), reason));
}

int64_t Membership::MemoryBytes(int rank) const {
  return RankMemoryLayout(core_.layout, core_.spec().groups, rank).size_bytes();
}

}  // namespace ballast
