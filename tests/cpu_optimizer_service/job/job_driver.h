// Drives jobs without any transport, so that tests read as short stories.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_JOB_DRIVER_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_JOB_DRIVER_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <latch>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/job/job.h"
#include "tests/cpu_optimizer_service/job/heap_rank_memory.h"

namespace ballast {

// A job whose groups hold the named sizes, cut into buckets among `world_size` ranks.
struct JobShape {
  std::vector<std::vector<int64_t>> group_sizes = {{1000, 24, 3000}};  // Elements by group.
  int world_size = 1;
  int64_t bucket_elements = 1024;
  int64_t chunk_elements = kMaxChunkElements;
};

inline JobSpec MakeJobSpec(const JobShape& shape, const std::string& name = "job") {
  JobSpec spec;
  spec.name = name;
  spec.layout.world_size = shape.world_size;
  spec.layout.group_count = static_cast<int>(shape.group_sizes.size());
  spec.layout.chunk_elements = shape.chunk_elements;
  for (int group = 0; group < spec.layout.group_count; ++group) {
    spec.groups.push_back({.name = "group" + std::to_string(group)});
    for (const int64_t size : shape.group_sizes[group]) {
      const std::string index = std::to_string(spec.layout.parameters.size());
      spec.layout.parameters.push_back({.name = "p" + index, .shape = {size}, .group = group});
    }
  }
  const auto flat = FlatElements(spec.layout);
  spec.layout.partitions =
      PartitionsOf(MakeBuckets(flat, shape.world_size, shape.bucket_elements), shape.world_size);
  return spec;
}

// A value that depends on what it belongs to and not on who asks: the same for any layout.
// `element` is of the group's parameters one after another, whether they lie so or not.
inline float TestValue(uint64_t seed, int group, int64_t element) {
  uint64_t x = seed * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(group) * 0xbf58476d1ce4e5b9u +
               static_cast<uint64_t>(element);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return static_cast<float>(static_cast<int64_t>(x >> 40) - (1 << 23)) / (1 << 23);
}

// Remembers what a rank was told, and lets a test wait for it.
class RecordingListener : public RankListener {
 public:
  void OnWaiting(uint64_t step, const std::vector<int>& ranks, const std::string& why) override {
    MutexLock lock(mutex_);
    waiting_ = ranks;
  }
  void OnSealRefused(uint64_t step, const SealRefusal& refusal) override {
    MutexLock lock(mutex_);
    refusals_.push_back(refusal.status);
    changed_.NotifyAll();
  }
  void OnNorm(const StepNorm& norm) override {
    MutexLock lock(mutex_);
    norms_.push_back(norm);
    changed_.NotifyAll();
  }
  void OnVoteRefused(StepAttempt at, const absl::Status& why) override {
    MutexLock lock(mutex_);
    vote_refusals_.push_back(why);
    changed_.NotifyAll();
  }
  void OnProvisionalWeights(uint64_t step, int chunk, WeightBuffer shard) override {
    MutexLock lock(mutex_);
    in_place_ += shard.in_place() ? 1 : 0;
    auto& bytes = provisional_[chunk];
    bytes.reset();
    if (shard) bytes.emplace(shard.bytes().begin(), shard.bytes().end());
    changed_.NotifyAll();
  }
  // Provisional weights that stay become the rank's, as they do in a worker.
  void OnDecision(const StepOutcome& outcome, absl::Span<const int> dropped_chunks) override {
    MutexLock lock(mutex_);
    outcomes_.push_back(outcome);
    for (const int chunk : dropped_chunks) provisional_.erase(chunk);
    if (outcome.decision.apply) {
      for (auto& [chunk, bytes] : provisional_) shards_[chunk] = std::move(bytes);
    }
    provisional_.clear();
  }
  void OnWeights(uint64_t step, int chunk, WeightBuffer shard) override {
    MutexLock lock(mutex_);
    in_place_ += shard.in_place() ? 1 : 0;
    auto& bytes = shards_[chunk];
    bytes.reset();
    if (shard) bytes.emplace(shard.bytes().begin(), shard.bytes().end());
  }
  void OnDirections(uint64_t step) override {
    MutexLock lock(mutex_);
    directions_ = step;
    changed_.NotifyAll();
  }
  void OnCommitted(uint64_t step, double update_seconds, const std::string& left) override {
    MutexLock lock(mutex_);
    committed_ = step;
    left_ = left;
    changed_.NotifyAll();
  }
  void OnDetached(const absl::Status& status) override {
    MutexLock lock(mutex_);
    detached_ = status;
    changed_.NotifyAll();
  }

  void WaitForNorm(StepAttempt at) {
    MutexLock lock(mutex_);
    const auto is_it = [&](const StepNorm& norm) {
      return StepAttempt(norm.step, norm.attempt) == at;
    };
    while (std::none_of(norms_.begin(), norms_.end(), is_it)) changed_.Wait(mutex_);
  }
  void WaitForRefusals(size_t count) {
    MutexLock lock(mutex_);
    while (refusals_.size() < count) changed_.Wait(mutex_);
  }
  void WaitForVoteRefusals(size_t count) {
    MutexLock lock(mutex_);
    while (vote_refusals_.size() < count) changed_.Wait(mutex_);
  }
  std::vector<StepNorm> norms() const {
    MutexLock lock(mutex_);
    return norms_;
  }
  std::vector<absl::Status> vote_refusals() const {
    MutexLock lock(mutex_);
    return vote_refusals_;
  }
  void WaitForCommit(uint64_t step) {
    MutexLock lock(mutex_);
    while (committed_ < step) changed_.Wait(mutex_);
  }
  void WaitForDirections(uint64_t step) {
    MutexLock lock(mutex_);
    while (directions_ < step) changed_.Wait(mutex_);
  }
  void WaitForProvisional(size_t chunks) {
    MutexLock lock(mutex_);
    while (provisional_.size() < chunks) changed_.Wait(mutex_);
  }
  // Whose provisional weights have come in the step in progress.
  size_t provisional_chunks() const {
    MutexLock lock(mutex_);
    return provisional_.size();
  }
  void WaitForCommitOrDetach(uint64_t step) {
    MutexLock lock(mutex_);
    while (committed_ < step && detached_.ok()) changed_.Wait(mutex_);
  }
  std::vector<StepOutcome> outcomes() const {
    MutexLock lock(mutex_);
    return outcomes_;
  }
  std::vector<absl::Status> refusals() const {
    MutexLock lock(mutex_);
    return refusals_;
  }
  std::vector<int> waiting() const {
    MutexLock lock(mutex_);
    return waiting_;
  }
  absl::Status detached() const {
    MutexLock lock(mutex_);
    return detached_;
  }
  // Of the last committed step.
  std::string left() const {
    MutexLock lock(mutex_);
    return left_;
  }
  // By chunk; nullopt where the pool was empty.
  std::map<int, std::optional<std::vector<std::byte>>> shards() const {
    MutexLock lock(mutex_);
    return shards_;
  }
  // How many shards were said to lie in the rank's memory.
  int in_place() const {
    MutexLock lock(mutex_);
    return in_place_;
  }

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  int in_place_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<int> waiting_ ABSL_GUARDED_BY(mutex_);
  std::vector<absl::Status> refusals_ ABSL_GUARDED_BY(mutex_);
  std::vector<StepNorm> norms_ ABSL_GUARDED_BY(mutex_);
  std::vector<absl::Status> vote_refusals_ ABSL_GUARDED_BY(mutex_);
  std::vector<StepOutcome> outcomes_ ABSL_GUARDED_BY(mutex_);
  // By chunk; nullopt where a test's listener kept the buffer.
  std::map<int, std::optional<std::vector<std::byte>>> provisional_ ABSL_GUARDED_BY(mutex_);
  std::map<int, std::optional<std::vector<std::byte>>> shards_ ABSL_GUARDED_BY(mutex_);
  uint64_t committed_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t directions_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string left_ ABSL_GUARDED_BY(mutex_);
  absl::Status detached_ ABSL_GUARDED_BY(mutex_);
};

// How gradients go to a job: all as payloads; all in shared memory, where weights come back too; or
// now this way, now that.
enum class Sending : uint8_t { kPayload, kInPlace, kMixed };

// All ranks of one job.
class JobDriver {
 public:
  JobDriver(Engine& engine, JobSpec spec) : JobDriver(engine.CreateJob(std::move(spec)).value()) {}
  explicit JobDriver(std::shared_ptr<Job> job) : job_(std::move(job)) {
    std::vector<int64_t> elements(layout().group_count(), 0);  // By group, so far.
    for (size_t p = 0; p < layout().spec().parameters.size(); ++p) {
      const ParameterSpec& parameter = layout().spec().parameters[p];
      first_elements_.push_back(elements[parameter.group]);
      if (!parameter.trainable) continue;
      elements[parameter.group] += layout().place(static_cast<int>(p)).elements;
    }
  }

  Job& job() { return *job_; }
  const Layout& layout() const { return job_->layout(); }
  RankStream& stream(int rank) { return *streams_[rank]; }
  RecordingListener& listener(int rank) { return *listeners_[rank]; }
  uint64_t next_step() const { return job_->Status().committed_step + 1; }

  // Weights from TestValue, zeros in the padding. A derived job may have all before the last.
  void UploadWeights(uint64_t seed = 1) {
    for (int c = 0; c < static_cast<int>(layout().chunks().size()); ++c) {
      if (c > 0 && job_->Status().phase != JobPhase::kAwaitingWeights) break;
      const std::vector<float> weights = Values(c, seed);
      const auto piece = AsPiece(weights);
      (void)job_->WriteInitialWeights(c, {piece}).value();
    }
  }

  // Of a rank that process<rank> has, or `process`: weights and moments from TestValue.
  absl::Status UploadState(const FirstState& state, int rank, const std::string& process = "") {
    const absl::StatusOr<Job::Uploader> uploader = job_->BeginFirstWeights(
        {.rank = rank,
         .process_id = process.empty() ? "process" + std::to_string(rank) : process,
         .generation = job_->Status().generation},
        state);
    if (!uploader.ok()) return uploader.status();
    for (const int chunk : layout().chunks_of_rank(rank)) {
      if (job_->Status().phase != JobPhase::kAwaitingWeights) break;
      const std::vector<float> values = StateOf(chunk, uploader->moments);
      if (absl::Status wrote = Write(chunk, values, *uploader); !wrote.ok()) return wrote;
    }
    return absl::OkStatus();
  }
  // The planes of a chunk one behind the other; no square is below 0.
  std::vector<float> StateOf(int chunk, bool moments) const {
    std::vector<float> values = Values(chunk, 1);
    const int group = layout().chunks()[chunk].group;
    const bool amsgrad = job_->spec().groups[group].hyper_parameters.amsgrad;
    for (int plane = 1; moments && plane < (amsgrad ? 4 : 3); ++plane) {
      for (const float value : Values(chunk, 100 + plane)) {
        values.push_back(plane == 1 ? value : value * value);
      }
    }
    return values;
  }
  absl::Status Write(int chunk, const std::vector<float>& values,
                     const std::optional<Job::Uploader>& uploader) {
    const auto piece = AsPiece(values);
    return job_->WriteInitialWeights(chunk, {piece}, uploader).status();
  }

  // A rank's part of a write, of process<rank> or `process`, up to its end. Each plane has Values of
  // another seed; no square is below 0. `done` is told what became of it.
  absl::Status WriteState(const StateWrite& write, int rank, uint64_t seed, Done<bool> done,
                          const std::string& process = "") {
    const auto writer = job_->BeginStateWrite(
        {.rank = rank,
         .process_id = process.empty() ? "process" + std::to_string(rank) : process,
         .generation = job_->Status().generation},
        write);
    if (!writer.ok()) return writer.status();
    for (const int chunk : ChunksOf(write, layout())) {
      if (layout().chunks()[chunk].rank != rank) continue;
      const std::vector<float> values = Written(write, chunk, seed);
      const auto piece = AsPiece(values);
      const absl::Status wrote = job_->WriteStateChunk(*writer, chunk, {&piece, 1});
      if (!wrote.ok()) return wrote;
    }
    (void)job_->EndStateWrite(*writer, std::move(done));
    return absl::OkStatus();
  }
  // Of all ranks.
  void WriteState(const StateWrite& write, uint64_t seed) {
    std::latch written(layout().world_size());
    for (int rank = 0; rank < layout().world_size(); ++rank) {
      Check(WriteState(write, rank, seed, [&](absl::StatusOr<bool> done) {
        Check(done.status());
        written.count_down();
      }));
    }
    written.wait();  // For readers, perhaps.
  }
  StateWrite NextWrite(std::vector<Plane> planes, std::vector<int> parameters,
                       std::vector<int64_t> update_counts = {}) const {
    const JobStatus status = job_->Status();
    return {.step = status.committed_step,
            .number = status.state_writes + 1,
            .planes = std::move(planes),
            .parameters = std::move(parameters),
            .update_counts = std::move(update_counts)};
  }
  // What WriteState writes of a chunk.
  std::vector<float> Written(const StateWrite& write, int chunk, uint64_t seed) const {
    std::vector<float> values;
    for (const Plane plane : write.planes) {
      const bool squares = plane == Plane::kExpAvgSq || plane == Plane::kMaxExpAvgSq;
      for (const float value : Values(chunk, seed + static_cast<uint64_t>(plane))) {
        values.push_back(squares ? value * value : value);
      }
    }
    return values;
  }

  void AttachAll() {
    for (const int rank : layout().ranks()) Attach(rank);
  }
  // From the next Attach on, which gives the rank memory.
  void SetSending(Sending sending) { sending_ = sending; }
  const HeapRankMemory& memory(int rank) const { return *memories_.at(rank); }
  // Nobody but the job keeps it.
  std::weak_ptr<const HeapRankMemory> TakeMemory(int rank) {
    const std::weak_ptr<const HeapRankMemory> memory = memories_.at(rank);
    memories_.erase(rank);
    return memory;
  }
  absl::Status GiveMemory(int rank, const std::string& process_id, Generation generation) {
    auto memory = std::make_shared<const HeapRankMemory>(layout(), job_->spec(), rank);
    const absl::Status status = job_->GiveRankMemory(
        {.rank = rank, .process_id = process_id, .generation = generation}, memory);
    if (status.ok()) memories_[rank] = std::move(memory);
    return status;
  }

  void Attach(int rank, const std::string& process = "") {
    Attach(rank, process, job_->spec().update_mode);
  }
  void Attach(int rank, const std::string& process, UpdateMode mode,
              std::shared_ptr<RecordingListener> listener = nullptr,
              std::optional<Generation> generation = std::nullopt) {
    if (listener == nullptr) listener = std::make_shared<RecordingListener>();
    const std::string process_id = process.empty() ? "process" + std::to_string(rank) : process;
    const auto attachment =
        job_->Attach({.rank = rank, .process_id = process_id, .generation = generation}).value();
    if (sending_ != Sending::kPayload && !generation.has_value()) {
      Check(GiveMemory(rank, process_id, attachment.generation));
    }
    attempts_.try_emplace(rank, 0);
    if (!generation.has_value()) attempts_.insert_or_assign(rank, 0);
    listeners_[rank] = std::move(listener);
    streams_[rank] = job_->OpenStream({.uid = job_->uid(),
                                       .rank = rank,
                                       .process_id = process_id,
                                       .generation = attachment.generation,
                                       .update_mode = mode,
                                       .weights_in_place = sending_ != Sending::kPayload,
                                       .orthogonalizes = true},
                                      listeners_[rank])
                         .value();
  }

  // The rank's process opens its broken stream again.
  void Reopen(int rank) {
    Attach(rank, "", job_->spec().update_mode, nullptr, job_->Status().generation);
  }

  // The rank's attempt at the next step.
  StepAttempt at(int rank) const {
    const uint64_t step = next_step();
    return attempts_.at(rank).step == step ? attempts_.at(rank) : step;
  }
  // After a discard that is not this one's.
  void SetAttempt(int rank, StepAttempt attempt) { attempts_.at(rank) = attempt; }
  // False: too late.
  bool Discard(int rank) {
    const StepAttempt discarded = at(rank);
    const absl::StatusOr<bool> done = stream(rank).Discard(discarded);
    Check(done.status());
    if (*done) attempts_.at(rank) = {discarded.step, discarded.attempt + 1};
    return *done;
  }

  // What all ranks vote with their seals from now on, and expect when they begin.
  void SetVote(StepVote vote) { vote_ = std::move(vote); }
  void SetMaxNorm(double max_norm) { SetVote({.clipping = {.max_norm = max_norm}}); }

  void Begin(int rank, StepSettings settings = {}) {
    if (settings.expected_clipping == Clipping()) settings.expected_clipping = vote_.clipping;
    Check(stream(rank).BeginStep(at(rank), settings));
  }
  void BeginAll(const StepSettings& settings = {}) {
    for (auto& [rank, stream] : streams_) Begin(rank, settings);
  }

  // The chunk's part of TestValue(seed), zeros in the padding.
  std::vector<float> Values(int chunk, uint64_t seed) const {
    const Chunk& place = layout().chunks()[chunk];
    std::vector<float> values(place.elements, 0.0f);
    for (const ChunkPiece& piece : layout().Pieces(chunk)) {
      for (int64_t i = 0; i < piece.elements; ++i) {
        values[piece.chunk_offset + i] = TestValue(seed, place.group, ElementOf(piece) + i);
      }
    }
    return values;
  }

  std::vector<std::byte> Encode(int chunk, const std::vector<float>& values) const {
    const DType dtype = job_->spec().groups[layout().chunks()[chunk].group].wire_dtype;
    std::vector<std::byte> bytes(values.size() * SizeBytes(dtype));
    for (size_t i = 0; i < values.size(); ++i) StoreElement(bytes.data(), dtype, i, values[i]);
    return bytes;
  }

  absl::StatusOr<ContributionResult> Send(int chunk, const std::vector<float>& values,
                                          uint32_t micro_step, bool final = false) {
    const std::vector<std::byte> bytes = Encode(chunk, values);
    const absl::Span<const std::byte> piece(bytes);
    const int rank = layout().chunks()[chunk].rank;
    const bool in_place = sending_ == Sending::kInPlace ||
                          (sending_ == Sending::kMixed && (chunk + micro_step) % 2 == 0);
    if (in_place) {
      if (memories_.contains(rank)) memory(rank).WriteGradient(chunk, bytes);
      return stream(rank).Contribute({.step = at(rank).step,
                                      .attempt = at(rank).attempt,
                                      .chunk = chunk,
                                      .micro_step_begin = micro_step,
                                      .micro_step_end = micro_step + 1,
                                      .final = final,
                                      .in_place = true});
    }
    return stream(rank).Contribute({.step = at(rank).step,
                                    .attempt = at(rank).attempt,
                                    .chunk = chunk,
                                    .micro_step_begin = micro_step,
                                    .micro_step_end = micro_step + 1,
                                    .final = final,
                                    .payload = {&piece, 1}});
  }
  // Every chunk's part of TestValue(seed).
  void SendAll(uint64_t seed, uint32_t micro_step, bool final = false) {
    for (int c = 0; c < static_cast<int>(layout().chunks().size()); ++c) {
      Check(Send(c, Values(c, seed), micro_step, final).status());
    }
  }
  // Those of a rank's chunks.
  void SendOf(int rank, uint64_t seed, uint32_t micro_step, bool final = false) {
    for (const int c : layout().chunks_of_rank(rank)) {
      Check(Send(c, Values(c, seed), micro_step, final).status());
    }
  }
  // The same, but for `value` at one element of a group's parameters.
  void SendAllWith(float value, int group, int64_t element, uint64_t seed, uint32_t micro_step) {
    for (int c = 0; c < static_cast<int>(layout().chunks().size()); ++c) {
      std::vector<float> values = Values(c, seed);
      for (const ChunkPiece& piece : layout().Pieces(c)) {
        const int64_t at = element - ElementOf(piece);
        const bool here = layout().chunks()[c].group == group && 0 <= at && at < piece.elements;
        if (here) values[piece.chunk_offset + at] = value;
      }
      Check(Send(c, values, micro_step).status());
    }
  }
  void EndMicroStepAll(uint32_t micro_step, const UsedParameters& used = {}) {
    for (auto& [rank, stream] : streams_) EndMicroStep(rank, micro_step, used);
  }
  void EndMicroStep(int rank, uint32_t micro_step, const UsedParameters& used = {}) {
    Check(stream(rank).EndMicroStep(at(rank), micro_step, used));
  }
  // nullopt: taken.
  std::optional<SealRefusal> Seal(int rank, uint32_t micro_steps) {
    return SealWith(rank, micro_steps, vote_);
  }
  // With another vote, or none.
  std::optional<SealRefusal> SealWith(int rank, uint32_t micro_steps,
                                      const std::optional<StepVote>& vote) {
    absl::StatusOr<std::optional<SealRefusal>> refusal =
        stream(rank).Seal(at(rank), micro_steps, vote);
    Check(refusal.status());
    return *std::move(refusal);
  }
  // Of all ranks, without votes. Returns what they are told.
  StepNorm SealToLook(uint32_t micro_steps) {
    for (auto& [rank, stream] : streams_) {
      const auto refusal = SealWith(rank, micro_steps, std::nullopt);
      if (refusal.has_value()) Check(refusal->status);
    }
    const StepAttempt attempt = at(streams_.begin()->first);
    for (auto& [rank, listener] : listeners_) listener->WaitForNorm(attempt);
    return listeners_.begin()->second->norms().back();
  }
  void Vote(int rank, const StepVote& vote) { Check(stream(rank).Vote(at(rank), vote)); }
  StepOutcome VoteAll(const StepVote& vote) {
    const uint64_t step = next_step();
    for (auto& [rank, stream] : streams_) Check(stream->Vote({step, at(rank).attempt}, vote));
    for (auto& [rank, listener] : listeners_) listener->WaitForCommit(step);
    return listeners_.begin()->second->outcomes().back();
  }
  void SealAll(uint32_t micro_steps) {
    const uint64_t step = next_step();
    for (auto& [rank, stream] : streams_) {
      const auto refusal = stream->Seal({step, at(rank).attempt}, micro_steps, vote_).value();
      if (refusal.has_value()) Check(refusal->status);
    }
    for (auto& [rank, listener] : listeners_) listener->WaitForCommit(step);
  }
  // A whole step with gradients TestValue(seed + micro-step).
  StepOutcome Step(uint64_t seed, uint32_t micro_steps = 1, const StepSettings& settings = {}) {
    BeginAll(settings);
    for (uint32_t m = 0; m < micro_steps; ++m) {
      SendAll(seed + m, m, m + 1 == micro_steps);
      EndMicroStepAll(m);
    }
    SealAll(micro_steps);
    return listener(0).outcomes().back();
  }

  void DetachAll() { streams_.clear(); }
  void Detach(int rank) { streams_.erase(rank); }

 private:
  // The piece's first element, of its group's parameters.
  int64_t ElementOf(const ChunkPiece& piece) const {
    return first_elements_[piece.parameter] + piece.parameter_offset;
  }
  static absl::Span<const std::byte> AsPiece(const std::vector<float>& values) {
    return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()),
                               values.size() * sizeof(float));
  }
  static void Check(const absl::Status& status) {
    if (!status.ok())
      throw std::runtime_error(status.ToString());  // Fails the test, with its text.
  }

  std::shared_ptr<Job> job_;
  std::vector<int64_t> first_elements_;  // By parameter: of its group's parameters.
  std::map<int, std::shared_ptr<RecordingListener>> listeners_;
  std::map<int, std::unique_ptr<RankStream>> streams_;
  std::map<int, StepAttempt> attempts_;  // By rank: where its last discard left it.
  StepVote vote_;
  Sending sending_ = Sending::kPayload;
  std::map<int, std::shared_ptr<const HeapRankMemory>> memories_;
};

// An engine, and jobs on it whose ranks are all attached.
class JobDriverTest : public testing::Test {
 protected:
  JobDriver Make(const JobSpec& spec) {
    JobDriver driver(engine_, spec);
    driver.UploadWeights();
    driver.AttachAll();
    return driver;
  }

  Engine engine_{{.memory_limit_bytes = int64_t{256} << 20, .threads = 2}};
};

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_JOB_DRIVER_H_
