// The job goes on as another one, which is derived from it.
#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/status.h"
#include "tests/histories/engine/engine_player.h"

namespace ballast::histories {

absl::Status EnginePlayer::DeriveJob() {
  const std::vector<int> left_out = LeftOutOf(history_.job, *attempt_);
  const bool all_there =
      std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& side) { return side.away; });
  if (left_out.empty() || !all_there) return absl::OkStatus();
  // Their readers keep the old job's memory.
  for (const OpenSnapshot& open : snapshots_) {
    BALLAST_RETURN_IF_ERROR(stage_.CheckSnapshot(open.snapshot, open.state));
  }
  snapshots_.clear();
  ghosts_.clear();
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    ranks_[rank].stream.reset();
    LoseMemory(rank);
  }
  for (const Event& event : attempt_->events) {
    if (event.kind == EventKind::kDeath && event.pick % 4 == 3) ArmDeath(event);
  }
  const std::string name = stage_.job().spec().name;
  const std::string uid = stage_.job().uid();
  JobPlan plan = history_.job;
  for (const int p : left_out) plan.parameters[p].trainable = false;
  absl::Status derived;
  while (DiesIn(
      [&] { derived = BringDerived(SpecOf(plan, name), SpecOf(history_.job, name), uid); })) {
    BALLAST_RETURN_IF_ERROR(stage_.TakeOver());
  }
  BALLAST_RETURN_IF_ERROR(derived);
  if (may_die_) stage_.deaths().Disarm();
  ++stage_.tally().derived;
  stage_.model().Derive(*attempt_);
  generation_ = 1;
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    ranks_[rank].generation = 0;
    BALLAST_RETURN_IF_ERROR(Open(rank, /*over=*/false));
  }
  return stage_.CheckAllState();
}

absl::Status EnginePlayer::BringDerived(const JobSpec& without, const JobSpec& with,
                                        const std::string& uid) {
  for (;;) {
    const std::string now = stage_.job().uid();
    const bool is_first = now == uid;
    // After a death it may be there already.
    if (!is_first && FirstDifference(stage_.job().spec(), with).empty()) return absl::OkStatus();
    BALLAST_ASSIGN_OR_RETURN(
        const std::shared_ptr<Job> job,
        stage_.engine().CreateJob(is_first ? without : with, {.uid = now, .checkpoint = ""}));
    if (!is_first) BALLAST_RETURN_IF_ERROR(BringBack(*job));
    BALLAST_RETURN_IF_ERROR(stage_.FindAgain());
    if (&stage_.job() != job.get()) return Wrong("the derived job has not taken the place");
  }
}

absl::Status EnginePlayer::BringBack(Job& job) {
  const std::vector<int> left_out = LeftOutOf(history_.job, *attempt_);
  for (int chunk = 0; chunk < std::ssize(job.layout().chunks()); ++chunk) {
    if (job.Status().phase != JobPhase::kAwaitingWeights) break;
    std::vector<float> values(job.layout().chunks()[chunk].elements, 0.0f);
    for (const ChunkPiece& piece : job.layout().Pieces(chunk)) {
      const bool comes = std::count(left_out.begin(), left_out.end(), piece.parameter) > 0;
      for (int64_t i = 0; i < piece.elements; ++i) {
        // What the job has already counts for nothing here.
        values[piece.chunk_offset + i] =
            comes ? WeightAfterwards(*attempt_, history_.job.parameters[piece.parameter],
                                     piece.parameter_offset + i)
                  : std::numeric_limits<float>::max();
      }
    }
    const absl::Span<const std::byte> piece(reinterpret_cast<const std::byte*>(values.data()),
                                            values.size() * sizeof(float));
    BALLAST_RETURN_IF_ERROR(job.WriteInitialWeights(chunk, {piece}).status());
  }
  return absl::OkStatus();
}

}  // namespace ballast::histories
