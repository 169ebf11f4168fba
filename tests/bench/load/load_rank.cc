#include "tests/bench/load/load_rank.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <numeric>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/sha256.h"

namespace ballast::bench {
namespace {

constexpr absl::Duration kStepLimit = absl::Minutes(2);

SteadyTime Now() { return std::chrono::steady_clock::now(); }

int64_t ElementsOfAllRanks(const JobSpec& spec) {
  const auto flat = FlatElements(spec.layout);
  return std::accumulate(flat.begin(), flat.end(), int64_t{0});
}

}  // namespace

void PlacesInUse::AwaitAndTake(int chunk) {
  MutexLock lock(mutex_);
  while (in_use_[chunk]) released_.Wait(mutex_);
  in_use_[chunk] = true;
}

void PlacesInUse::Release(int chunk) {
  MutexLock lock(mutex_);
  in_use_[chunk] = false;
  released_.NotifyAll();
}

absl::StatusOr<Pages> Pages::Map(size_t bytes) {
  if (bytes == 0) return Pages();
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ErrnoToStatus(errno, absl::StrCat("no ", bytes, " bytes for gradients"));
  }
  madvise(memory, bytes, MADV_HUGEPAGE);
  return Pages(absl::MakeSpan(static_cast<std::byte*>(memory), bytes));
}

Pages::Pages(Pages&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

Pages::~Pages() {
  if (!bytes_.empty()) munmap(bytes_.data(), bytes_.size());
}

LoadRank::LoadRank(const LoadOptions& options, const JobSpec& spec, int rank)
    : options_(options),
      spec_(spec),
      layout_(Layout::CreateForRanks(spec.layout, {rank}).value()),
      values_(layout_, static_cast<uint64_t>(options.seed)),
      rank_(rank),
      partition_elements_(layout_.partition_elements(rank)),
      pace_(options.pace * static_cast<double>(partition_elements_) /
            static_cast<double>(ElementsOfAllRanks(spec))),
      gradients_(layout_.chunks().size()),
      places_(layout_.chunks().size()) {
  for (const int chunk : layout_.chunks_of_rank(rank)) {
    const Chunk& place = layout_.chunks()[chunk];
    const GroupSpec& group = spec.groups[place.group];
    payload_bytes_up_ += place.elements * SizeBytes(group.wire_dtype) * options.micro_steps;
    payload_bytes_down_ += place.elements * SizeBytes(group.return_dtype);
    if (options.rule != Rule::kMuon) continue;
    payload_bytes_up_ += place.elements * SizeBytes(DType::kBFloat16);
    payload_bytes_down_ += place.elements * SizeBytes(DType::kBFloat16);
  }
}

absl::StatusOr<std::unique_ptr<LoadRank>> LoadRank::Join(std::shared_ptr<grpc::Channel> channel,
                                                         const LoadOptions& options,
                                                         const JobSpec& spec, int rank) {
  std::unique_ptr<LoadRank> self(new LoadRank(options, spec, rank));
  BALLAST_RETURN_IF_ERROR(self->Open(std::move(channel), spec));
  BALLAST_RETURN_IF_ERROR(self->MakeGradients());
  return self;
}

absl::Status LoadRank::Open(std::shared_ptr<grpc::Channel> channel, const JobSpec& spec) {
  client::SessionOptions session;
  session.job = spec;
  session.rank = rank_;
  session.seal_timeout = kStepLimit;
  const bool share = options_.way == Way::kSharedMemory;
  session.shared_memory = share ? client::SharedMemoryUse::kAuto : client::SharedMemoryUse::kNever;
  BALLAST_ASSIGN_OR_RETURN(session_, client::Session::Open(std::move(channel), std::move(session)));
  // A rank without chunks has nothing to share.
  if (share && partition_elements_ > 0 && !session_->shares_memory()) {
    return absl::FailedPreconditionError(
        "the service shares no memory with this process; it must run on this host with "
        "--shared-memory=auto");
  }
  if (session_->awaiting_weights()) {
    BALLAST_RETURN_IF_ERROR(session_->UploadWeights(
        [this](int chunk, absl::Span<float> out) { values_.FillWeights(chunk, out); }));
  }
  return session_->ReadWeights();
}

absl::Status LoadRank::MakeGradients() {
  if (!session_->shares_memory()) {
    const auto bytes = static_cast<size_t>(partition_elements_ * SizeBytes(DType::kBFloat16));
    BALLAST_ASSIGN_OR_RETURN(own_gradients_, Pages::Map(bytes));
  }
  size_t offset = 0;
  for (const int chunk : layout_.chunks_of_rank(rank_)) {
    const Chunk& place = layout_.chunks()[chunk];
    absl::Span<std::byte> memory = session_->gradient_memory(chunk);
    if (!session_->shares_memory()) {
      const auto bytes = static_cast<size_t>(place.elements * SizeBytes(DType::kBFloat16));
      memory = own_gradients_.bytes().subspan(offset, bytes);
      offset += bytes;
    }
    values_.FillGradient(chunk, memory);
    gradients_[chunk] = memory;
  }
  return absl::OkStatus();
}

absl::StatusOr<RankStep> LoadRank::Step() {
  RankStep step;
  step.begin = Now();
  BALLAST_RETURN_IF_ERROR(session_->BeginStep(
      {.scale = LoadScale(spec_, steps_++), .expected_clipping = LoadVote(options_).clipping}));
  for (uint32_t m = 0; m < options_.micro_steps; ++m) {
    BALLAST_RETURN_IF_ERROR(PushMicroStep(m, step));
  }
  step.last_gradient = DueAt(step.begin, static_cast<uint32_t>(options_.micro_steps), 0);
  const SteadyTime pushed = Now();
  BALLAST_ASSIGN_OR_RETURN(
      step.decision,
      session_->Seal(static_cast<uint32_t>(options_.micro_steps), LoadVote(options_)));
  const SteadyTime decided = Now();
  if (options_.rule == Rule::kMuon) BALLAST_RETURN_IF_ERROR(MakeSecondRound());
  const SteadyTime given = Now();
  BALLAST_RETURN_IF_ERROR(session_->ReceiveWeights());
  step.end = Now();
  step.decision_seconds = Seconds(decided - pushed);
  step.round_seconds = Seconds(given - decided);
  step.weights_seconds = Seconds(step.end - given);
  step.update_seconds = session_->update_seconds();
  BALLAST_RETURN_IF_ERROR(CheckDecision(step.decision));
  if (options_.rule == Rule::kMuon && session_->shares_memory()) {
    // O has been there; a trainer writes its next gradients.
    for (const int chunk : layout_.chunks_of_rank(rank_)) {
      values_.FillGradient(chunk, session_->gradient_memory(chunk));
    }
  }
  return step;
}

// Its own cost: O is what the directions are.
absl::Status LoadRank::MakeSecondRound() {
  const auto read =
      session_->ReadDirections([this](int chunk, absl::Span<const std::byte> direction) {
        directions_[chunk].assign(direction.begin(), direction.end());
      });
  BALLAST_RETURN_IF_ERROR(read.status());
  if (read->empty()) return absl::InternalError("there was no second round");
  return session_->GiveOrthogonal([this](int chunk, absl::Span<std::byte> out) {
    std::ranges::copy(directions_[chunk], out.begin());
  });
}

absl::Status LoadRank::PushMicroStep(uint32_t micro_step, RankStep& step) {
  const absl::Span<const int> chunks = layout_.chunks_of_rank(rank_);
  int64_t elements = 0;
  // Backward reaches the last layers first.
  for (size_t i = chunks.size(); i-- > 0;) {
    elements += layout_.chunks()[chunks[i]].elements;
    if (pace_ > 0) {
      const SteadyTime from = Now();
      std::this_thread::sleep_until(DueAt(step.begin, micro_step, elements));
      step.pace_seconds += Seconds(Now() - from);
    }
    BALLAST_RETURN_IF_ERROR(PushChunk(chunks[i], micro_step, step));
  }
  return session_->EndMicroStep(micro_step, {});
}

absl::Status LoadRank::PushChunk(int chunk, uint32_t micro_step, RankStep& step) {
  client::GradientPush push;
  push.chunk = chunk;
  push.micro_step_begin = micro_step;
  push.micro_step_end = micro_step + 1;
  push.final = micro_step + 1 == options_.micro_steps;
  push.payload = gradients_[chunk];
  SteadyTime from = Now();
  if (session_->shares_memory()) {
    places_.AwaitAndTake(chunk);
    push.released = [this, chunk] { places_.Release(chunk); };
    const SteadyTime taken = Now();
    step.place_seconds += Seconds(taken - from);
    from = taken;
  }
  BALLAST_RETURN_IF_ERROR(session_->Push(std::move(push)));
  step.push_seconds += Seconds(Now() - from);
  return absl::OkStatus();
}

SteadyTime LoadRank::DueAt(SteadyTime begin, uint32_t micro_step, int64_t elements) const {
  if (pace_ <= 0) return begin;
  const double made = static_cast<double>(micro_step) * static_cast<double>(partition_elements_) +
                      static_cast<double>(elements);
  return begin + std::chrono::duration_cast<SteadyTime::duration>(
                     std::chrono::duration<double>(made / pace_));
}

absl::Status LoadRank::CheckDecision(const client::StepDecision& decision) const {
  const bool clipped = decision.clip_coefficient < 1;
  if (!decision.applied || clipped != (options_.clipping == Clipping::kFiring)) {
    return absl::InternalError(
        absl::StrCat("step ", decision.step, " was ", decision.applied ? "applied" : "skipped",
                     " with a clip coefficient of ", decision.clip_coefficient, ", and --clip is ",
                     Name(options_.clipping)));
  }
  return absl::OkStatus();
}

std::map<int, std::string> LoadRank::WeightDigests() const {
  std::map<int, std::string> digests;
  for (const int chunk : layout_.chunks_of_rank(rank_)) {
    Sha256 digest;
    digest.Add(session_->weights_memory(chunk));
    digests[chunk] = digest.Hex();
  }
  return digests;
}

}  // namespace ballast::bench
