#include "cpu_optimizer_service/job/kept_job.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/host/kept_codec.h"

namespace ballast {

template <typename Each>
void Fields(Each&& each, HyperParameters& v) {
  each(v.lr, v.beta1, v.beta2, v.eps, v.weight_decay, v.decoupled_weight_decay, v.bias_correction,
       v.amsgrad, v.maximize);
}
template <typename Each>
void Fields(Each&& each, HyperParameterOverrides& v) {
  each(v.lr, v.beta1, v.beta2, v.eps, v.weight_decay, v.decoupled_weight_decay, v.bias_correction,
       v.maximize);
}
template <typename Each>
void Fields(Each&& each, Decision& v) {
  each(v.apply, v.norm, v.clip_coefficient, v.multipliers);
}
template <typename Each>
void Fields(Each&& each, StepOutcome& v) {
  each(v.step, v.decision, v.skip_cause, v.skip_reason, v.unused_parameters);
}
template <typename Each>
void Fields(Each&& each, SpeculationCounts& v) {
  each(v.speculated, v.published, v.redone);
}
template <typename Each>
void Fields(Each&& each, Generation& v) {
  each(v.epoch, v.count);
}
template <typename Each>
void Fields(Each&& each, Clipping& v) {
  each(v.max_norm, v.multipliers);
}
template <typename Each>
void Fields(Each&& each, StepTimes& v) {
  each(v.gathering, v.awaiting, v.deciding, v.updating);
}
template <typename Each>
void Fields(Each&& each, DurationHistogram& v) {
  each(v.counts, v.sum_seconds);
}
template <typename Each>
void Fields(Each&& each, StepStatistics& v) {
  each(v.clipped_steps, v.skips, v.gathering, v.awaiting, v.deciding, v.updating);
}
template <typename Each>
void Fields(Each&& each, StepVote& v) {
  each(v.apply, v.clipping, v.overrides, v.trainer_state);
}
template <typename Each>
void Fields(Each&& each, StepRecord& v) {
  each(v.outcome, v.speculation, v.micro_steps, v.loss_scale, v.times, v.voted, v.abandoned,
       v.hyper_parameters);
}
template <typename Each>
void Fields(Each&& each, StepHistory& v) {
  each(v.recent_steps, v.applied_steps, v.skipped_steps, v.coverage_complete_steps, v.speculation,
       v.statistics);
}
template <typename Each>
void Fields(Each&& each, PreviousState& v) {
  each(v.committed_step, v.applied, v.hyper_parameters, v.update_counts, v.trainer_state);
}
template <typename Each>
void Fields(Each&& each, JobRecord& v) {
  each(v.generation, v.committed_step, v.hyper_parameters, v.update_counts, v.trainer_state,
       v.history, v.resumed_uid, v.previous);
}
template <typename Each>
void Fields(Each&& each, GradientScale& v) {
  each(v.loss_scale, v.divisors);
}
template <typename Each>
void Fields(Each&& each, StepSettings& v) {
  each(v.scale, v.overrides, v.trainer_state, v.expected_clipping);
}
template <typename Each>
void Fields(Each&& each, StepTerms& v) {
  each(v.step, v.settings, v.hyper_parameters);
}
template <typename Each>
void Fields(Each&& each, UsedParameters::NonFinite& v) {
  each(v.parameter, v.element, v.value);
}
template <typename Each>
void Fields(Each&& each, UsedParameters& v) {
  each(v.all, v.parameters, v.non_finite);
}
template <typename Each>
void Fields(Each&& each, Placement& v) {
  each(v.shard_dim);
}
template <typename Each>
void Fields(Each&& each, MeshDim& v) {
  each(v.name, v.size);
}
template <typename Each>
void Fields(Each&& each, ParameterSpec& v) {
  each(v.name, v.shape, v.group, v.trainable, v.placements);
}
template <typename Each>
void Fields(Each&& each, PartitionRange& v) {
  each(v.rank, v.group, v.begin, v.end);
}
template <typename Each>
void Fields(Each&& each, LayoutSpec& v) {
  each(v.world_size, v.group_count, v.parameters, v.mesh, v.partitions, v.chunk_elements);
}
template <typename Each>
void Fields(Each&& each, GroupSpec& v) {
  each(v.name, v.hyper_parameters, v.wire_dtype, v.return_dtype);
}
template <typename Each>
void Fields(Each&& each, JobSpec& v) {
  each(v.name, v.groups, v.layout, v.on_abort, v.unused_policy, v.max_micro_steps, v.update_mode,
       v.keep_previous);
}
template <typename Each>
void Fields(Each&& each, JobIdentity& v) {
  each(v.uid, v.generation, v.spec);
}

template <typename Each>
void Fields(Each&& each, KeptDecision& v) {
  each(v.outcome, v.terms, v.vote, v.attempt, v.micro_steps, v.coverage_complete,
       v.hyper_parameters, v.update_counts, v.speculation);
}
template <typename Each>
void Fields(Each&& each, KeptLoad& v) {
  each(v.path, v.weights_only);
}
template <typename Each>
void Fields(Each&& each, KeptWord& v) {
  each(v.kind, v.rank, v.step, v.settings, v.terms, v.micro_step, v.used, v.chunk, v.begin, v.end);
}
template <typename Each>
void Fields(Each&& each, KeptJob::Rank& v) {
  each(v.last_process_id, v.memory);
}
template <typename Each>
void Fields(Each&& each, KeptJob::Undone& v) {
  each(v.step, v.generation);
}
template <typename Each>
void Fields(Each&& each, KeptJob::State& v) {
  each(v.epoch, v.closed, v.weights_complete, v.loading, v.torn_by, v.later_changes, v.ranks,
       v.decision, v.undid_update);
  each.Appended(v.undone);
}

namespace {

// Grown where a job needs more.
constexpr int64_t kRecordBytes = int64_t{64} << 10;
constexpr int64_t kLogBytes = int64_t{64} << 10;
// Threads that bring gradients; more wait for one another.
constexpr int kLeastSumLanes = 32;

// A word of the ledger.
constexpr int kKeptBits = 3;
constexpr int kClosedBits = 1;
constexpr int kNextBits = KeptJob::kMicroStepBits;
constexpr int kAttemptBits = 12;
static_assert(kMaxAttempts <= uint32_t{1} << kAttemptBits);
constexpr int kEpochBits = 28;

struct WordPacker {
  uint64_t word = 0;
  void Put(uint64_t value, int bits) {
    word = word << bits | (value & ((uint64_t{1} << bits) - 1));
  }
};
struct WordUnpacker {
  uint64_t word = 0;
  uint64_t Take(int bits) {
    const uint64_t value = word & ((uint64_t{1} << bits) - 1);
    word >>= bits;
    return value;
  }
};

auto IsOf(int chunk, uint64_t tag) {
  return [chunk, tag](const SumLane* lane) {
    return lane->tag == tag && SumWord::Unpack(lane->word).chunk == static_cast<uint32_t>(chunk);
  };
}

absl::Status OtherFormat(absl::string_view what, uint32_t format) {
  return absl::FailedPreconditionError(
      absl::StrCat(what, " was left by a service of another version (format ", format, ", here ",
                   kKeptFormat, "); start that version again, save, and load the checkpoint here"));
}

// After the format.
template <typename... T>
absl::Status Parse(absl::string_view what, const std::string& bytes, T&... values) {
  uint32_t format = 0;
  KeptReader reader(bytes);
  reader(format);
  if (reader.ok() && !ReadsKeptFormat(format)) return OtherFormat(what, format);
  reader(values...);
  if (reader.at_end()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(what, " cannot be read"));
}

// A lane's: after all that was stored before, and before all that comes later.
void StoreWord(uint64_t& word, uint64_t value) {
  KeepOrderOfStores();
  *static_cast<volatile uint64_t*>(&word) = value;
  KeepOrderOfStores();
}

}  // namespace

KeptJob::KeptJob(NamedMemory& memory, JobIdentity identity)
    : identity_(std::move(identity)),
      arenas_(memory, identity_.uid, absl::StrCat("job ", identity_.spec.name)),
      identity_record_(arenas_, "identity", kRecordBytes),
      record_record_(arenas_, "record", kRecordBytes),
      log_(arenas_, "log", kLogBytes) {}

absl::StatusOr<std::unique_ptr<KeptJob>> KeptJob::TakeOver(NamedMemory& memory,
                                                           const std::string& uid) {
  const std::string what = absl::StrCat("what is kept of the job with uid ", uid);
  NamedArenas arenas(memory, uid, "");
  KeptRecord identity_record(arenas, "identity", kRecordBytes);
  BALLAST_ASSIGN_OR_RETURN(const std::string bytes, identity_record.TakeOver());
  JobIdentity identity;
  BALLAST_RETURN_IF_ERROR(Parse(what, bytes, identity));
  auto kept = std::make_unique<KeptJob>(memory, std::move(identity));
  kept->taken_over_ = true;
  kept->identity_record_.TakeFrom(std::move(identity_record));
  BALLAST_ASSIGN_OR_RETURN(const std::string record, kept->record_record_.TakeOver());
  BALLAST_RETURN_IF_ERROR(Parse(what, record, kept->record_, kept->state_));
  if (kept->state_.closed) return absl::NotFoundError(absl::StrCat(what, " was closed"));
  return kept;
}

absl::Status KeptJob::Allocate(int64_t chunks, int lanes) {
  BALLAST_ASSIGN_OR_RETURN(ledger_, arenas_.Create(chunks * static_cast<int64_t>(sizeof(uint64_t)),
                                                   "ledger", ArenaFactory::Touch::kNow));
  const bool left = arenas_.Has("redo");
  BALLAST_ASSIGN_OR_RETURN(
      redo_, arenas_.Create(left ? 1 : lanes * static_cast<int64_t>(sizeof(RedoLane)), "redo",
                            ArenaFactory::Touch::kNow));
  const bool sums_left = arenas_.Has("sums");
  const int64_t sum_lanes = std::max(lanes, kLeastSumLanes);
  BALLAST_ASSIGN_OR_RETURN(
      sums_, arenas_.Create(sums_left ? 1 : sum_lanes * static_cast<int64_t>(sizeof(SumLane)),
                            "sums", ArenaFactory::Touch::kNow));
  auto* const first = reinterpret_cast<RedoLane*>(redo_->data());
  auto* const first_sum = reinterpret_cast<SumLane*>(sums_->data());
  MutexLock lock(lanes_mutex_);
  for (int64_t i = 0; i < sums_->size_bytes() / static_cast<int64_t>(sizeof(SumLane)); ++i) {
    (first_sum[i].word == 0 ? free_sum_lanes_ : left_sum_lanes_).push_back(first_sum + i);
  }
  for (int64_t i = 0; i < redo_->size_bytes() / static_cast<int64_t>(sizeof(RedoLane)); ++i) {
    free_lanes_.push_back(first + i);
  }
  return absl::OkStatus();
}

absl::Status KeptJob::StoreIdentity() {
  KeptWriter writer;
  writer(kKeptFormat, identity_);
  return identity_record_.Store(writer.bytes());
}

absl::Status KeptJob::Store(const JobRecord& record, const State& state) {
  if (given_up_) return absl::OkStatus();
  KeptWriter writer;
  writer(kKeptFormat, record, state);
  return record_record_.Store(writer.bytes());
}

void KeptJob::GiveUp() {
  given_up_ = true;
  identity_record_.Drop();
}

absl::Status KeptJob::Say(uint64_t epoch, const KeptWord& word) {
  if (given_up_) return absl::OkStatus();
  KeptWriter writer;
  writer(word);
  return log_.Append(epoch, writer.bytes());
}

absl::Status KeptJob::ReadLog(uint64_t epoch, const std::function<void(KeptWord)>& visit) {
  absl::Status status;
  BALLAST_RETURN_IF_ERROR(log_.TakeOver(epoch, [&](absl::string_view entry) {
    KeptWord word;
    KeptReader reader(entry);
    reader(word);
    if (!reader.at_end()) status = absl::DataLossError("an entry of the log cannot be read");
    if (status.ok()) visit(std::move(word));
  }));
  return status;
}

void KeptJob::StoreContribution(int64_t chunk, const Contribution& contribution) {
  WordPacker packer;
  packer.Put(contribution.epoch, kEpochBits);
  packer.Put(contribution.attempt, kAttemptBits);
  packer.Put(contribution.next_micro_step, kNextBits);
  packer.Put(contribution.closed ? 1 : 0, kClosedBits);
  packer.Put(static_cast<uint64_t>(contribution.kept), kKeptBits);
  // After the gradient's last byte.
  std::atomic_ref<uint64_t>(reinterpret_cast<uint64_t*>(ledger_->data())[chunk])
      .store(packer.word, std::memory_order_release);
  Stored("a ledger's word");
}

KeptJob::Contribution KeptJob::ReadContribution(int64_t chunk, uint64_t epoch,
                                                uint32_t attempt) const {
  WordUnpacker unpacker = {reinterpret_cast<const uint64_t*>(ledger_->data())[chunk]};
  Contribution found;
  found.kept = static_cast<GradientStore::Kept>(unpacker.Take(kKeptBits));
  found.closed = unpacker.Take(kClosedBits) != 0;
  found.next_micro_step = static_cast<uint32_t>(unpacker.Take(kNextBits));
  const uint64_t of_attempt = unpacker.Take(kAttemptBits);
  const uint64_t of_epoch = unpacker.Take(kEpochBits);
  const auto low = [](uint64_t value, int bits) { return value & ((uint64_t{1} << bits) - 1); };
  if (of_epoch != low(epoch, kEpochBits) || of_attempt != low(attempt, kAttemptBits)) return {};
  found.epoch = epoch;
  found.attempt = attempt;
  return found;
}

uint64_t KeptJob::TagOf(uint64_t epoch, uint32_t attempt, uint32_t micro_step_end) {
  WordPacker packer;
  packer.Put(epoch, kEpochBits);
  packer.Put(attempt, kAttemptBits);
  packer.Put(micro_step_end, kNextBits);
  return packer.word;
}

bool KeptJob::HasLeft(int chunk, uint64_t tag) const {
  MutexLock lock(lanes_mutex_);
  return absl::c_any_of(left_sum_lanes_, IsOf(chunk, tag));
}

SumLane* KeptJob::TakeSumLane(int chunk, uint64_t tag) {
  SumLane* lane = nullptr;
  {
    MutexLock lock(lanes_mutex_);
    const auto left = absl::c_find_if(left_sum_lanes_, IsOf(chunk, tag));
    if (left != left_sum_lanes_.end()) {
      lane = *left;
      left_sum_lanes_.erase(left);
      return lane;
    }
    while (free_sum_lanes_.empty()) lane_free_.Wait(lanes_mutex_);
    lane = free_sum_lanes_.back();
    free_sum_lanes_.pop_back();
  }
  lane->tag = tag;
  StoreWord(lane->word, SumWord{.chunk = static_cast<uint32_t>(chunk)}.Pack());
  Stored("a sum's lane is taken");
  return lane;
}

void KeptJob::GiveSumLane(SumLane* lane) {
  StoreWord(lane->word, 0);
  Stored("a sum's lane is free");
  {
    MutexLock lock(lanes_mutex_);
    free_sum_lanes_.push_back(lane);
  }
  lane_free_.NotifyAll();
}

void KeptJob::LookAtSumLanes(absl::FunctionRef<bool(const SumLane&)> is_wanted) {
  {
    MutexLock lock(lanes_mutex_);
    std::erase_if(left_sum_lanes_, [&](SumLane* lane) ABSL_EXCLUSIVE_LOCKS_REQUIRED(lanes_mutex_) {
      if (is_wanted(*lane)) return false;
      lane->word = 0;
      free_sum_lanes_.push_back(lane);
      return true;
    });
  }
  lane_free_.NotifyAll();
}

RedoLane* KeptJob::TakeLane(int chunk, uint64_t step) {
  RedoLane* lane = nullptr;
  {
    MutexLock lock(lanes_mutex_);
    while (free_lanes_.empty()) lane_free_.Wait(lanes_mutex_);
    lane = free_lanes_.back();
    free_lanes_.pop_back();
  }
  lane->step = step;
  StoreWord(lane->word, RedoWord{.chunk = static_cast<uint32_t>(chunk)}.Pack());
  Stored("a lane is taken");
  return lane;
}

void KeptJob::GiveLane(RedoLane* lane) {
  StoreWord(lane->word, 0);
  Stored("a lane is free");
  {
    MutexLock lock(lanes_mutex_);
    free_lanes_.push_back(lane);
  }
  lane_free_.NotifyAll();
}

std::vector<RedoLane*> KeptJob::LanesInUse(uint64_t step) {
  std::vector<RedoLane*> in_use;
  MutexLock lock(lanes_mutex_);
  std::erase_if(free_lanes_, [&](RedoLane* lane) {
    if (lane->word == 0) return false;
    if (lane->step != step) {
      lane->word = 0;
      return false;
    }
    in_use.push_back(lane);
    return true;
  });
  return in_use;
}

}  // namespace ballast
