// Where a rank's weights lie before, or instead of, being given to the trainer: its part of the
// memory shared with the service, or memory of the session's own.
//
// Weights that come ahead of a step's decision are provisional: they are kept here and are nobody's
// weights yet. The decision says which of them are the step's.
//
// at() may be called from any thread, the rest from one at a time.
#ifndef BALLAST_CLIENT_SESSION_WEIGHTS_MEMORY_H_
#define BALLAST_CLIENT_SESSION_WEIGHTS_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/session/shared_memory.h"
#include "client/transport/transport.h"
#include "cpu_optimizer_service/common/available_memory.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"

namespace ballast::client {

class WeightsMemory {
 public:
  // Own memory: room for every chunk of the rank in its return dtype, touched, so that it is there
  // when it is needed. RESOURCE_EXHAUSTED says how much could not be had; so much is not touched
  // that a control group would kill for it.
  static absl::StatusOr<WeightsMemory> Reserve(const Layout& layout,
                                               const std::vector<GroupSpec>& groups, int rank,
                                               int64_t available_bytes = AvailableMemoryBytes());
  // The places in `shared`, which is borrowed.
  static WeightsMemory In(const SharedMemory& shared, const Layout& layout, int rank);

  // Empty for what is no chunk of the rank.
  absl::Span<std::byte> at(size_t chunk) const {
    return chunk < places_.size() ? places_[chunk] : absl::Span<std::byte>();
  }

  // Copies the payload here, unless it lies here already. DATA_LOSS, and nothing kept, for a chunk
  // that is not the rank's, is kept already, or is of another size.
  absl::Status KeepProvisional(const v1::WeightHeader& header, PayloadPieces payload);
  bool has_provisional(int chunk) const { return kept_[chunk]; }
  // The chunk's are the step's: provisional no longer.
  void Publish(int chunk) { kept_[chunk] = false; }
  // From now on nothing is kept.
  void ForgetProvisional();

 private:
  explicit WeightsMemory(size_t chunks) : places_(chunks), kept_(chunks, false) {}

  std::vector<absl::Span<std::byte>> places_;  // By chunk of the job; empty: another rank's.
  std::vector<bool> kept_;                     // The same.
  std::unique_ptr<std::byte[]> memory_;        // Null where it is shared.
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_WEIGHTS_MEMORY_H_
