// One rank of a load: a session, gradients made beforehand, and what each step's time went to.
#ifndef BALLAST_TESTS_BENCH_LOAD_LOAD_RANK_H_
#define BALLAST_TESTS_BENCH_LOAD_LOAD_RANK_H_

#include <grpcpp/channel.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/session.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "tests/bench/load/load_job.h"
#include "tests/bench/load/load_options.h"

namespace ballast::bench {

using SteadyTime = std::chrono::steady_clock::time_point;
inline double Seconds(SteadyTime::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

struct RankStep {
  SteadyTime begin;
  SteadyTime last_gradient;  // When the last gradient was due; `begin` without a pace.
  SteadyTime end;            // All weights are in this rank's memory.
  // Where the time went.
  double pace_seconds = 0;      // Waiting for a gradient to become ready.
  double place_seconds = 0;     // Waiting until a place in shared memory might be written again.
  double push_seconds = 0;      // In Push: nearly all of it because the window was full.
  double decision_seconds = 0;  // In Seal.
  double round_seconds = 0;     // With Muon: reading directions and giving them back.
  double weights_seconds = 0;   // In ReceiveWeights.
  double update_seconds = 0;    // From decision to last chunk updated, as the service says.
  client::StepDecision decision;
};

// Places in shared memory of which the service has not let go. A session that fails lets go of all,
// so nobody waits for ever. Thread-safe.
class PlacesInUse {
 public:
  explicit PlacesInUse(size_t chunks) : in_use_(chunks) {}
  void AwaitAndTake(int chunk);
  void Release(int chunk);

 private:
  Mutex mutex_;
  CondVar released_;
  std::vector<bool> in_use_ ABSL_GUARDED_BY(mutex_);
};

// Huge pages where the system has them, zeros at first.
class Pages {
 public:
  static absl::StatusOr<Pages> Map(size_t bytes);
  Pages() = default;
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;
  ~Pages();
  absl::Span<std::byte> bytes() const { return bytes_; }

 private:
  explicit Pages(absl::Span<std::byte> bytes) : bytes_(bytes) {}
  absl::Span<std::byte> bytes_;
};

// For one thread.
class LoadRank {
 public:
  // Opens the session, uploads the first weights, reads the weights and makes the gradients.
  // FAILED_PRECONDITION if memory was to be shared and is not.
  static absl::StatusOr<std::unique_ptr<LoadRank>> Join(std::shared_ptr<grpc::Channel> channel,
                                                        const LoadOptions& options,
                                                        const JobSpec& spec, int rank);

  absl::StatusOr<RankStep> Step();
  // SHA-256 of the weights of each chunk, as they lie in this rank's memory.
  std::map<int, std::string> WeightDigests() const;
  // Reads them from the service again.
  absl::Status ReadWeights() { return session_->ReadWeights(); }
  int64_t payload_bytes_up() const { return payload_bytes_up_; }  // Of a step.
  int64_t payload_bytes_down() const { return payload_bytes_down_; }
  bool shares_memory() const { return session_->shares_memory(); }

 private:
  LoadRank(const LoadOptions& options, const JobSpec& spec, int rank);
  absl::Status Open(std::shared_ptr<grpc::Channel> channel, const JobSpec& spec);
  absl::Status MakeGradients();
  absl::Status PushMicroStep(uint32_t micro_step, RankStep& step);
  absl::Status PushChunk(int chunk, uint32_t micro_step, RankStep& step);
  absl::Status MakeSecondRound();
  absl::Status CheckDecision(const client::StepDecision& decision) const;
  // Of which micro-step `micro_step` has made `elements` so far.
  SteadyTime DueAt(SteadyTime begin, uint32_t micro_step, int64_t elements) const;

  const LoadOptions options_;
  const JobSpec spec_;
  const Layout layout_;
  const LoadValues values_;
  const int rank_;
  const int64_t partition_elements_;
  const double pace_;   // Elements of this rank a second.
  uint64_t steps_ = 0;  // Begun.
  int64_t payload_bytes_up_ = 0;
  int64_t payload_bytes_down_ = 0;
  Pages own_gradients_;                                 // Without memory in common.
  std::vector<absl::Span<const std::byte>> gradients_;  // By chunk.
  std::map<int, std::vector<std::byte>> directions_;    // By chunk.
  PlacesInUse places_;
  std::unique_ptr<client::Session> session_;  // Last: it borrows the above.
};

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_LOAD_LOAD_RANK_H_
