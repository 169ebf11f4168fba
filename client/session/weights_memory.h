// A rank's weights before, or instead of, their copy to the trainer: in the memory shared with the
// service, or in the session's own.
//
// Weights that arrive before a step's decision are provisional: they are kept here and are not the
// step's weights yet. The decision publishes or drops them.
//
// at() may be called from any thread, the rest from one thread at a time.
#ifndef BALLAST_CLIENT_SESSION_WEIGHTS_MEMORY_H_
#define BALLAST_CLIENT_SESSION_WEIGHTS_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/session/shared_mapping.h"
#include "client/transport/transport.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/system/available_memory.h"

namespace ballast::client {

class WeightsMemory {
 public:
  // Own memory: room for every chunk of the rank in its return dtype. All pages are touched, so
  // that they exist when needed. RESOURCE_EXHAUSTED names the missing bytes; then no page is
  // touched, because a control group kills a process for that.
  static absl::StatusOr<WeightsMemory> Reserve(const Layout& layout,
                                               const std::vector<GroupSpec>& groups, int rank,
                                               int64_t available_bytes = AvailableMemoryBytes());
  // The places in `shared`, which is borrowed.
  static WeightsMemory In(const SharedMapping& shared, const Layout& layout, int rank);

  // Empty if the chunk is not the rank's.
  absl::Span<std::byte> at(size_t chunk) const {
    return chunk < places_.size() ? places_[chunk] : absl::Span<std::byte>();
  }

  // Copies the payload here, unless it is already in place. DATA_LOSS, and nothing is kept, if the
  // chunk is not the rank's, is already kept, or has another size.
  absl::Status KeepProvisional(const v1::WeightHeader& header, PayloadPieces payload);
  bool has_provisional(int chunk) const { return kept_[chunk]; }
  // The chunk's weights are the step's, and no longer provisional.
  void Publish(int chunk) { kept_[chunk] = false; }
  // True: it had provisional weights; they are dropped.
  bool Drop(size_t chunk) {
    const bool kept = chunk < kept_.size() && kept_[chunk];
    if (kept) kept_[chunk] = false;
    return kept;
  }
  // Drops all provisional weights.
  void ForgetProvisional();

 private:
  explicit WeightsMemory(size_t chunks) : places_(chunks), kept_(chunks, false) {}

  std::vector<absl::Span<std::byte>> places_;  // By chunk of the job; empty: not the rank's.
  std::vector<bool> kept_;                     // By chunk: provisional weights are kept.
  std::unique_ptr<std::byte[]> memory_;        // Null if the memory is shared.
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_WEIGHTS_MEMORY_H_
