// How parameters are sharded over ranks, in PyTorch's words: a mesh of ranks, and for each
// parameter one placement per dimension of the mesh (torch.distributed.tensor). Pure arithmetic,
// one parameter at a time.
//
//   mesh (replicate: 2, shard: 3), ranks in row-major order     0 1 2
//                                                               3 4 5
//   a parameter of shape [7, 4] with placements [Replicate, Shard(0)]: rank 0 has rows 0 to 2,
//   rank 1 rows 3 to 5, rank 2 row 6. Ranks 3 to 5 have the same. One of the two replicas is the
//   owner: 0, which is ranks 0 to 2, or 1. Replicas are numbered as ranks are, in row-major order,
//   over the dimensions that replicate.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SHARDING_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SHARDING_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace ballast {

inline constexpr size_t kMaxMeshNameBytes = 256;

struct MeshDim {
  std::string name;  // Unique in the mesh, not empty.
  int size = 1;

  bool operator==(const MeshDim&) const = default;
};

// What one dimension of the mesh does to a parameter.
struct Placement {
  static constexpr int kReplicate = -1;
  // The dimension of the parameter that is cut, by torch.chunk's rule: each rank in turn gets
  // ceil(size / ranks) of it, the last ones less or nothing. If several dimensions of the mesh cut
  // the same one, each cuts the rest that those before it have left. kReplicate: not cut.
  int shard_dim = kReplicate;

  bool operator==(const Placement&) const = default;
};

// INVALID_ARGUMENT: no dimension, an empty, long or repeated name, a size below 1, or a number of
// ranks other than `world_size`.
absl::Status CheckMesh(absl::Span<const MeshDim> mesh, int world_size);
// INVALID_ARGUMENT: not one placement for each dimension of the mesh, or a dimension that the shape
// lacks.
absl::Status CheckPlacements(absl::Span<const Placement> placements, absl::Span<const MeshDim> mesh,
                             absl::Span<const int64_t> shape);

// Whether all shards consist of runs (below) that begin at multiples of `elements` in the parameter, and
// that end at one or at its end. The arguments have been checked.
bool AreRunsWhole(absl::Span<const int64_t> shape, absl::Span<const Placement> placements,
                  absl::Span<const MeshDim> mesh, int64_t elements);

// A rank's part of a parameter: a box, stored in row-major order.
class Shard {
 public:
  int64_t elements() const { return elements_; }
  // The shard consists of runs: elements that are also adjacent in the whole parameter. All runs
  // have one length.
  int64_t run_elements() const { return run_elements_; }
  // The position of the shard's element `local` in the whole parameter, in row-major order.
  int64_t OffsetInParameter(int64_t local) const;

 private:
  friend class ParameterShards;
  struct Dim {
    int64_t begin = 0;
    int64_t size = 0;
    int64_t stride = 1;  // In the whole parameter.
  };

  std::vector<Dim> dims_;
  int64_t elements_ = 0;
  int64_t run_elements_ = 0;
  size_t run_dim_ = 0;  // A run goes over this dimension and those after it.
};

// The shards of one parameter. Its arguments outlive it and have been checked.
class ParameterShards {
 public:
  // Consecutive elements of the parameter that are adjacent in a rank's shard.
  struct Run {
    int rank = 0;
    int64_t local = 0;  // The first one, in the shard.
    int64_t elements = 0;
  };

  // `owner`: a replica.
  ParameterShards(absl::Span<const int64_t> shape, absl::Span<const Placement> placements,
                  absl::Span<const MeshDim> mesh, int owner)
      : shape_(shape), placements_(placements), mesh_(mesh), owner_(owner) {}

  // Empty if another replica is the owner.
  Shard OfRank(int rank) const;
  // The owner of an element, and of how many after it, in row-major order of the whole parameter.
  Run Find(int64_t element) const;

 private:
  const absl::Span<const int64_t> shape_;
  const absl::Span<const Placement> placements_;
  const absl::Span<const MeshDim> mesh_;
  const int owner_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SHARDING_H_
