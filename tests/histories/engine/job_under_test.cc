#include "tests/histories/engine/job_under_test.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::histories {
namespace {

bool SameBits(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b) || (a != a && b != b);
}

}  // namespace

std::string Describe(const Tally& tally) {
  return absl::StrCat(
      "steps committed ", tally.committed, ", of them clipped ", tally.clipped, ", skipped ",
      tally.skipped, ", with unused parameters ", tally.with_unused, "; seals refused ",
      tally.refused_seals, ", steps spoilt ", tally.spoilt, "; repeats ", tally.repeats,
      ", streams cut ", tally.cuts, ", tries discarded ", tally.discarded, ", calls refused ",
      tally.refused_calls, ", norms looked at ", tally.norms, ", discarded for them ", tally.spikes,
      ", abandoned ", tally.abandoned, ", votes refused ", tally.refused_votes, ", given up ",
      tally.given_up, ", further gradients after may_guess ", tally.not_last, "; aborted ",
      tally.aborted, " and at the decision ", tally.aborted_at_decision, ", undone ", tally.undone,
      ", written between steps ", tally.written, ", derived ", tally.derived, ", replaced ",
      tally.replaced, ", loaded ", tally.loaded, ", snapshots ", tally.snapshots,
      "; chunks speculated ", tally.speculated, ", published ", tally.published, ", redone ",
      tally.redone, "; in place ", tally.in_place, ", borrowed ", tally.borrowed, "; deaths ",
      tally.deaths, ", decided steps carried out after one ", tally.carried_out, "; died at ",
      absl::StrJoin(tally.died_at, ", ", absl::PairFormatter(" ")));
}

Engine& Engines::WithThreads(int threads, bool may_die) {
  if (threads == threads_of_engine_ && may_die == (deaths_ != nullptr)) return *engine_;
  engine_.reset();
  memory_.reset();
  deaths_.reset();  // Before the next: there is one at a time.
  if (may_die) deaths_ = std::make_unique<Deaths>();
  threads_of_engine_ = threads;
  Start();
  return *engine_;
}

void Engines::Start() {
  if (deaths_ != nullptr) memory_ = std::make_unique<NamedMemory>(deaths_->keeper());
  engine_ = std::make_unique<Engine>(EngineOptions{.memory_limit_bytes = int64_t{1} << 30,
                                                   .threads = threads_of_engine_,
                                                   .named_memory = memory_.get(),
                                                   .file_system = &files_});
}

absl::StatusOr<Engine*> Engines::TakeOver() {
  for (;;) {
    ++tally_.deaths;
    engine_.reset();
    memory_.reset();
    deaths_->Begin();
    Start();
    deaths_->Expose();
    const Engine::TakenOver taken = engine_->TakeOverJobs();
    if (deaths_->Hide()) continue;
    if (!taken.lost.empty()) return Wrong("lost with the process: ", taken.lost.front());
    for (const auto& [store, count] : deaths_->TakeCounts()) tally_.died_at[store] += count;
    return engine_.get();
  }
}

absl::Status ExpectCode(absl::StatusCode expected, const absl::Status& came,
                        const std::string& what) {
  if (came.code() == expected) return absl::OkStatus();
  return Wrong(what, ": expected ", absl::StatusCodeToString(expected), ", came ", came.ToString());
}

JobUnderTest::JobUnderTest(Engines& engines, const JobPlan& plan, bool may_die)
    : engines_(engines),
      plan_(plan),
      engine_(&engines.WithThreads(plan.threads, may_die)),
      job_(engine_->CreateJob(SpecOf(plan, engines.NewJobName())).value()),
      layout_(Layout::Create(job_->spec().layout).value()),
      model_(plan),
      directory_(absl::StrCat("/", job_->spec().name)) {}

JobUnderTest::~JobUnderTest() {
  if (job_ == nullptr) return;  // It was lost.
  const JobStatus status = job_->Status();
  tally().speculated += status.speculation.speculated;
  tally().published += status.speculation.published;
  tally().redone += status.speculation.redone;
  engine_->CloseJob(job_->spec().name).IgnoreError();
  engines_.files().RemoveAll(directory_).IgnoreError();
}

absl::Status JobUnderTest::UploadWeights() {
  for (int chunk = 0; chunk < static_cast<int>(layout().chunks().size()); ++chunk) {
    // After a death that took none of them along, the last may be there already.
    if (job_->Status().phase != JobPhase::kAwaitingWeights) break;
    std::vector<float> values(layout().chunks()[chunk].elements, 0.0f);
    for (const ChunkPiece& piece : layout().Pieces(chunk)) {
      for (int64_t i = 0; i < piece.elements; ++i) {
        values[piece.chunk_offset + i] =
            FirstWeight(plan_.parameters[piece.parameter], piece.parameter_offset + i);
      }
    }
    const absl::Span<const std::byte> piece(reinterpret_cast<const std::byte*>(values.data()),
                                            values.size() * sizeof(float));
    BALLAST_RETURN_IF_ERROR(job_->WriteInitialWeights(chunk, {piece}).status());
  }
  return absl::OkStatus();
}

absl::Status JobUnderTest::TakeOver() {
  const std::string name = job_->spec().name;
  engine_->CloseJob(name).IgnoreError();
  job_.reset();
  BALLAST_ASSIGN_OR_RETURN(engine_, engines_.TakeOver());
  BALLAST_ASSIGN_OR_RETURN(job_, engine_->FindJob(name));
  return absl::OkStatus();
}

absl::Status JobUnderTest::FindAgain() {
  BALLAST_ASSIGN_OR_RETURN(job_, engine_->FindJob(job_->spec().name));
  return absl::OkStatus();
}

absl::Status JobUnderTest::Save() {
  BALLAST_ASSIGN_OR_RETURN(const CheckpointInfo info, job_->Save(directory_));
  saved_ = model_.state();
  saved_records_ = job_->Status().recent_steps;
  if (info.step == saved_->committed_step) return absl::OkStatus();
  return Wrong("saved at step ", info.step, ", expected ", saved_->committed_step);
}

absl::StatusOr<std::optional<CheckpointInfo>> JobUnderTest::Load() {
  if (!saved_.has_value()) return std::nullopt;
  BALLAST_ASSIGN_OR_RETURN(const CheckpointInfo info, job_->Load(directory_));
  model_.Load(*saved_);
  ++tally().loaded;
  BALLAST_RETURN_IF_ERROR(CheckLoadedRecord());
  return info;
}

absl::Status JobUnderTest::CheckLoadedRecord() const {
  const std::vector<StepRecord> records = job_->Status().recent_steps;
  if (records.size() != (saved_records_.empty() ? 0u : 1u)) {
    return Wrong(records.size(), " steps are remembered after a load");
  }
  if (records.empty()) return absl::OkStatus();
  const StepRecord& saved = saved_records_.back();
  const StepRecord& loaded = records.back();
  if (loaded.voted == saved.voted && loaded.abandoned == saved.abandoned &&
      loaded.outcome.decision.multipliers == saved.outcome.decision.multipliers &&
      loaded.hyper_parameters == saved.hyper_parameters) {
    return absl::OkStatus();
  }
  return Wrong("after a load step ", loaded.outcome.step, " was not decided as before the save");
}

absl::Status JobUnderTest::ChangeGroup(int group, const HyperParameterOverrides& changes) {
  BALLAST_ASSIGN_OR_RETURN(const HyperParameters values, job_->UpdateGroup(group, changes));
  model_.ChangeGroup(group, changes);
  if (values == model_.state().in_force[group]) return absl::OkStatus();
  return Wrong("set-group of group ", group, " says ", ToString(values));
}

std::vector<std::byte> JobUnderTest::Shard(int chunk) const {
  const Chunk& place = layout().chunks()[chunk];
  const DType dtype = plan_.groups[place.group].return_dtype;
  std::vector<std::byte> bytes(place.elements * SizeBytes(dtype));
  for (const ChunkPiece& piece : layout().Pieces(chunk)) {
    const std::vector<float>& master = model_.state().parameters[piece.parameter].master;
    for (int64_t i = 0; i < piece.elements; ++i) {
      StoreElement(bytes.data(), dtype, piece.chunk_offset + i, master[piece.parameter_offset + i]);
    }
  }
  return bytes;
}

absl::Status JobUnderTest::CheckShard(int chunk, const std::vector<std::byte>& came) const {
  if (came == Shard(chunk)) return absl::OkStatus();
  return Wrong("the weights of chunk ", chunk, " are not those of step ",
               model_.state().committed_step);
}

absl::Status JobUnderTest::CheckShards() {
  const Generation generation = job_->Status().generation;
  for (int chunk = 0; chunk < static_cast<int>(layout().chunks().size()); ++chunk) {
    std::vector<std::byte> bytes(Shard(chunk).size());
    BALLAST_RETURN_IF_ERROR(
        job_->ReadShard(generation, model_.state().committed_step, chunk, absl::MakeSpan(bytes)));
    BALLAST_RETURN_IF_ERROR(CheckShard(chunk, bytes));
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- after a commit

absl::Status JobUnderTest::CheckNorm(const StepNorm& came, const Attempt& attempt) {
  ++tally().norms;
  const std::vector<double> group_norms = model_.GroupNorms(attempt);
  bool same =
      SameBits(came.norm, model_.Norm(attempt)) && came.group_norms.size() == group_norms.size();
  bool finite = true;
  for (size_t group = 0; same && group < group_norms.size(); ++group) {
    same = SameBits(came.group_norms[group], group_norms[group]);
    finite = finite && std::isfinite(group_norms[group]);
  }
  if (!same) return Wrong("the norm is told as ", came.norm, ", expected ", model_.Norm(attempt));
  // A norm may overflow although all elements are finite.
  if (finite && !came.non_finite.empty()) return Wrong("not finite: ", came.non_finite);
  return absl::OkStatus();
}

absl::Status JobUnderTest::CheckOutcome(const StepOutcome& came, const ModelOutcome& expected,
                                        const Attempt& attempt) const {
  const uint64_t step = model_.state().committed_step;
  if (came.step != step) return Wrong("decided step ", came.step, ", expected ", step);
  const Decision& decision = expected.decision;
  if (came.decision.apply != decision.apply || !SameBits(came.decision.norm, decision.norm) ||
      came.decision.clip_coefficient != decision.clip_coefficient ||
      came.decision.multipliers != decision.multipliers) {
    return Wrong("step ", step, ": decided apply ", came.decision.apply, ", norm ",
                 came.decision.norm, ", clip ", came.decision.clip_coefficient, "; expected ",
                 decision.apply, ", ", decision.norm, ", ", decision.clip_coefficient);
  }
  if (came.unused_parameters != expected.unused_parameters) {
    return Wrong("step ", step, ": unused parameters [", absl::StrJoin(came.unused_parameters, " "),
                 "], expected [", absl::StrJoin(expected.unused_parameters, " "), "]");
  }
  if (expected.abandoned || expected.given_up) {
    if (!came.skip_reason.empty()) return absl::OkStatus();
    return Wrong("step ", step, ": skipped without a reason");
  }
  bool names = absl::StrContains(came.skip_reason, expected.culprit);
  for (const Poison& poison : attempt.poisons) {
    if (poison.told) names |= absl::StrContains(came.skip_reason, NameOf({.id = poison.parameter}));
  }
  if (came.skip_reason.empty() != decision.apply || (!decision.apply && !names)) {
    return Wrong("step ", step, ": skipped because '", came.skip_reason, "', expected one naming ",
                 expected.culprit);
  }
  return absl::OkStatus();
}

absl::Status JobUnderTest::CheckSpeculation(const JobStatus& status, const Attempt& attempt,
                                            const ModelOutcome& expected) {
  const SpeculationCounts& counts = status.recent_steps.back().speculation;
  const int64_t chunks = static_cast<int64_t>(layout().chunks().size());
  const bool whole = expected.decision.apply ? counts.published + counts.redone == counts.speculated
                                             : counts.published + counts.redone == 0;
  // Speculated right: nothing is done again.
  const bool as_begun = (attempt.expects_clipping || attempt.vote.clipping.multipliers.empty()) &&
                        attempt.vote.overrides.empty();
  const bool right =
      expected.decision.apply && expected.decision.clip_coefficient == 1 && as_begun &&
      (expected.unused_parameters.empty() || plan_.unused_policy == UnusedPolicy::kZero);
  const bool waits = plan_.update_mode == UpdateMode::kWait;
  if (!whole || counts.speculated > chunks || (right && counts.redone > 0) ||
      (waits && counts.speculated > 0)) {
    return Wrong("speculated ", counts.speculated, " of ", chunks, " chunks, published ",
                 counts.published, ", redid ", counts.redone, " in a step ",
                 right ? "speculated right" : "speculated wrong");
  }
  return absl::OkStatus();
}

absl::Status JobUnderTest::CheckStatus(const Attempt& attempt, const ModelOutcome& expected,
                                       int64_t summed_chunks) {
  const JobStatus status = job_->Status();
  const ModelState& state = model_.state();
  if (status.committed_step != state.committed_step || status.phase != JobPhase::kReady) {
    return Wrong("the job stands at step ", status.committed_step, ", expected ",
                 state.committed_step);
  }
  if (status.applied_steps != model_.applied_steps() ||
      status.skipped_steps != model_.skipped_steps()) {
    return Wrong("applied ", status.applied_steps, " and skipped ", status.skipped_steps,
                 " steps, expected ", model_.applied_steps(), " and ", model_.skipped_steps());
  }
  if (expected.given_up) ++given_up_steps_;
  const uint64_t not_kept = status.statistics.not_kept_steps();
  if (not_kept != given_up_steps_ ||
      status.coverage_complete_steps + not_kept != status.applied_steps + status.skipped_steps) {
    return Wrong("coverage was complete in ", status.coverage_complete_steps, " steps of ",
                 status.applied_steps + status.skipped_steps, ", and ", not_kept,
                 " could not be kept, expected ", given_up_steps_);
  }
  for (size_t p = 0; p < plan_.parameters.size(); ++p) {
    if (status.update_counts[p] == state.parameters[p].updates) continue;
    return Wrong(NameOf(plan_.parameters[p]), " has had ", status.update_counts[p],
                 " updates, expected ", state.parameters[p].updates);
  }
  const StepRecord& record = status.recent_steps.back();
  for (size_t group = 0; group < plan_.groups.size(); ++group) {
    if (status.hyper_parameters[group] != state.in_force[group]) {
      return Wrong("in force for group ", group, ": ", ToString(status.hyper_parameters[group]),
                   ", expected ", ToString(state.in_force[group]));
    }
    if (record.hyper_parameters[group] != expected.hyper_parameters[group]) {
      return Wrong("recorded for group ", group, ": ", ToString(record.hyper_parameters[group]),
                   ", expected ", ToString(expected.hyper_parameters[group]));
    }
  }
  if ((record.micro_steps != attempt.micro_steps && !expected.given_up) ||
      record.loss_scale != attempt.scale.loss_scale) {
    return Wrong("recorded ", record.micro_steps, " micro-steps, loss scale ", record.loss_scale);
  }
  if (status.trainer_state != state.trainer_state) {
    return Wrong("the trainer's state is '", status.trainer_state, "'");
  }
  if (status.accumulators_in_use != summed_chunks && !expected.given_up) {
    return Wrong(status.accumulators_in_use, " accumulators in use, expected ", summed_chunks);
  }
  const bool given_up = expected.given_up;
  if (record.voted != (given_up ? Clipping() : attempt.vote.clipping) ||
      record.abandoned != expected.abandoned) {
    return Wrong("recorded a vote of max_norm ", record.voted.max_norm);
  }
  if ((record.outcome.skip_cause == SkipCause::kAbandoned) != expected.abandoned ||
      (record.outcome.skip_cause == SkipCause::kNotKept) != expected.given_up) {
    return Wrong("recorded a skip because '", record.outcome.skip_reason, "'");
  }
  BALLAST_RETURN_IF_ERROR(CheckSpeculation(status, attempt, expected));
  return CheckOutcome(record.outcome, expected, attempt);
}

absl::Status JobUnderTest::CheckCommit(const Attempt& attempt, const ModelOutcome& expected,
                                       int64_t summed_chunks) {
  ++tally().committed;
  tally().clipped += expected.decision.apply && expected.decision.clip_coefficient != 1;
  tally().skipped += !expected.decision.apply;
  tally().abandoned += expected.abandoned;
  tally().given_up += expected.given_up;
  tally().with_unused += !expected.unused_parameters.empty();
  BALLAST_RETURN_IF_ERROR(CheckStatus(attempt, expected, summed_chunks));
  return CheckShards();
}

// ---------------------------------------------------------------- state

absl::StatusOr<Snapshot> JobUnderTest::TakeSnapshot() {
  std::vector<int> trainable;
  for (int p = 0; p < static_cast<int>(plan_.parameters.size()); ++p) {
    if (plan_.parameters[p].trainable) trainable.push_back(p);
  }
  ++tally().snapshots;
  return job_->TakeSnapshot(trainable);
}

absl::Status JobUnderTest::CheckSnapshot(const Snapshot& snapshot, const ModelState& state) const {
  if (snapshot.step() != state.committed_step) {
    return Wrong("a snapshot of step ", snapshot.step(), ", expected ", state.committed_step);
  }
  for (int p = 0; p < static_cast<int>(plan_.parameters.size()); ++p) {
    const ParameterPlan& parameter = plan_.parameters[p];
    if (!parameter.trainable) continue;
    const ParameterState& expected = state.parameters[p];
    if (snapshot.update_count(p) != expected.updates) {
      return Wrong("in a snapshot ", NameOf(parameter), " has had ", snapshot.update_count(p),
                   " updates, expected ", expected.updates);
    }
    const std::vector<float>* const planes[] = {&expected.master, &expected.exp_avg,
                                                &expected.exp_avg_sq, &expected.max_exp_avg_sq};
    std::vector<float> came(parameter.elements);
    for (int plane = 0; plane < kMaxPlanes; ++plane) {
      const bool has = plane < 3 || plan_.groups[parameter.group].hyper_parameters.amsgrad;
      if (snapshot.has_plane(p, static_cast<Plane>(plane)) != has) {
        return Wrong(NameOf(parameter), " has or lacks plane ", plane);
      }
      if (!has) continue;
      snapshot.Read(p, static_cast<Plane>(plane), 0, absl::MakeSpan(came));
      for (int64_t i = 0; i < parameter.elements; ++i) {
        const float want = (*planes[plane])[i];
        if (std::bit_cast<uint32_t>(came[i]) == std::bit_cast<uint32_t>(want)) continue;
        return Wrong("step ", state.committed_step, ": ", Name(static_cast<Plane>(plane)), " of ",
                     NameOf(parameter), "[", i, "] is ", came[i], ", expected ", want);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status JobUnderTest::CheckAllState() {
  BALLAST_ASSIGN_OR_RETURN(const Snapshot snapshot, TakeSnapshot());
  return CheckSnapshot(snapshot, model_.state());
}

}  // namespace ballast::histories
