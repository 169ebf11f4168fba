#include "cpu_optimizer_service/job/job_impl.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

// Updated weights on their way out: enough to keep a connection busy while the update goes on.
constexpr int64_t kShardBuffers = 32;

std::vector<int> PlanesByGroup(const JobSpec& spec) {
  std::vector<int> planes;
  for (const GroupSpec& group : spec.groups)
    planes.push_back(group.hyper_parameters.amsgrad ? 4 : 3);
  return planes;
}

int64_t WeightBufferBytes(const JobSpec& spec, const Layout& layout) {
  int64_t bytes = 0;
  for (const Chunk& chunk : layout.chunks()) {
    bytes = std::max(bytes, chunk.elements * SizeBytes(spec.groups[chunk.group].return_dtype));
  }
  return bytes;
}

// Descriptions, tables and records, by what they grow with; generous, since small beside the rest.
int64_t TableBytes(const JobSpec& spec, const Layout& layout) {
  int64_t bytes = 384 * static_cast<int64_t>(layout.chunks().size()) + 512 * layout.world_size();
  bytes += static_cast<int64_t>(kRecentSteps * sizeof(HyperParameters) * spec.groups.size());
  for (const ParameterSpec& parameter : spec.layout.parameters) {
    bytes += 512 + 3 * static_cast<int64_t>(parameter.name.size() + 8 * parameter.shape.size());
  }
  return bytes;
}

// Sums of squares, by block and by span.
int64_t SumBytes(const Layout& layout) {
  int64_t sums = 0;
  for (int group = 0; group < layout.group_count(); ++group) {
    const int64_t blocks = layout.flat_blocks(group);
    sums += blocks + (blocks + kSpanBlocks - 1) / kSpanBlocks;
  }
  return sums * int64_t{sizeof(double)};
}

int64_t WeightBufferCount(const Layout& layout) {
  return std::min<int64_t>(kShardBuffers, static_cast<int64_t>(layout.chunks().size()));
}

std::string MakeUid() {
  std::random_device random;
  return absl::StrFormat("%08x%08x%08x%08x", random(), random(), random(), random());
}

}  // namespace

MemoryNeed NeedOf(const JobSpec& spec, const Layout& layout) {
  MemoryNeed need;
  need.state_bytes = ChunkStore::StateBytes(layout, PlanesByGroup(spec));
  need.gradient_bytes = GradientStore::GradientBytes(spec, layout);
  need.accumulator_bytes = GradientStore::AccumulatorBytes(spec, layout);
  if (spec.update_mode == UpdateMode::kSpeculate) {
    constexpr int64_t kTableBytesOfChunk = 384;  // The guess, its task, its second version.
    need.speculation_bytes =
        need.state_bytes + kTableBytesOfChunk * static_cast<int64_t>(layout.chunks().size());
  }
  need.other_bytes = WeightBufferBytes(spec, layout) * WeightBufferCount(layout) +
                     SumBytes(layout) + TableBytes(spec, layout);
  return need;
}

absl::StatusOr<std::shared_ptr<JobImpl>> JobImpl::Create(JobSpec spec,
                                                         const JobEnvironment& environment) {
  BALLAST_RETURN_IF_ERROR(Validate(spec));
  BALLAST_ASSIGN_OR_RETURN(Layout layout, Layout::Create(spec.layout));
  std::shared_ptr<JobImpl> job(new JobImpl(std::move(spec), std::move(layout), environment));
  BALLAST_RETURN_IF_ERROR(job->Allocate());
  return job;
}

JobImpl::JobImpl(JobSpec spec, Layout layout, const JobEnvironment& environment)
    : spec_(std::move(spec)),
      layout_(std::move(layout)),
      environment_(environment),
      uid_(MakeUid()),
      need_(NeedOf(spec_, layout_)),
      ranks_(layout_.world_size()),
      ledger_(static_cast<int64_t>(layout_.chunks().size())),
      sums_(layout_.chunks().size(), SumsState::kNone),
      guesses_(layout_.chunks().size()),
      weights_arrived_(layout_.chunks().size(), false),
      weights_missing_(static_cast<int64_t>(layout_.chunks().size())),
      later_changes_(spec_.groups.size()),
      update_counts_(spec_.layout.parameters.size(), 0) {
  for (const GroupSpec& group : spec_.groups) hyper_parameters_.push_back(group.hyper_parameters);
}

absl::Status JobImpl::Allocate() {
  const std::string owner = absl::StrCat("job ", spec_.name);
  absl::StatusOr<MemoryBudget::Reservation> reservation =
      environment_.budget->Reserve(need_.total_bytes(), owner);
  if (!reservation.ok() && need_.speculation_bytes > 0) {
    speculation_refused_ = std::string(reservation.status().message());
    need_.speculation_bytes = 0;
    reservation = environment_.budget->Reserve(need_.total_bytes(), owner);
  }
  if (!reservation.ok()) return reservation.status();
  reservation_ = *std::move(reservation);
  BALLAST_ASSIGN_OR_RETURN(store_,
                           ChunkStore::Create(layout_,
                                              {.planes = PlanesByGroup(spec_),
                                               .second_versions = need_.speculation_bytes > 0,
                                               .budget = environment_.budget,
                                               .owner = owner},
                                              *environment_.arenas));
  BALLAST_ASSIGN_OR_RETURN(gradients_, GradientStore::Create(spec_, layout_, *environment_.arenas));
  // A task, because a buffer may come back anywhere, under whatever lock.
  const auto start_parked = [weak = weak_from_this()] {
    auto self = std::static_pointer_cast<JobImpl>(weak.lock());
    if (self == nullptr) return;
    TaskPool& tasks = *self->environment_.tasks;
    tasks.Start([self = std::move(self)] { self->StartParkedGuesses(); });
  };
  weight_buffers_ = WeightBufferPool::Create(WeightBufferBytes(spec_, layout_),
                                             WeightBufferCount(layout_), start_parked);
  return absl::OkStatus();
}

absl::Status JobImpl::CheckUsable() const {
  if (closed_) return absl::NotFoundError(absl::StrCat("job ", spec_.name, " has been closed"));
  if (loading_) {
    return absl::UnavailableError(
        absl::StrCat("job ", spec_.name, " is loading a checkpoint; try again when it has"));
  }
  return broken_;
}

// ---------------------------------------------------------------- first weights

absl::StatusOr<bool> JobImpl::WriteInitialWeights(
    int64_t index, absl::Span<const absl::Span<const std::byte>> payload,
    const std::optional<Uploader>& uploader) {
  if (index < 0 || index >= static_cast<int64_t>(layout_.chunks().size())) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", index, " is not in job ", spec_.name,
                                                   ", which has ", layout_.chunks().size()));
  }
  const Chunk& chunk = layout_.chunks()[index];
  size_t size_bytes = 0;
  for (const auto& piece : payload) size_bytes += piece.size();
  if (size_bytes != chunk.elements * sizeof(float)) {
    return absl::InvalidArgumentError(absl::StrCat("first weights of chunk ", index, " have ",
                                                   size_bytes, " bytes, expected ", chunk.elements,
                                                   " fp32 values"));
  }
  std::vector<float> weights(chunk.elements);
  auto* out = reinterpret_cast<std::byte*>(weights.data());
  for (const auto& piece : payload) {
    if (!piece.empty()) std::memcpy(out, piece.data(), piece.size());
    out += piece.size();
  }
  for (int64_t i = chunk.elements - 1; i >= 0; --i) {
    if (layout_.ParameterAt(chunk.group, chunk.begin + i) != -1) break;
    if (weights[i] != 0) {
      return absl::InvalidArgumentError(absl::StrCat("first weights of chunk ", index, " have ",
                                                     weights[i], " in the padding at element ", i,
                                                     "; padding must be zero"));
    }
  }
  MutexLock lock(mutex_);
  while (clearing_ || loading_ || holds_ > 0) changed_.Wait(mutex_);
  BALLAST_RETURN_IF_ERROR(CheckUsable());
  if (uploader.has_value()) {
    BALLAST_RETURN_IF_ERROR(CheckGeneration(uploader->generation));
    if (ranks_[chunk.rank].process_id != uploader->process_id) {
      return absl::AbortedError(absl::StrCat("rank ", chunk.rank, " of job ", spec_.name,
                                             " is not held by this process; attach again"));
    }
  }
  if (weights_missing_ == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", spec_.name, " has its weights; load a checkpoint to replace them"));
  }
  std::copy(weights.begin(), weights.end(),
            store_->Published(static_cast<int>(index))[Plane::kMaster]);
  if (!weights_arrived_[index]) {
    weights_arrived_[index] = true;
    --weights_missing_;
  }
  return weights_missing_ == 0;
}

// ---------------------------------------------------------------- control

void JobImpl::TellWaiting() {
  Listeners sealed;
  std::vector<int> awaited;
  uint64_t step = 0;
  {
    MutexLock lock(mutex_);
    const auto* open = std::get_if<OpenStep>(&step_);
    if (open == nullptr || !open->SecondsSinceFirstSeal().has_value()) return;
    step = open->terms().step;
    awaited = open->UnsealedRanks();
    for (int rank = 0; rank < layout_.world_size(); ++rank) {
      if (open->ranks()[rank].sealed.has_value() && ranks_[rank].listener != nullptr) {
        sealed.push_back(ranks_[rank].listener);
      }
    }
  }
  for (const auto& listener : sealed) listener->OnWaiting(step, awaited);
}

std::optional<double> JobImpl::SecondsSinceFirstSeal() const {
  MutexLock lock(mutex_);
  const auto* open = std::get_if<OpenStep>(&step_);
  return open == nullptr ? std::nullopt : open->SecondsSinceFirstSeal();
}

absl::StatusOr<uint64_t> JobImpl::AbortStepNow() {
  uint64_t step = 0;
  Detached detached;
  {
    MutexLock lock(mutex_);
    BALLAST_RETURN_IF_ERROR(CheckUsable());
    if (const auto* open = std::get_if<OpenStep>(&step_)) {
      step = open->terms().step;
    } else if (const auto* sealed = std::get_if<SealedStep>(&step_)) {
      step = sealed->terms().step;
    } else if (const auto* decided = std::get_if<DecidedStep>(&step_)) {
      return absl::FailedPreconditionError(absl::StrCat("step ", decided->terms().step, " of job ",
                                                        spec_.name,
                                                        " is decided and can only go on"));
    } else {
      return absl::FailedPreconditionError(
          absl::StrCat("job ", spec_.name, " is between steps, at step ", committed_step_));
    }
    detached = RaiseGeneration();  // What is still on its way must not meet the next attempt.
  }
  Detach(detached.listeners,
         absl::AbortedError(absl::StrCat("step ", step, " of job ", spec_.name,
                                         " was aborted; attach again and redo it")));
  return step;
}

absl::StatusOr<HyperParameters> JobImpl::UpdateGroup(int group,
                                                     const HyperParameterOverrides& changes) {
  Check(group >= 0 && group < layout_.group_count(), "the group is one of the job's");
  MutexLock lock(mutex_);
  BALLAST_RETURN_IF_ERROR(CheckUsable());
  const HyperParameters changed = Apply(hyper_parameters_[group], changes);
  BALLAST_RETURN_IF_ERROR(
      Annotate(Validate(changed), absl::StrCat("group ", spec_.groups[group].name)));
  hyper_parameters_[group] = changed;
  if (!std::holds_alternative<std::monostate>(step_)) {
    later_changes_[group] = Merge(later_changes_[group], changes);
  }
  return changed;
}

bool JobImpl::IsBetweenSteps() const {
  MutexLock lock(mutex_);
  return std::holds_alternative<std::monostate>(step_) && !deciding_ && !clearing_;
}

void JobImpl::Close() {
  Detached detached;
  {
    MutexLock lock(mutex_);
    WaitUntilSettled();
    if (closed_) return;
    closed_ = true;
    step_over_.NotifyAll();
    detached = RaiseGeneration();
  }
  Detach(detached.listeners,
         absl::AbortedError(absl::StrCat("job ", spec_.name, " has been closed")));
}

// ---------------------------------------------------------------- status

JobStatus JobImpl::Status() const {
  MutexLock lock(mutex_);
  JobStatus status;
  status.generation = generation_;
  status.committed_step = committed_step_;
  status.applied_steps = applied_steps_;
  status.skipped_steps = skipped_steps_;
  status.coverage_complete_steps = coverage_complete_steps_;
  status.trainer_state = trainer_state_;
  status.memory = need_;
  status.speculation = speculation_;
  status.speculation_refused = speculation_refused_;
  status.speculation_paused =
      CanSpeculate() ? std::count_if(guesses_.begin(), guesses_.end(),
                                     [](const Guess& guess) { return guess.history.paused(); })
                     : 0;
  status.hyper_parameters = hyper_parameters_;
  status.update_counts = update_counts_;
  status.recent_steps.assign(recent_steps_.begin(), recent_steps_.end());
  status.accumulators_in_use = std::holds_alternative<std::monostate>(step_)
                                   ? last_accumulators_in_use_
                                   : gradients_->accumulators_in_use();
  const std::vector<RankInStep>* in_step = nullptr;
  if (closed_) {
    status.phase = JobPhase::kClosed;
  } else if (weights_missing_ > 0) {
    status.phase = JobPhase::kAwaitingWeights;
  } else if (const auto* open = std::get_if<OpenStep>(&step_)) {
    status.phase = JobPhase::kOpen;
    in_step = &open->ranks();
  } else if (const auto* sealed = std::get_if<SealedStep>(&step_)) {
    status.phase = JobPhase::kSealed;
    in_step = &sealed->ranks();
  } else if (const auto* decided = std::get_if<DecidedStep>(&step_)) {
    status.phase = JobPhase::kUpdating;
    in_step = &decided->ranks();
  } else {
    status.phase = JobPhase::kReady;
  }
  for (int rank = 0; rank < layout_.world_size(); ++rank) {
    if (ranks_[rank].memory != nullptr) status.rank_memory_bytes += ranks_[rank].memory_bytes;
    status.ranks.push_back(ProgressOf(rank, in_step == nullptr ? nullptr : &(*in_step)[rank]));
  }
  return status;
}

}  // namespace ballast
