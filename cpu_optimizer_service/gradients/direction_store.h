// The directions of a step's first round, and O, what Newton-Schulz makes of them, for groups whose
// rule has two rounds (common/rule.h). By chunk, in bf16. A matrix is gathered from its chunks and
// scattered to them.
//
// In named memory a later process finds both: the record says which of them count.
//
// Thread-compatible per chunk.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_DIRECTION_STORE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_DIRECTION_STORE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/host/arena.h"

namespace ballast {

class DirectionStore {
 public:
  // Null: no group has such a rule. `arenas` may be of named memory; `scratch` is not. All outlive it.
  static absl::StatusOr<std::unique_ptr<DirectionStore>> Create(const JobSpec& spec,
                                                                const Layout& layout,
                                                                ArenaFactory& arenas,
                                                                ArenaFactory& scratch);

  // The chunk's, of such a group.
  absl::Span<uint16_t> direction(int chunk) const { return Of(directions_, chunk); }
  absl::Span<uint16_t> orthogonal(int chunk) const { return Of(orthogonal_, chunk); }
  // Elements of a matrix in row-major order, from element `begin` on: its direction; its O.
  void Gather(int parameter, int64_t begin, absl::Span<uint16_t> elements) const;
  void Scatter(int parameter, int64_t begin, absl::Span<const uint16_t> elements);
  // For one matrix at a time (kernels/newton_schulz.h).
  absl::Span<float> scratch() const;

 private:
  explicit DirectionStore(const Layout& layout) : layout_(layout) {}

  // By chunk; null for those of other groups.
  using Places = std::vector<uint16_t*>;
  absl::Span<uint16_t> Of(const Places& places, int chunk) const {
    return absl::MakeSpan(places[chunk], layout_.chunks()[chunk].elements);
  }

  const Layout& layout_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Arena> scratch_;
  Places directions_;
  Places orthogonal_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_DIRECTION_STORE_H_
