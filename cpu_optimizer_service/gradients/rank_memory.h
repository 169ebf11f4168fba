// Memory that a rank's process and the service both see: gradients come in it and weights go out in
// it, each chunk at its place (common/rank_memory_layout.h), without being copied.
//
// The other process may write there at any time, whatever it has promised. Values read twice may
// differ, so nothing may be concluded from them but values of its own job.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_RANK_MEMORY_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_RANK_MEMORY_H_

#include <cstddef>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ballast {

// Constant, and so thread-safe. What it maps stays mapped, and can be read and written, for as long
// as it lives.
class RankMemory {
 public:
  virtual ~RankMemory() = default;
  // The places of one of the rank's chunks.
  virtual absl::Span<const std::byte> gradient(int chunk) const = 0;
  virtual absl::Span<std::byte> weights(int chunk) const = 0;
  // The name under which a later process finds it (host/named_memory.h); empty: it does not.
  virtual absl::string_view kept_name() const { return {}; }
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_RANK_MEMORY_H_
