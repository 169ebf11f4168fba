// Memory set aside for the weights that a speculating service sends before the step's decision.
// Here they are nobody's weights yet: the decision says which of them are the step's.
//
// Used from one thread at a time.
#ifndef BALLAST_CLIENT_PROVISIONAL_WEIGHTS_H_
#define BALLAST_CLIENT_PROVISIONAL_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/available_memory.h"
#include "client/transport.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"

namespace ballast::client {

class ProvisionalWeights {
 public:
  // Room for every chunk of the rank in its return dtype, touched, so that it is there when it is
  // needed. RESOURCE_EXHAUSTED says how much could not be had; so much is not touched that a
  // control group would kill for it.
  static absl::StatusOr<ProvisionalWeights> Reserve(
      const Layout& layout, const std::vector<GroupSpec>& groups, int rank,
      int64_t available_bytes = AvailableMemoryBytes());

  // DATA_LOSS, and nothing kept, for a chunk that is not the rank's, is kept already, or is of
  // another size.
  absl::Status Keep(const v1::WeightHeader& header, PayloadPieces payload);
  bool has(int chunk) const { return places_[chunk].kept; }
  // Of a chunk that is kept.
  absl::Span<const std::byte> weights(int chunk) const;
  // From now on nothing is kept.
  void Forget();

 private:
  struct Place {
    size_t offset_bytes = 0;
    size_t bytes = 0;
    bool expected = false;  // The chunk is the rank's.
    bool kept = false;
  };
  ProvisionalWeights() = default;

  std::vector<Place> places_;  // By chunk of the job.
  std::unique_ptr<std::byte[]> memory_;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_PROVISIONAL_WEIGHTS_H_
