// Copies the weights of a rank's chunks from the pieces in which they arrive to where the trainer
// wants them.
//
// Used from one thread at a time.
#ifndef BALLAST_CLIENT_SESSION_WEIGHT_SINK_H_
#define BALLAST_CLIENT_SESSION_WEIGHT_SINK_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "client/transport/transport.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"

namespace ballast::client {

class WeightSink {
 public:
  // Borrows layout and groups.
  WeightSink(const Layout& layout, const std::vector<GroupSpec>& groups, int rank,
             std::function<absl::Span<std::byte>(int chunk)> weights,
             std::function<void(int chunk)> on_weights);

  // From now on every chunk of the rank is expected once.
  void Begin();
  // DATA_LOSS, before anything is written, if the chunk is not the rank's, has arrived before, or
  // has another size. INVALID_ARGUMENT if the trainer's memory for it has another size.
  absl::Status Place(const v1::WeightHeader& header, PayloadPieces payload);
  bool has(uint32_t chunk) const { return chunk < expected_.size() && !expected_[chunk]; }
  // Chunks that have not arrived.
  int64_t missing_chunks() const { return missing_chunks_; }
  std::vector<int> ListMissing() const;

 private:
  const Layout& layout_;
  const std::vector<GroupSpec>& groups_;
  const int rank_;
  const std::function<absl::Span<std::byte>(int chunk)> weights_;
  const std::function<void(int chunk)> on_weights_;
  std::vector<bool> expected_;  // By chunk of the job.
  int64_t missing_chunks_ = 0;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_WEIGHT_SINK_H_
