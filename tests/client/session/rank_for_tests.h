// One rank of a training run: a session, the memory for its weights, and its part of every
// gradient.
#ifndef BALLAST_TESTS_CLIENT_SESSION_RANK_FOR_TESTS_H_
#define BALLAST_TESTS_CLIENT_SESSION_RANK_FOR_TESTS_H_

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/session.h"
#include "cpu_optimizer_service/common/status.h"
#include "tests/client/session/reference_run.h"

namespace ballast::client {

// How a rank's gradients and weights are transported.
enum class Traffic {
  kPayloads,
  kInPlace,  // It writes to memory shared with the service, and reads there.
  kCopied,   // It has memory of its own, to which shared weights are copied.
};

inline std::string Name(Traffic traffic) {
  return traffic == Traffic::kPayloads  ? "Payloads"
         : traffic == Traffic::kInPlace ? "InPlace"
                                        : "Copied";
}

class RankForTests {
 public:
  // Opens a session, uploads the first weights if the job has none, and reads the weights.
  // FAILED_PRECONDITION if the service does not share memory as `traffic` wants.
  static absl::StatusOr<std::unique_ptr<RankForTests>> Join(std::shared_ptr<grpc::Channel> channel,
                                                            const JobSpec& job, int rank,
                                                            SessionOptions options = {},
                                                            Traffic traffic = Traffic::kPayloads) {
    std::unique_ptr<RankForTests> self(new RankForTests(job, rank, traffic));
    options.job = job;
    options.rank = rank;
    if (traffic != Traffic::kInPlace) {
      options.weights = [self = self.get()](int chunk) { return self->Memory(chunk); };
    }
    if (traffic == Traffic::kPayloads) options.shared_memory = SharedMemoryUse::kNever;
    BALLAST_ASSIGN_OR_RETURN(self->session_, Session::Open(std::move(channel), std::move(options)));
    if (self->session_->shares_memory() != (traffic != Traffic::kPayloads)) {
      return absl::FailedPreconditionError(absl::StrCat("not as ", Name(traffic)));
    }
    if (self->session_->awaiting_weights()) {
      BALLAST_RETURN_IF_ERROR(self->session_->UploadWeights([&self](int chunk,
                                                                    absl::Span<float> out) {
        const Chunk& place = self->layout_.chunks()[chunk];
        for (size_t i = 0; i < out.size(); ++i) {
          out[i] = FirstWeight(self->layout_, place.group, place.begin + static_cast<int64_t>(i));
        }
      }));
    }
    BALLAST_RETURN_IF_ERROR(self->session_->ReadWeights());
    return self;
  }
  ~RankForTests() { session_.reset(); }  // Destroyed before the memory that it borrows.

  Session& session() { return *session_; }
  absl::Span<const int> chunks() const { return layout_.chunks_of_rank(rank_); }

  // Sends one chunk of the open step's gradient; or of that of `another` step, if given.
  absl::Status Push(int chunk, uint32_t micro_step, bool final = false, uint64_t another = 0) {
    const Chunk& place = layout_.chunks()[chunk];
    // Kept alive until the session is gone.
    Pushed& pushed = pushes_.emplace_back();
    const uint64_t step = another != 0 ? another : session_->committed_step() + 1;
    pushed.bytes = GradientBytes(job_, layout_, step, micro_step, place);
    const std::string& bytes = pushed.bytes;
    GradientPush push;
    push.chunk = chunk;
    push.micro_step_begin = micro_step;
    push.micro_step_end = micro_step + 1;
    push.final = final;
    push.payload = {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
    push.released = [&pushed] { pushed.released = true; };
    // Memory that the service may still read must not be written; then other memory is used.
    Pushed*& in_place = in_place_[chunk];
    if (traffic_ == Traffic::kInPlace && (in_place == nullptr || in_place->released)) {
      const absl::Span<std::byte> memory = session_->gradient_memory(chunk);
      std::memcpy(memory.data(), bytes.data(), bytes.size());
      push.payload = memory;
      in_place = &pushed;
    }
    return session_->Push(std::move(push));
  }
  // Sends every chunk of every micro-step for which `wanted` returns true.
  absl::Status PushAll(uint32_t micro_steps,
                       const std::function<bool(int chunk, uint32_t micro_step)>& wanted) {
    for (uint32_t m = 0; m < micro_steps; ++m) {
      for (int chunk : chunks()) {
        if (wanted(chunk, m)) BALLAST_RETURN_IF_ERROR(Push(chunk, m, m + 1 == micro_steps));
      }
      BALLAST_RETURN_IF_ERROR(session_->EndMicroStep(m, {}));
    }
    return absl::OkStatus();
  }
  absl::StatusOr<StepDecision> Step(uint32_t micro_steps, const StepSettings& settings) {
    BALLAST_RETURN_IF_ERROR(session_->BeginStep(settings));
    BALLAST_RETURN_IF_ERROR(PushAll(micro_steps, [](int, uint32_t) { return true; }));
    BALLAST_ASSIGN_OR_RETURN(StepDecision decision, session_->Seal(micro_steps, SmallVote()));
    BALLAST_RETURN_IF_ERROR(session_->ReceiveWeights());
    return decision;
  }

  // Empty if this rank's weights are those of the reference, otherwise the first chunk that
  // differs.
  std::string Difference(const ReferenceRun& reference) {
    for (int chunk : chunks()) {
      if (memory().at(chunk) != reference.Weights(layout_.chunks()[chunk])) {
        return "rank " + std::to_string(rank_) + " chunk " + std::to_string(chunk);
      }
    }
    return "";
  }
  // The weights, at the place where they are valid.
  const std::map<int, std::string>& memory() {
    if (traffic_ != Traffic::kInPlace) return memory_;
    for (int chunk : chunks()) {
      const absl::Span<const std::byte> weights = session_->weights_memory(chunk);
      memory_[chunk].assign(reinterpret_cast<const char*>(weights.data()), weights.size());
    }
    return memory_;
  }

 private:
  struct Pushed {
    std::string bytes;
    std::atomic<bool> released = false;
  };

  RankForTests(const JobSpec& job, int rank, Traffic traffic)
      : job_(job),
        layout_(Layout::CreateForRanks(job.layout, {rank}).value()),
        traffic_(traffic),
        rank_(rank) {}

  absl::Span<std::byte> Memory(int chunk) {
    const Chunk& place = layout_.chunks()[chunk];
    std::string& memory = memory_[chunk];
    memory.resize(place.elements * SizeBytes(job_.groups[place.group].return_dtype));
    return absl::MakeSpan(reinterpret_cast<std::byte*>(memory.data()), memory.size());
  }

  const JobSpec job_;
  const Layout layout_;
  const Traffic traffic_;
  const int rank_;
  std::map<int, std::string> memory_;
  std::deque<Pushed> pushes_;
  std::map<int, Pushed*> in_place_;  // By chunk: the last one there.
  std::unique_ptr<Session> session_;
};

// Runs `body(rank)` for every rank, each in a thread, and waits for all.
inline void ForEachRank(int world_size, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) threads.emplace_back([&body, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace ballast::client

#endif  // BALLAST_TESTS_CLIENT_SESSION_RANK_FOR_TESTS_H_
