#include "tests/histories/engine/job_under_test.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/packed/codes.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/rules/newton_schulz.h"
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
      tally.aborted, " and at the decision ", tally.aborted_at_decision, ", in a second round ",
      tally.made_by_service, ", undone ", tally.undone, ", written between steps ", tally.written,
      ", derived ", tally.derived, ", replaced ", tally.replaced, ", loaded ", tally.loaded,
      ", snapshots ", tally.snapshots, "; chunks speculated ", tally.speculated, ", published ",
      tally.published, ", redone ", tally.redone, "; in place ", tally.in_place, ", borrowed ",
      tally.borrowed, "; deaths ", tally.deaths, ", decided steps carried out after one ",
      tally.carried_out, "; died at ", absl::StrJoin(tally.died_at, ", ", absl::PairFormatter(" ")),
      "; over members ", tally.over_members, ", words ", tally.words, ", links cut ",
      tally.link_cuts, ", deaths of members ", tally.member_deaths);
}

Engine& Engines::WithThreads(int threads, bool may_die) {
  if (threads == threads_of_engine_ && may_die == (deaths_ != nullptr)) return *engine_;
  Clear();  // Before the next: there is one at a time.
  if (may_die) deaths_ = std::make_unique<Deaths>();
  threads_of_engine_ = threads;
  Start();
  return *engine_;
}

void Engines::Clear() {
  engine_.reset();
  memory_.reset();
  deaths_.reset();
  threads_of_engine_ = 0;
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
    // A second round goes on behind it.
    const auto is_updating = [&] {
      return std::ranges::any_of(engine_->ListJobs(), [](const std::shared_ptr<Job>& job) {
        return job->Status().phase == JobPhase::kUpdating;
      });
    };
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!*deaths_->flag() && is_updating()) {
      if (std::chrono::steady_clock::now() > deadline) return Wrong("a second round does not end");
      std::this_thread::yield();
    }
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
      spec_(SpecOf(plan, engines.NewJobName())),
      lead_(spec_.lead()),
      layout_(Layout::Create(spec_.layout).value()),
      model_(plan),
      directory_(absl::StrCat("/", spec_.name)) {
  if (spec_.members.empty()) {
    engine_ = &engines.WithThreads(plan.threads, may_die);
    parts_ = {engine_->CreateJob(spec_).value()};
    host_.Begin(*engine_, nullptr);
    return;
  }
  engines.Clear();
  directory_ = absl::StrCat(LinkedEngines::kSaved, directory_);
  const int victim = may_die ? spec_.home(plan.victim % plan.world_size) : -1;
  linked_ = std::make_unique<LinkedEngines>(spec_, plan.links_seed, plan.threads, engines.files(),
                                            victim);
}

JobUnderTest::~JobUnderTest() {
  if (has_members()) {
    parts_.clear();
    tally().words += linked_->words();
    tally().link_cuts += linked_->cuts();
    tally().member_deaths += linked_->deaths_seen();
    linked_.reset();
    engines_.files().RemoveAll(LinkedEngines::kSaved).IgnoreError();
    return;
  }
  if (parts_.empty()) return;  // It was lost.
  const JobStatus status = job().Status();
  tally().speculated += status.speculation.speculated;
  tally().published += status.speculation.published;
  tally().redone += status.speculation.redone;
  parts_.clear();
  engine_->CloseJob(spec_.name).IgnoreError();
  engines_.files().RemoveAll(directory_).IgnoreError();
}

void JobUnderTest::Expose() {
  if (!has_members()) return;
  parts_.clear();
  if (linked_->deaths() != nullptr) linked_->deaths()->Expose();
}

absl::Status JobUnderTest::Settle() {
  if (!has_members()) return absl::OkStatus();
  if (linked_->deaths() != nullptr) linked_->deaths()->Hide();
  BALLAST_RETURN_IF_ERROR(linked_->Settle());
  parts_.clear();
  for (int member = 0; member < linked_->members(); ++member) {
    BALLAST_ASSIGN_OR_RETURN(parts_.emplace_back(), linked_->Part(member));
  }
  return absl::OkStatus();
}

absl::Status JobUnderTest::Close() {
  if (!has_members()) return absl::OkStatus();
  parts_.clear();
  const auto visit = linked_->host(lead_).Enter();
  BALLAST_RETURN_IF_ERROR(Annotate(visit
                                       ->Await<bool>([&](Done<bool> done) {
                                         visit->engine().CloseJob(spec_.name, std::move(done));
                                       })
                                       .status(),
                                   "the job is closed"));
  // A member may find its own a little longer.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (int member = 0; member < linked_->members(); ++member) {
    while (!absl::IsNotFound(linked_->Part(member).status())) {
      if (std::chrono::steady_clock::now() > deadline) {
        return Wrong("the job is closed, and member ", member, " has it");
      }
      std::this_thread::yield();
    }
  }
  return absl::OkStatus();
}

int JobUnderTest::ChunkAt(const Job& part, int chunk) const {
  const int rank = layout_.chunks()[chunk].rank;
  return chunk - layout_.first_of_rank(rank) + part.layout().first_of_rank(rank);
}

absl::Status JobUnderTest::Create() {
  if (!has_members()) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(linked_->Create());
  return Settle();
}

absl::Status JobUnderTest::UploadWeights() {
  bool is_whole = false;
  for (int turn = 0; !is_whole && turn < kMostTurns; ++turn) {
    Expose();
    is_whole = true;
    for (int chunk = 0; chunk < static_cast<int>(layout().chunks().size()); ++chunk) {
      const absl::Status uploaded = UploadWeights(chunk);
      is_whole = is_whole && uploaded.ok();
      if (!has_members() || !absl::IsUnavailable(uploaded)) BALLAST_RETURN_IF_ERROR(uploaded);
    }
    BALLAST_RETURN_IF_ERROR(Settle());
  }
  return has_members() ? AwaitBegun() : absl::OkStatus();
}

absl::Status JobUnderTest::UploadWeights(int chunk) {
  std::vector<float> values(layout().chunks()[chunk].elements, 0.0f);
  for (const ChunkPiece& piece : layout().Pieces(chunk)) {
    for (int64_t i = 0; i < piece.elements; ++i) {
      values[piece.chunk_offset + i] =
          FirstWeight(plan_.parameters[piece.parameter], piece.parameter_offset + i);
    }
  }
  const absl::Span<const std::byte> piece(reinterpret_cast<const std::byte*>(values.data()),
                                          values.size() * sizeof(float));
  const auto visit = host_of(layout().chunks()[chunk].rank).Enter();
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> part, visit->engine().FindJob(spec_.name));
  // After a death that took none of them along, the last may be there already.
  if (part->Status().phase != JobPhase::kAwaitingWeights) return visit->Heard(absl::OkStatus());
  return visit->Heard(part->WriteInitialWeights(ChunkAt(*part, chunk), {piece}).status());
}

// A member may begin a little after the word has reached it.
absl::Status JobUnderTest::AwaitBegun() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (const auto& part : parts_) {
    while (part->Status().phase == JobPhase::kAwaitingWeights) {
      if (std::chrono::steady_clock::now() > deadline) return Wrong("the job has not begun");
      std::this_thread::yield();
    }
  }
  return Settle();
}

absl::Status JobUnderTest::TakeOver() {
  parts_.clear();
  engine_->CloseJob(spec_.name).IgnoreError();
  BALLAST_ASSIGN_OR_RETURN(engine_, engines_.TakeOver());
  host_.Begin(*engine_, nullptr);
  return FindAgain();
}

absl::Status JobUnderTest::FindAgain() {
  parts_.clear();
  BALLAST_ASSIGN_OR_RETURN(parts_.emplace_back(), engine_->FindJob(spec_.name));
  return absl::OkStatus();
}

absl::Status JobUnderTest::Save() {
  BALLAST_ASSIGN_OR_RETURN(const CheckpointInfo info,
                           AskLead<CheckpointInfo>([&](Job& job, Done<CheckpointInfo> done) {
                             (void)job.Save({.folder = directory_}, std::move(done));
                           }));
  saved_ = model_.state();
  saved_records_ = job().Status().recent_steps;
  if (info.step == saved_->committed_step) return absl::OkStatus();
  return Wrong("saved at step ", info.step, ", expected ", saved_->committed_step);
}

absl::StatusOr<std::optional<CheckpointInfo>> JobUnderTest::Load() {
  if (!saved_.has_value()) return std::nullopt;
  BALLAST_ASSIGN_OR_RETURN(const CheckpointInfo info,
                           AskLead<CheckpointInfo>([&](Job& job, Done<CheckpointInfo> done) {
                             (void)job.Load({.path = directory_}, std::move(done));
                           }));
  model_.Load(*saved_);
  ++tally().loaded;
  for (const auto& part : parts_) BALLAST_RETURN_IF_ERROR(CheckLoadedRecord(*part));
  return info;
}

absl::Status JobUnderTest::CheckLoadedRecord(const Job& part) const {
  const std::vector<StepRecord> records = part.Status().recent_steps;
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
  BALLAST_ASSIGN_OR_RETURN(const HyperParameters values,
                           AskLead<HyperParameters>([&](Job& job, Done<HyperParameters> done) {
                             std::move(done)(job.UpdateGroup(group, changes));
                           }));
  model_.ChangeGroup(group, changes);
  changed_unheard_ = has_members();
  if (values == model_.state().in_force[group]) return absl::OkStatus();
  return Wrong("set-group of group ", group, " says ", ToString(values));
}

std::vector<std::byte> JobUnderTest::Shard(int chunk) const {
  const Chunk& place = layout().chunks()[chunk];
  const DType dtype = plan_.groups[place.group].return_dtype;
  std::vector<std::byte> bytes(place.elements * SizeBytes(dtype));
  for (const ChunkPiece& piece : layout().Pieces(chunk)) {
    const std::vector<float>& master =
        model_.state().parameters[piece.parameter].planes.at(Plane::kMaster);
    // What goes out of packed state is what is stored there.
    const bool is_stored = dtype == DType::kBFloat16 && place.format != StateFormat::kFloat32;
    for (int64_t i = 0; i < piece.elements; ++i) {
      const float weight = master[piece.parameter_offset + i];
      const int64_t at = piece.chunk_offset + i;
      StoreElement(bytes.data(), dtype, at,
                   is_stored ? BFloat16ToFloat(PackWeight(weight)) : weight);
    }
  }
  return bytes;
}

absl::StatusOr<std::vector<std::vector<uint16_t>>> JobUnderTest::MakeOrthogonal() {
  const std::vector<HyperParameters> values = job().Status().recent_steps.back().hyper_parameters;
  std::vector<std::vector<uint16_t>> of_chunks(layout_.chunks().size());
  for (int chunk = 0; chunk < static_cast<int>(of_chunks.size()); ++chunk) {
    const Chunk& place = layout_.chunks()[chunk];
    if (!HasTwoRounds(values[place.group].rule)) continue;
    of_chunks[chunk].resize(place.elements);
    BALLAST_RETURN_IF_ERROR(
        job().ReadDirections(next_step(), chunk,
                             {reinterpret_cast<std::byte*>(of_chunks[chunk].data()),
                              of_chunks[chunk].size() * sizeof(uint16_t)}));
  }
  for (int p = 0; p < static_cast<int>(plan_.parameters.size()); ++p) {
    const ParameterPlan& parameter = plan_.parameters[p];
    const int64_t elements = layout_.place(p).elements;
    if (!HasTwoRounds(values[parameter.group].rule) || !parameter.trainable || elements == 0) {
      continue;
    }
    std::vector<uint16_t> matrix(elements);
    const auto visit = [&](const auto& copy) {
      layout_.VisitRange(p, 0, elements, [&](const ChunkPiece& piece) {
        copy(matrix.data() + piece.parameter_offset,
             of_chunks[piece.chunk].data() + piece.chunk_offset, piece.elements);
      });
    };
    visit([](uint16_t* to, const uint16_t* from, int64_t n) { std::copy_n(from, n, to); });
    const std::vector<int64_t> shape = ShapeOf(plan_, parameter);
    OrthogonalizeReference(absl::MakeSpan(matrix), shape[0], shape[1], values[parameter.group]);
    visit([](const uint16_t* from, uint16_t* to, int64_t n) { std::copy_n(from, n, to); });
  }
  return of_chunks;
}

absl::Status JobUnderTest::CheckShard(int chunk, const std::vector<std::byte>& came) const {
  if (came == Shard(chunk)) return absl::OkStatus();
  return Wrong("the weights of chunk ", chunk, " are not those of step ",
               model_.state().committed_step);
}

absl::Status JobUnderTest::CheckShards() {
  const Generation generation = job().Status().generation;
  for (int chunk = 0; chunk < static_cast<int>(layout().chunks().size()); ++chunk) {
    std::vector<std::byte> bytes(Shard(chunk).size());
    Job& part = home(layout().chunks()[chunk].rank);
    BALLAST_RETURN_IF_ERROR(part.ReadShard(generation, model_.state().committed_step,
                                           ChunkAt(part, chunk), absl::MakeSpan(bytes)));
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
  const bool as_begun = !changed_unheard_ &&
                        (attempt.expects_clipping || attempt.vote.clipping.multipliers.empty()) &&
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
  if (expected.given_up) ++given_up_steps_;
  int64_t summed = 0;
  const Generation generation = job().Status().generation;
  for (size_t member = 0; member < parts_.size(); ++member) {
    const JobStatus status = parts_[member]->Status();
    BALLAST_RETURN_IF_ERROR(
        Annotate(CheckPart(status, attempt, expected), absl::StrCat("member ", member)));
    if (status.generation != generation) {
      return Wrong("member ", member, " is at generation ", ToString(status.generation),
                   ", its lead at ", ToString(generation));
    }
    summed += status.accumulators_in_use;
    if (!has_members()) continue;
    const SpeculationCounts& counts = status.recent_steps.back().speculation;
    tally().speculated += counts.speculated;
    tally().published += counts.published;
    tally().redone += counts.redone;
  }
  // A later process counts its own.
  const bool has_died = has_members() && linked_->deaths_seen() > 0;
  if (summed != summed_chunks && !expected.given_up && !has_died) {
    return Wrong(summed, " accumulators in use, expected ", summed_chunks);
  }
  return absl::OkStatus();
}

absl::Status JobUnderTest::CheckPart(const JobStatus& status, const Attempt& attempt,
                                     const ModelOutcome& expected) {
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
  tally().over_members += has_members();
  tally().clipped += expected.decision.apply && expected.decision.clip_coefficient != 1;
  tally().skipped += !expected.decision.apply;
  tally().abandoned += expected.abandoned;
  tally().given_up += expected.given_up;
  tally().with_unused += !expected.unused_parameters.empty();
  BALLAST_RETURN_IF_ERROR(CheckStatus(attempt, expected, summed_chunks));
  changed_before_commit_ = std::exchange(changed_unheard_, false);
  return CheckShards();
}

// ---------------------------------------------------------------- state

absl::StatusOr<Snapshot> JobUnderTest::TakeSnapshot(Job& part) {
  std::vector<int> trainable;
  for (int p = 0; p < static_cast<int>(plan_.parameters.size()); ++p) {
    if (plan_.parameters[p].trainable) trainable.push_back(p);
  }
  ++tally().snapshots;
  return part.TakeSnapshot(trainable);
}

absl::StatusOr<std::vector<Snapshot>> JobUnderTest::TakeSnapshots() {
  std::vector<Snapshot> snapshots;
  for (const auto& part : parts_) {
    BALLAST_ASSIGN_OR_RETURN(Snapshot snapshot, TakeSnapshot(*part));
    snapshots.push_back(std::move(snapshot));
  }
  return snapshots;
}

absl::Status JobUnderTest::CheckSnapshot(const Snapshot& snapshot, const ModelState& state) const {
  return CheckSnapshot(snapshot, state, layout());
}

absl::Status JobUnderTest::CheckSnapshots(const std::vector<Snapshot>& snapshots,
                                          const ModelState& state) const {
  for (size_t part = 0; part < snapshots.size(); ++part) {
    BALLAST_RETURN_IF_ERROR(Annotate(CheckSnapshot(snapshots[part], state, parts_[part]->layout()),
                                     absl::StrCat("member ", part)));
  }
  return absl::OkStatus();
}

absl::Status JobUnderTest::CheckSnapshot(const Snapshot& snapshot, const ModelState& state,
                                         const Layout& layout) const {
  if (snapshot.step() != state.committed_step) {
    return Wrong("a snapshot of step ", snapshot.step(), ", expected ", state.committed_step);
  }
  for (int p = 0; p < static_cast<int>(plan_.parameters.size()); ++p) {
    const ParameterPlan& parameter = plan_.parameters[p];
    if (!parameter.trainable) continue;
    if (snapshot.update_count(p) != state.parameters[p].updates) {
      return Wrong("in a snapshot ", NameOf(parameter), " has had ", snapshot.update_count(p),
                   " updates, expected ", state.parameters[p].updates);
    }
    if (snapshot.planes(p) != PlanesOf(plan_.groups[parameter.group].hyper_parameters)) {
      return Wrong(NameOf(parameter), " has the planes ", NamesOf(snapshot.planes(p)));
    }
  }
  for (int chunk = 0; chunk < static_cast<int>(layout.chunks().size()); ++chunk) {
    for (const ChunkPiece& piece : layout.Pieces(chunk)) {
      const ParameterState& expected = state.parameters[piece.parameter];
      std::vector<float> came(piece.elements);
      for (const auto& [plane, values] : expected.planes) {
        snapshot.Read(piece.parameter, plane, piece.parameter_offset, absl::MakeSpan(came));
        for (int64_t i = 0; i < piece.elements; ++i) {
          const int64_t at = piece.parameter_offset + i;
          const float want = values[at];
          if (std::bit_cast<uint32_t>(came[i]) == std::bit_cast<uint32_t>(want)) continue;
          return Wrong("step ", state.committed_step, ": ", Name(plane), " of ",
                       NameOf(plan_.parameters[piece.parameter]), "[", at, "] is ", came[i],
                       ", expected ", want);
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::Status JobUnderTest::CheckAllState() {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Snapshot> snapshots, TakeSnapshots());
  return CheckSnapshots(snapshots, model_.state());
}

}  // namespace ballast::histories
