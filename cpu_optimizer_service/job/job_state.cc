// Looking at state, saving it and loading it.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/sha256.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/job_impl.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {

// Keeps the next decision from starting, so that committed state can be read where it lies.
class JobImpl::Hold {
 public:
  // Waits for a decision that is running.
  explicit Hold(const JobImpl& job) : job_(job) {
    MutexLock lock(job_.mutex_);
    // Readers that come after a seal let its decision pass, or they could hold it back for ever.
    const auto held_back = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_.mutex_) {
      return job_.holds_ > 0 && std::holds_alternative<SealedStep>(job_.step_);
    };
    while (job_.deciding_ || job_.clearing_ || job_.loading_ || held_back()) {
      job_.changed_.Wait(job_.mutex_);
    }
    ++job_.holds_;
  }
  // Takes over a hold that the caller has counted.
  struct Adopt {};
  Hold(const JobImpl& job, Adopt) : job_(job) {}
  ~Hold() {
    MutexLock lock(job_.mutex_);
    if (--job_.holds_ == 0) job_.StartDecisionIfDue();
    job_.changed_.NotifyAll();
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

 private:
  const JobImpl& job_;
};

absl::Status JobImpl::ReadShard(uint64_t generation, uint64_t step, int index,
                                absl::Span<std::byte> out) const {
  {
    MutexLock lock(mutex_);
    if (closed_) return CheckUsable();
    BALLAST_RETURN_IF_ERROR(CheckGeneration(generation));
    BALLAST_RETURN_IF_ERROR(CheckUsable());
    if (weights_missing_ > 0) {
      return absl::FailedPreconditionError(absl::StrCat("job ", spec_.name, " has no weights yet"));
    }
    // While an update runs, the chunks that it has finished stay as they are, and only they.
    const bool updating = std::holds_alternative<DecidedStep>(step_);
    if (clearing_ || loading_ || std::holds_alternative<SealedStep>(step_) ||
        (updating && step == committed_step_)) {
      return absl::UnavailableError(
          absl::StrCat("job ", spec_.name, " is about to change; read again"));
    }
    if (step != committed_step_ + (updating ? 1 : 0) || store_->step(index) != step) {
      return absl::FailedPreconditionError(absl::StrCat("chunk ", index, " of job ", spec_.name,
                                                        " stands at step ", store_->step(index),
                                                        ", not ", step));
    }
    ++holds_;
  }
  const Hold hold(*this, Hold::Adopt());
  const Chunk& chunk = layout_.chunks()[index];
  ConvertFromFloat(store_->Published(index)[Plane::kMaster], out.data(),
                   spec_.groups[chunk.group].return_dtype, chunk.elements);
  return absl::OkStatus();
}

absl::StatusOr<Snapshot> JobImpl::TakeSnapshot(absl::Span<const int> parameters) {
  Snapshot snapshot;
  snapshot.layout_ = &layout_;
  snapshot.keep_alive_ = shared_from_this();
  for (const GroupSpec& group : spec_.groups) {
    snapshot.amsgrad_.push_back(group.hyper_parameters.amsgrad);
  }
  absl::flat_hash_set<int> needed;
  for (const int parameter : parameters) {
    const auto [first, last] = layout_.ChunksOfParameter(parameter);
    for (int chunk = first; chunk < last; ++chunk) needed.insert(chunk);
  }
  const std::vector<int> chunks(needed.begin(), needed.end());
  MutexLock lock(mutex_);
  WaitUntilSettled();
  BALLAST_RETURN_IF_ERROR(CheckUsable());
  if (weights_missing_ > 0) {
    return absl::FailedPreconditionError(absl::StrCat("job ", spec_.name, " has no weights yet"));
  }
  BALLAST_ASSIGN_OR_RETURN(std::vector<ChunkPin> pins, store_->Pin(chunks));
  for (size_t i = 0; i < chunks.size(); ++i) snapshot.pins_.emplace(chunks[i], std::move(pins[i]));
  for (const int parameter : parameters) {
    snapshot.update_counts_[parameter] = update_counts_[parameter];
  }
  snapshot.step_ = committed_step_;
  return snapshot;
}

// ---------------------------------------------------------------- save

void JobImpl::ReadCommitted(int parameter, Plane plane, int64_t offset,
                            absl::Span<float> out) const {
  const int64_t begin = layout_.place(parameter).offset + offset;
  const int64_t end = begin + static_cast<int64_t>(out.size());
  const auto [first, last] = layout_.ChunksOfParameter(parameter);
  for (int index = first; index < last; ++index) {
    const Chunk& chunk = layout_.chunks()[index];
    const int64_t from = std::max(begin, chunk.begin);
    const int64_t to = std::min(end, chunk.begin + chunk.elements);
    if (from >= to) continue;
    std::memcpy(out.data() + (from - begin), store_->Published(index)[plane] + (from - chunk.begin),
                (to - from) * sizeof(float));
  }
}

CheckpointIndex JobImpl::MakeIndex() const {
  CheckpointIndex index = {.job = spec_.name, .uid = uid_};
  MutexLock lock(mutex_);
  index.step = committed_step_;
  index.trainer_state = trainer_state_;
  if (!recent_steps_.empty()) index.last_step = recent_steps_.back();
  for (int group = 0; group < layout_.group_count(); ++group) {
    index.groups.push_back(
        {.name = spec_.groups[group].name, .hyper_parameters = hyper_parameters_[group]});
  }
  for (int p = 0; p < static_cast<int>(spec_.layout.parameters.size()); ++p) {
    const ParameterSpec& parameter = spec_.layout.parameters[p];
    if (!parameter.trainable) continue;
    index.parameters.push_back({.name = parameter.name,
                                .shape = parameter.shape,
                                .group = spec_.groups[parameter.group].name,
                                .elements = layout_.place(p).elements,
                                .update_count = update_counts_[p]});
  }
  return index;
}

absl::StatusOr<CheckpointInfo> JobImpl::Save(const std::string& directory) {
  const Hold hold(*this);
  CheckpointInfo info;
  {
    MutexLock lock(mutex_);
    BALLAST_RETURN_IF_ERROR(CheckUsable());
    if (weights_missing_ > 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("job ", spec_.name, " has no weights yet; there is nothing to save"));
    }
    info.generation = generation_;
  }
  const CheckpointIndex index = MakeIndex();
  info.step = index.step;
  BALLAST_ASSIGN_OR_RETURN(
      info.size_bytes,
      WriteCheckpoint(*environment_.file_system, directory, index,
                      [&](int parameter, Plane plane, int64_t offset, absl::Span<float> out) {
                        const int p = layout_.FindParameter(index.parameters[parameter].name);
                        ReadCommitted(p, plane, offset, out);
                      }));
  return info;
}

std::string JobImpl::StateHash() const {
  const Hold hold(*this);
  const CheckpointIndex index = MakeIndex();
  Sha256 sha256;
  std::vector<float> buffer(1 << 16);
  for (const CheckpointIndex::Parameter& parameter : index.parameters) {
    sha256.AddValue(parameter.update_count);
    const int p = layout_.FindParameter(parameter.name);
    const bool amsgrad = spec_.groups[spec_.layout.parameters[p].group].hyper_parameters.amsgrad;
    for (int plane = 0; plane < (amsgrad ? 4 : 3); ++plane) {
      for (int64_t offset = 0; offset < parameter.elements;
           offset += static_cast<int64_t>(buffer.size())) {
        const auto piece = absl::MakeSpan(buffer).first(
            std::min<int64_t>(static_cast<int64_t>(buffer.size()), parameter.elements - offset));
        ReadCommitted(p, static_cast<Plane>(plane), offset, piece);
        sha256.Add(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(piece.data()),
                                       piece.size() * sizeof(float)));
      }
    }
  }
  return sha256.Hex();
}

// ---------------------------------------------------------------- load

absl::Status JobImpl::CheckLoadable(const Checkpoint& checkpoint) const {
  const CheckpointIndex& index = checkpoint.index();
  const auto refuse = [&](const auto&... what) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the checkpoint of job ", index.job, " does not fit job ", spec_.name, ": ", what...));
  };
  absl::flat_hash_set<std::string> seen;
  for (const CheckpointIndex::Parameter& saved : index.parameters) {
    const int p = layout_.FindParameter(saved.name);
    if (p == -1) return refuse("it has a parameter ", saved.name, " that the job has not");
    const ParameterSpec& parameter = spec_.layout.parameters[p];
    if (!parameter.trainable) return refuse(saved.name, " is frozen in the job");
    if (parameter.shape != saved.shape) {
      return refuse(saved.name, " has shape [", absl::StrJoin(saved.shape, ", "), "] there and [",
                    absl::StrJoin(parameter.shape, ", "), "] in the job");
    }
    if (const std::string& group = spec_.groups[parameter.group].name; group != saved.group) {
      return refuse(saved.name, " is in group ", saved.group, " there and ", group, " in the job");
    }
    seen.insert(saved.name);
  }
  for (const ParameterSpec& parameter : spec_.layout.parameters) {
    if (parameter.trainable && !seen.contains(parameter.name)) {
      return refuse("it has no parameter ", parameter.name);
    }
  }
  for (const GroupSpec& group : spec_.groups) {
    const auto saved =
        std::find_if(index.groups.begin(), index.groups.end(),
                     [&](const CheckpointIndex::Group& g) { return g.name == group.name; });
    if (saved == index.groups.end()) return refuse("it has no group ", group.name);
    if (saved->hyper_parameters.amsgrad != group.hyper_parameters.amsgrad) {
      return refuse("amsgrad of group ", group.name, " differs");
    }
  }
  return absl::OkStatus();
}

absl::Status JobImpl::LoadChunk(const Checkpoint& checkpoint, int index) {
  const Chunk& chunk = layout_.chunks()[index];
  BALLAST_ASSIGN_OR_RETURN(const ChunkStore::Write write,
                           store_->BeginWrite(index, Destination::kInPlaceIfFree));
  absl::Status status;
  for (int plane = 0; plane < kMaxPlanes; ++plane) {
    float* const to = write.to.planes[plane];
    if (to == nullptr) continue;
    std::fill_n(to, chunk.elements, 0.0f);
    for (const ChunkPiece& piece : layout_.Pieces(index)) {
      if (!status.ok()) break;
      status = checkpoint.Read(spec_.layout.parameters[piece.parameter].name,
                               static_cast<Plane>(plane), piece.parameter_offset,
                               absl::MakeSpan(to + piece.chunk_offset, piece.elements));
    }
  }
  store_->Publish(write, checkpoint.index().step);
  return status;
}

StepRecord JobImpl::LastRecord(const CheckpointIndex& index) const {
  StepRecord record = *index.last_step;
  // The checkpoint may have groups that the job has not.
  record.hyper_parameters.resize(layout_.group_count());
  for (int group = 0; group < layout_.group_count(); ++group) {
    for (size_t saved = 0; saved < index.groups.size(); ++saved) {
      if (index.groups[saved].name != spec_.groups[group].name) continue;
      record.hyper_parameters[group] = index.last_step->hyper_parameters[saved];
    }
  }
  return record;
}

absl::StatusOr<CheckpointInfo> JobImpl::Load(const std::string& directory) {
  BALLAST_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                           Checkpoint::Open(*environment_.file_system, directory));
  BALLAST_RETURN_IF_ERROR(CheckLoadable(checkpoint));
  Detached detached;
  {
    MutexLock lock(mutex_);
    WaitUntilSettled();
    if (closed_) return CheckUsable();
    loading_ = true;
    detached = RaiseGeneration();
    while (holds_ > 0) changed_.Wait(mutex_);
  }
  Detach(detached.listeners,
         absl::AbortedError(
             absl::StrCat("job ", spec_.name, " was loaded from a checkpoint; attach again")));
  detached.memories.clear();
  absl::Status status;
  for (int chunk = 0; chunk < static_cast<int>(layout_.chunks().size()) && status.ok(); ++chunk) {
    status = LoadChunk(checkpoint, chunk);
  }
  MutexLock lock(mutex_);
  loading_ = false;
  changed_.NotifyAll();
  if (!status.ok()) {
    broken_ = absl::FailedPreconditionError(absl::StrCat("the state of job ", spec_.name,
                                                         " is torn: loading ", directory,
                                                         " did not end; load a whole checkpoint"));
    return status;
  }
  broken_ = absl::OkStatus();
  const CheckpointIndex& index = checkpoint.index();
  committed_step_ = index.step;
  trainer_state_ = index.trainer_state;
  recent_steps_.clear();  // Of steps that this state has not seen.
  if (index.last_step.has_value()) recent_steps_.push_back(LastRecord(index));
  store_->SetStep(index.step);
  for (const CheckpointIndex::Parameter& saved : index.parameters) {
    update_counts_[layout_.FindParameter(saved.name)] = saved.update_count;
  }
  for (int group = 0; group < layout_.group_count(); ++group) {
    for (const CheckpointIndex::Group& saved : index.groups) {
      if (saved.name == spec_.groups[group].name) hyper_parameters_[group] = saved.hyper_parameters;
    }
  }
  weights_arrived_.assign(weights_arrived_.size(), true);
  weights_missing_ = 0;
  return CheckpointInfo{.step = committed_step_, .generation = generation_};
}

}  // namespace ballast
