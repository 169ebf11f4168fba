#include "cpu_optimizer_service/common/sharding.h"

#include <algorithm>
#include <set>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/rounding.h"

namespace ballast {
namespace {

constexpr size_t kUsualDims = 8;  // Of parameters and meshes; more cost an allocation.

// What is left of elements [begin, begin + size) of a dimension.
struct Part {
  int64_t begin = 0;
  int64_t size = 0;
};

int64_t ShareOf(const Part& part, int ranks) { return DivideUp(part.size, ranks); }

Part CutFor(const Part& part, int ranks, int coordinate) {
  const int64_t share = ShareOf(part, ranks);
  // A late rank may begin behind the end of what there is. Its part is empty then.
  const int64_t begin = std::min(coordinate * share, part.size);
  return {part.begin + begin, std::min(share, part.size - begin)};
}

}  // namespace

absl::Status CheckMesh(absl::Span<const MeshDim> mesh, int world_size) {
  if (mesh.empty()) return absl::InvalidArgumentError("the mesh has no dimension");
  int64_t ranks = 1;
  std::set<absl::string_view> names;
  for (const MeshDim& dim : mesh) {
    if (dim.name.size() > kMaxMeshNameBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("mesh dimension name '", dim.name.substr(0, 64), "...' has ",
                       dim.name.size(), " bytes; expected at most ", kMaxMeshNameBytes));
    }
    if (dim.name.empty() || !names.insert(dim.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("mesh dimension name '", dim.name,
                       "' is empty or used twice; give each dimension its own name"));
    }
    if (dim.size < 1 || dim.size > world_size) {
      return absl::InvalidArgumentError(absl::StrCat("mesh dimension ", dim.name, " has size ",
                                                     dim.size, "; expected 1 to ", world_size,
                                                     " (world_size)"));
    }
    // The product of up to 64 sizes could overflow. It stays at 2^31, which is no int's world_size.
    ranks = std::min<int64_t>(ranks * dim.size, int64_t{1} << 31);
  }
  if (ranks == world_size) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the mesh of ",
      absl::StrJoin(mesh, " x ",
                    [](std::string* out, const MeshDim& dim) { absl::StrAppend(out, dim.size); }),
      " ranks does not match world_size ", world_size));
}

absl::Status CheckPlacements(absl::Span<const Placement> placements, absl::Span<const MeshDim> mesh,
                             absl::Span<const int64_t> shape) {
  if (placements.size() != mesh.size()) {
    return absl::InvalidArgumentError(absl::StrCat("got ", placements.size(),
                                                   " placements; expected ", mesh.size(),
                                                   ", one for each mesh dimension"));
  }
  for (size_t m = 0; m < mesh.size(); ++m) {
    const int dim = placements[m].shard_dim;
    if (dim == Placement::kReplicate) continue;
    if (dim < 0 || dim >= static_cast<int>(shape.size())) {
      return absl::InvalidArgumentError(absl::StrCat("Shard(", dim, ") over ", mesh[m].name,
                                                     " is out of range for shape [",
                                                     absl::StrJoin(shape, ", "), "]"));
    }
  }
  return absl::OkStatus();
}

bool AreRunsWhole(absl::Span<const int64_t> shape, absl::Span<const Placement> placements,
                  absl::Span<const MeshDim> mesh, int64_t elements) {
  int64_t before = 1;  // Elements of the dimensions before the one that is looked at.
  int64_t stride = 1;
  for (const int64_t size : shape) stride *= size;
  for (size_t d = 0; d < shape.size(); ++d) {
    stride /= std::max<int64_t>(shape[d], 1);
    // The different sizes of what is left to be cut, all of which begin at multiples.
    std::set<int64_t> sizes = {shape[d]};
    bool is_cut = false;
    for (size_t m = 0; m < mesh.size(); ++m) {
      if (placements[m].shard_dim != static_cast<int>(d)) continue;
      std::set<int64_t> smaller;
      for (const int64_t size : sizes) {
        const int64_t share = DivideUp(size, mesh[m].size);
        if (share < size && share * stride % elements != 0) return false;
        is_cut |= share < size;
        if (share > 0) smaller.insert(share);
        if (share > 0 && size % share > 0) smaller.insert(size % share);
      }
      sizes = std::move(smaller);
    }
    // Of the last shard of each row, too, but in the last row of all.
    if (is_cut && before > 1 && shape[d] * stride % elements != 0) return false;
    before *= shape[d];
  }
  return true;
}

int64_t Shard::OffsetInParameter(int64_t local) const {
  // The shard is one run after another. The number of the run is taken apart into the coordinates
  // of the dimensions before run_dim_, the last of which changes fastest.
  int64_t offset = local % run_elements_;
  int64_t run = local / run_elements_;
  // Every run begins where the box begins in the dimensions that it goes over.
  for (size_t d = run_dim_; d < dims_.size(); ++d) offset += dims_[d].begin * dims_[d].stride;
  for (size_t d = run_dim_; d-- > 0;) {
    offset += (dims_[d].begin + run % dims_[d].size) * dims_[d].stride;
    run /= dims_[d].size;
  }
  return offset;
}

Shard ParameterShards::OfRank(int rank) const {
  absl::InlinedVector<Part, kUsualDims> parts(shape_.size());
  for (size_t d = 0; d < shape_.size(); ++d) parts[d].size = shape_[d];
  int ranks_after = 1;
  for (const MeshDim& dim : mesh_) ranks_after *= dim.size;
  int replica = 0;
  for (size_t m = 0; m < mesh_.size(); ++m) {
    // Ranks are numbered in row-major order, so the last dimension of the mesh changes fastest.
    ranks_after /= mesh_[m].size;
    const int coordinate = rank / ranks_after % mesh_[m].size;
    if (placements_[m].shard_dim == Placement::kReplicate) {
      replica = replica * mesh_[m].size + coordinate;
    } else {
      Part& part = parts[placements_[m].shard_dim];
      part = CutFor(part, mesh_[m].size, coordinate);
    }
  }
  Shard shard;
  shard.elements_ = replica == owner_ ? 1 : 0;
  shard.dims_.resize(shape_.size());
  // The box: where it begins in each dimension, and how far apart neighbours are in the parameter.
  int64_t stride = 1;
  for (size_t d = shape_.size(); d-- > 0;) {
    shard.dims_[d] = {.begin = parts[d].begin, .size = parts[d].size, .stride = stride};
    shard.elements_ *= parts[d].size;
    stride *= shape_[d];
    // Dimensions before the last one that is cut make further runs.
    if (parts[d].size < shape_[d]) shard.run_dim_ = std::max(shard.run_dim_, d);
  }
  shard.run_elements_ = 1;
  for (size_t d = shard.run_dim_; d < shape_.size(); ++d) shard.run_elements_ *= parts[d].size;
  return shard;
}

ParameterShards::Run ParameterShards::Find(int64_t element) const {
  // This inverts OfRank and OffsetInParameter, one dimension of the parameter at a time.
  Run run;
  absl::InlinedVector<int, kUsualDims> coordinates(mesh_.size(), 0);
  int replica = owner_;
  for (size_t m = mesh_.size(); m-- > 0;) {
    if (placements_[m].shard_dim != Placement::kReplicate) continue;
    coordinates[m] = replica % mesh_[m].size;
    replica /= mesh_[m].size;
  }
  int64_t stride = 1;
  int64_t local_stride = 1;
  bool in_run = true;  // All dimensions after this one are whole.
  for (size_t d = shape_.size(); d-- > 0;) {
    const int64_t at = element / stride % shape_[d];
    Part part = {.begin = 0, .size = shape_[d]};
    for (size_t m = 0; m < mesh_.size(); ++m) {
      if (placements_[m].shard_dim != static_cast<int>(d)) continue;
      // The share is not 0: the part holds the element.
      coordinates[m] = static_cast<int>((at - part.begin) / ShareOf(part, mesh_[m].size));
      part = CutFor(part, mesh_[m].size, coordinates[m]);
    }
    run.local += (at - part.begin) * local_stride;
    // The run goes on to the end of the part, as long as all dimensions after this one are whole.
    if (in_run) run.elements = (part.begin + part.size - at) * stride - element % stride;
    in_run &= part.size == shape_[d];
    stride *= shape_[d];
    local_stride *= part.size;
  }
  // For a scalar the loop above has nothing to do.
  if (shape_.empty()) run.elements = 1;
  for (size_t m = 0; m < mesh_.size(); ++m) run.rank = run.rank * mesh_[m].size + coordinates[m];
  return run;
}

}  // namespace ballast
