// Where every element of a job lies: parameters, or their shards, one after the other in spaces,
// and the spaces cut into chunks. Pure arithmetic; both ends of the wire compute it from the same
// description.
//
// With buckets, a group has one flat space, and partitions of that are given to ranks:
//
//   group 0    |-- wte --|-- h.0.attn.w --|-- ... --|pad|   flat space, padded to whole blocks
//              | bucket 0        | bucket 1       | ...     each split among the ranks, at blocks
//              | r0  | r1  | r2  | r0  | r1  | r2 | ...     a partition: its ranges, all groups
//              | c0  | c2  | c4  | c1  | c3  | c5 | ...     chunks: ranges cut at chunk_elements
//
// With a mesh, every rank has a space of its own for each group, and in it the shards that it owns
// (sharding.h), in the order of declaration:
//
//   rank 0, group 0   |-- wte[0:3] --|pad|-- h.0.attn.w[0:8] --|pad| ...   shards are aligned
//                     | c0                | c1                 | c2 ...
//   rank 1, group 0   |-- wte[3:5] --|pad|-- h.0.attn.w[8:16] -|pad| ...
//                     | c7                | c8                 | ...
//
// Chunks are in order of (rank, group, begin). In messages they are numbered within their rank, so
// no rank needs the others' chunks, and a service needs only those of its ranks.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_LAYOUT_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_LAYOUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/hash/hash.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/plane.h"
#include "cpu_optimizer_service/common/sharding.h"

namespace ballast {

inline constexpr int64_t kBlockElements = 256;
inline constexpr int64_t kMaxChunkElements = int64_t{1} << 18;
// Shards begin at multiples of this: 64 bytes in the smallest format. In a group of packed state they
// begin at multiples of kPackedGroup, and in flat spaces parameters at multiples of kBlockElements.
inline constexpr int64_t kShardAlignmentElements = 32;

// Bounds on a description; beyond them Create returns INVALID_ARGUMENT.
inline constexpr int kMaxWorldSize = 65536;
inline constexpr int64_t kMaxFlatElements = int64_t{1} << 42;
inline constexpr int64_t kMaxChunks = int64_t{1} << 20;
inline constexpr int kMaxGroups = 4096;
inline constexpr int64_t kMaxParameters = int64_t{1} << 20;
inline constexpr size_t kMaxParameterNameBytes = 1024;
inline constexpr size_t kMaxDimensions = 64;
// Parameters times ranks, with a mesh.
inline constexpr int64_t kMaxShards = int64_t{1} << 22;

struct ParameterSpec {
  std::string name;            // Unique in the job, not empty.
  std::vector<int64_t> shape;  // Empty: a scalar. If a size is zero, the parameter has no elements.
  int group = 0;
  bool trainable = true;  // false: frozen, outside all spaces.
  // With a mesh, one for each of its dimensions, in order; optional for a frozen parameter. Empty
  // without a mesh.
  std::vector<Placement> placements = {};

  bool operator==(const ParameterSpec&) const = default;
};

// Elements [begin, end) of the flat space of `group`, owned by `rank`. Whole blocks.
struct PartitionRange {
  int rank = 0;
  int group = 0;
  int64_t begin = 0;
  int64_t end = 0;

  bool operator==(const PartitionRange&) const = default;
};

// How the state of a group's parameters is stored. A parameter with fewer than two dimensions or fewer
// than kLeastPackedElements elements is in fp32 in any case.
struct StateSpec {
  StateFormat format = StateFormat::kFloat32;
  // Of a parameter whose shards cut its groups of kPackedGroup elements: it is in fp32, too. false: such a
  // parameter is refused.
  bool fallback = false;

  bool operator==(const StateSpec&) const = default;
};
inline constexpr int64_t kLeastPackedElements = 4096;

struct LayoutSpec {
  int world_size = 1;
  int group_count = 1;
  std::vector<ParameterSpec> parameters;
  // Empty: parameters lie in flat spaces. Otherwise world_size ranks in row-major order.
  std::vector<MeshDim> mesh = {};
  // Without a mesh they tile every flat space exactly, in any order. Empty ranges are
  // INVALID_ARGUMENT; ranks without a range are fine. With a mesh it is empty.
  std::vector<PartitionRange> partitions;
  // A multiple of kBlockElements, at most kMaxChunkElements.
  int64_t chunk_elements = kMaxChunkElements;
  std::vector<StateSpec> states = {};  // By group. Empty: all in fp32.

  bool operator==(const LayoutSpec&) const = default;

  StateSpec state(int group) const {
    const bool is_there = group >= 0 && group < static_cast<int>(states.size());
    return is_there ? states[group] : StateSpec();
  }
  bool is_packed(int group) const { return state(group).format != StateFormat::kFloat32; }
};

// A parameter's place. Frozen parameters, and all with a mesh, have offset -1.
struct ParameterPlace {
  int64_t elements = 0;
  int64_t offset = -1;  // Of the parameter's first element in its group's flat space.
};

struct Chunk {
  int group = 0;
  // The chunk's first element: in its group's flat space, or, with a mesh, in its owner's part of
  // the group.
  int64_t begin = 0;
  int64_t elements = 0;  // Padding included; whole blocks, or multiples of kShardAlignmentElements.
  int rank = 0;          // Its owner.
  StateFormat format = StateFormat::kFloat32;  // Of all of its parameters.
};

// Consecutive elements of a parameter that are adjacent in a chunk.
struct ChunkPiece {
  int chunk = 0;
  int parameter = 0;             // -1: padding, which has no parameter_offset.
  int64_t parameter_offset = 0;  // First element of the piece, in the parameter.
  int64_t chunk_offset = 0;      // First element of the piece, in the chunk.
  int64_t elements = 0;
};

// A chunk's part of a parameter: one piece, or several if a shard is not contiguous in the
// parameter.
struct ChunkPart {
  int parameter = 0;
  int64_t part_offset = 0;  // First element, in the parameter, or in the owner's shard of it.
  int64_t chunk_offset = 0;
  int64_t elements = 0;
};

// Elements [begin, end).
struct ElementRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// With a mesh, by parameter, which of its replicas is the owner (sharding.h). The trainable ones, in
// the order of declaration, each go to the replica that has the fewest elements so far, the first of
// several. Only parameters that the same dimensions replicate count for each other. So no rank or
// node owns all. INVALID_ARGUMENT: so many different dimensions replicate that there are more than
// kMaxShards replicas to choose from. Mesh and placements have been checked.
absl::StatusOr<std::vector<int>> OwningReplicas(const LayoutSpec& spec);

class Layout {
 public:
  // INVALID_ARGUMENT, with the cause: duplicate or empty names, negative sizes, overflow, group or
  // rank out of range, a gap or an overlap (with the group and the elements), a mesh or placements
  // that do not fit, a bound above exceeded.
  static absl::StatusOr<Layout> Create(LayoutSpec spec);
  // The part of some ranks: their chunks, numbered from 0; VisitRange and ChunksOfParameter skip
  // other ranks' elements. The bounds on chunks and shards are on this part. `ranks`: ascending.
  // INVALID_ARGUMENT as above, and for a rank that does not exist.
  static absl::StatusOr<Layout> CreateForRanks(LayoutSpec spec, std::vector<int> ranks);

  const LayoutSpec& spec() const { return spec_; }
  int world_size() const { return spec_.world_size; }
  int group_count() const { return spec_.group_count; }
  bool has_mesh() const { return !spec_.mesh.empty(); }

  // The ranks with chunks here, ascending: all, unless CreateForRanks made the layout.
  absl::Span<const int> ranks() const { return ranks_; }
  bool has_rank(int rank) const { return index_of_rank_[rank] >= 0; }

  // Without a mesh the size of a group's flat space; with a mesh the elements of its chunks here.
  // Padding included. Zero for an empty group.
  int64_t flat_elements(int group) const { return flat_elements_[group]; }
  // Of all chunks here, padding included.
  int64_t total_elements() const;

  const ParameterPlace& place(int parameter) const { return places_[parameter]; }
  StateFormat format(int parameter) const { return formats_[parameter]; }
  // Whether its shards cut its groups of elements, so that it is in fp32 (StateSpec::fallback).
  bool fell_back(int parameter) const;
  // Index of the parameter of this name, or -1.
  int FindParameter(const std::string& name) const;

  // In order of (rank, group, begin).
  absl::Span<const Chunk> chunks() const { return chunks_; }
  // Subtract this from a chunk's index here to get its number in messages.
  int first_of_rank(int rank) const {
    return chunks_of_rank_[rank].empty() ? 0 : chunks_of_rank_[rank].front();
  }
  absl::Span<const int> chunks_of_rank(int rank) const { return chunks_of_rank_[rank]; }
  int64_t partition_elements(int rank) const;

  // The pieces of a chunk in order of chunk_offset, without padding. Cost: logarithmic in the
  // group's parameters, plus the returned pieces.
  std::vector<ChunkPiece> Pieces(int chunk) const;
  // The same, passed to visit(piece) one by one.
  template <class Visit>
  void VisitPieces(int chunk, Visit&& visit) const;
  // The piece of one element at `chunk_offset` of a chunk; padding has parameter -1.
  ChunkPiece PieceAt(int chunk, int64_t chunk_offset) const;
  // The parameters in a chunk, in the same order, passed to visit(part) as long as it returns true.
  // Allocates nothing.
  template <class Visit>
  void VisitParts(int chunk, Visit&& visit) const;
  // Elements [begin, end) of a trainable parameter, passed to visit(piece) in order.
  template <class Visit>
  void VisitRange(int parameter, int64_t begin, int64_t end, Visit&& visit) const;
  // All padding in chunks, by chunk; and that of one.
  absl::Span<const ChunkPiece> padding() const { return padding_; }
  absl::Span<const ChunkPiece> padding_of(int chunk) const;
  // A group's trainable parameters with elements, in the order of declaration.
  absl::Span<const int> parameters_of_group(int group) const { return group_parameters_[group]; }
  // The chunks with the elements of a trainable parameter, ascending.
  std::vector<int> ChunksOfParameter(int parameter) const;
  // From a trainable parameter's first element here to behind its last. Elements of other ranks may
  // lie between them.
  ElementRange RangeOfParameter(int parameter) const;

  // Without a mesh: the chunk with `element` of `group`'s flat space. Its owner's chunks are here.
  int ChunkAt(int group, int64_t element) const;
  // The parameter at `element` of `group`'s flat space, or -1 in padding.
  int ParameterAt(int group, int64_t element) const;

 private:
  // A space's part of a parameter.
  struct Part {
    int parameter = 0;
    int64_t begin = 0;  // Its first element, in the space.
    int64_t elements = 0;
  };
  struct Space {
    std::vector<Part> parts;  // By begin, and so by parameter.
    int64_t elements = 0;     // Padding included.
    int first_chunk = 0;      // With a mesh: the chunks that it is cut into, by begin.
    int end_chunk = 0;
  };

  Layout() = default;
  absl::Status UseRanks(std::vector<int> ranks);
  absl::Status AddParameters();
  absl::Status CutFlatSpaces();
  absl::Status CutShards();
  bool MayBePacked(int parameter) const;
  absl::Status ChooseFormats();
  // Calls visit(begin, end, format) for the parts of [begin, end) of a space with one format each.
  template <class Visit>
  void VisitFormats(const Space& space, int64_t begin, int64_t end, const Visit& visit) const;
  int64_t CountChunks(const Space& space, int64_t begin, int64_t end) const;
  void AddChunks(int rank, int group, int64_t begin, int64_t end);
  void FindPadding();

  const Space& SpaceOf(int rank, int group) const {
    return spaces_[has_mesh() ? index_of_rank_[rank] * group_count() + group : group];
  }
  // With a mesh: the chunk with `element` of the space.
  int ChunkIn(const Space& space, int64_t element) const;
  // The first of by_place_ that may have elements from `element` on.
  size_t FirstPlaceAt(int group, int64_t element) const;
  ParameterShards ShardsOf(int parameter) const {
    const ParameterSpec& spec = spec_.parameters[parameter];
    return ParameterShards(spec.shape, spec.placements, spec_.mesh, owners_[parameter]);
  }
  // Index of the first part that may have elements from `begin` on.
  static size_t FirstPartAt(const Space& space, int64_t begin);
  // The begin of the space's part of a parameter.
  static int64_t BeginOfParameter(const Space& space, int parameter);

  LayoutSpec spec_;
  std::vector<ParameterPlace> places_;
  std::vector<StateFormat> formats_;  // By parameter.
  std::vector<int64_t> flat_elements_;
  std::vector<std::vector<int>> group_parameters_;  // Per group: trainable, not empty.
  std::vector<int> owners_;                         // OwningReplicas, with a mesh.
  std::vector<int> ranks_;
  std::vector<int> index_of_rank_;  // By rank: its place in ranks_, or -1.
  std::vector<Space> spaces_;       // By group; with a mesh by place in ranks_, then group.
  std::vector<Chunk> chunks_;
  std::vector<int> by_place_;  // Without a mesh: chunks in order of (group, begin).
  std::vector<std::vector<int>> chunks_of_rank_;
  std::vector<ChunkPiece> padding_;
  // With a hash for which a client cannot find names that collide.
  std::unordered_map<std::string, int, absl::Hash<std::string>> by_name_;
};

template <class Visit>
void Layout::VisitParts(int chunk_index, Visit&& visit) const {
  const Chunk& chunk = chunks_[chunk_index];
  const int64_t end = chunk.begin + chunk.elements;
  const Space& space = SpaceOf(chunk.rank, chunk.group);
  for (size_t i = FirstPartAt(space, chunk.begin); i < space.parts.size(); ++i) {
    const Part& part = space.parts[i];
    if (part.begin >= end) break;
    const int64_t part_begin = std::max(part.begin, chunk.begin);
    const int64_t part_end = std::min(part.begin + part.elements, end);
    if (part_begin >= part_end) continue;
    const bool goes_on = visit(ChunkPart{.parameter = part.parameter,
                                         .part_offset = part_begin - part.begin,
                                         .chunk_offset = part_begin - chunk.begin,
                                         .elements = part_end - part_begin});
    if (!goes_on) return;
  }
}

template <class Visit>
void Layout::VisitPieces(int chunk, Visit&& visit) const {
  VisitParts(chunk, [&](const ChunkPart& part) {
    ChunkPiece piece = {.chunk = chunk,
                        .parameter = part.parameter,
                        .parameter_offset = part.part_offset,
                        .chunk_offset = part.chunk_offset,
                        .elements = part.elements};
    if (!has_mesh()) {
      visit(piece);
      return true;
    }
    const Shard shard = ShardsOf(part.parameter).OfRank(chunks_[chunk].rank);
    for (int64_t at = 0; at < part.elements; at += piece.elements) {
      const int64_t local = part.part_offset + at;
      piece.parameter_offset = shard.OffsetInParameter(local);
      piece.chunk_offset = part.chunk_offset + at;
      piece.elements =
          std::min(part.elements - at, shard.run_elements() - local % shard.run_elements());
      visit(piece);
    }
    return true;
  });
}

template <class Visit>
void Layout::VisitRange(int parameter, int64_t begin, int64_t end, Visit&& visit) const {
  if (begin >= end) return;
  const int group = spec_.parameters[parameter].group;
  ChunkPiece piece = {.parameter = parameter};
  if (has_mesh()) {
    const ParameterShards shards = ShardsOf(parameter);
    for (int64_t at = begin; at < end; at += piece.elements) {
      const ParameterShards::Run run = shards.Find(at);
      if (!has_rank(run.rank)) {
        piece.elements = run.elements;
        continue;
      }
      const Space& space = SpaceOf(run.rank, group);
      const int64_t in_space = BeginOfParameter(space, parameter) + run.local;
      piece.chunk = ChunkIn(space, in_space);
      const Chunk& chunk = chunks_[piece.chunk];
      piece.parameter_offset = at;
      piece.chunk_offset = in_space - chunk.begin;
      piece.elements = std::min({run.elements, end - at, chunk.elements - piece.chunk_offset});
      visit(std::as_const(piece));
    }
    return;
  }
  const int64_t offset = places_[parameter].offset;
  for (size_t i = FirstPlaceAt(group, offset + begin); i < by_place_.size(); ++i) {
    piece.chunk = by_place_[i];
    const Chunk& chunk = chunks_[piece.chunk];
    if (chunk.group != group || chunk.begin >= offset + end) break;
    piece.parameter_offset = std::max(begin, chunk.begin - offset);
    piece.chunk_offset = offset + piece.parameter_offset - chunk.begin;
    piece.elements = std::min(end, chunk.begin + chunk.elements - offset) - piece.parameter_offset;
    visit(std::as_const(piece));
  }
}

// Empty if the two agree; else one line with the first difference, `a` first.
std::string FirstDifference(const LayoutSpec& a, const LayoutSpec& b);

// INVALID_ARGUMENT, as in Create, unless FlatElements and then MakeBuckets may be called for
// `spec`. Checks its bounds, and each parameter's name, group and size. Ignores partitions and
// mesh, and allocates nothing.
absl::Status CheckParameters(const LayoutSpec& spec);

// Sizes of the flat spaces, padded to whole blocks. Ignores partitions and mesh.
std::vector<int64_t> FlatElements(const LayoutSpec& spec);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_LAYOUT_H_
