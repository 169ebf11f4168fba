// Where every element of a job lives: parameters in the flat spaces of their groups, blocks,
// partitions and chunks. Pure arithmetic; both ends of the wire compute it from the same
// description.
//
//   group 0    |-- wte --|-- h.0.attn.w --|-- ... --|pad|   flat space, padded to whole blocks
//              | bucket 0        | bucket 1       | ...     each split among the ranks, at blocks
//              | r0  | r1  | r2  | r0  | r1  | r2 | ...     a partition: its ranges, all groups
//              | c0  | c1  | c2  | c3  | c4  | c5 | ...     chunks: ranges cut at chunk_elements
//
// The offset of a parameter depends neither on the world size nor on buckets.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_LAYOUT_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ballast {

inline constexpr int64_t kBlockElements = 256;
inline constexpr int64_t kMaxChunkElements = int64_t{1} << 18;

// Bounds on what a description may ask for; beyond them Create says INVALID_ARGUMENT.
inline constexpr int kMaxWorldSize = 65536;
inline constexpr int64_t kMaxFlatElements = int64_t{1} << 42;
inline constexpr int64_t kMaxChunks = int64_t{1} << 20;
inline constexpr int kMaxGroups = 4096;
inline constexpr int64_t kMaxParameters = int64_t{1} << 20;

struct ParameterSpec {
  std::string name;            // Unique in the job, not empty.
  std::vector<int64_t> shape;  // Empty: a scalar. A zero anywhere: a parameter of no elements.
  int group = 0;
  bool trainable = true;  // false: frozen, never in a flat space.

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

struct LayoutSpec {
  int world_size = 1;
  int group_count = 1;
  std::vector<ParameterSpec> parameters;
  std::vector<PartitionRange> partitions;  // Tile every flat space exactly; any order; empty ranges
                                           // are INVALID_ARGUMENT, ranks without a range are fine.
  int64_t chunk_elements =
      kMaxChunkElements;  // A multiple of kBlockElements, at most kMaxChunkElements.

  bool operator==(const LayoutSpec&) const = default;
};

// A parameter's place. Frozen parameters have offset -1.
struct ParameterPlace {
  int64_t elements = 0;
  int64_t offset = -1;  // Of the parameter's first element in its group's flat space.
};

struct Chunk {
  int group = 0;
  int64_t begin = 0;     // Of the chunk's first element in its group's flat space.
  int64_t elements = 0;  // Whole blocks, padding of the flat space included.
  int rank = 0;          // Its owner.
};

// Consecutive elements of a parameter that lie one after the other in a chunk.
struct ChunkPiece {
  int chunk = 0;
  int parameter = 0;             // -1: padding, which has no parameter_offset.
  int64_t parameter_offset = 0;  // First element of the piece, in the parameter.
  int64_t chunk_offset = 0;      // First element of the piece, in the chunk.
  int64_t elements = 0;
};

class Layout {
 public:
  // INVALID_ARGUMENT naming what is wrong: duplicate or empty names, negative sizes, overflow,
  // group or rank out of range, a gap or an overlap (with the group and the elements), bounds above
  // exceeded.
  static absl::StatusOr<Layout> Create(LayoutSpec spec);

  const LayoutSpec& spec() const { return spec_; }
  int world_size() const { return spec_.world_size; }
  int group_count() const { return spec_.group_count; }

  // Size of a group's flat space in elements, padding included. Zero for an empty group.
  int64_t flat_elements(int group) const { return flat_elements_[group]; }
  int64_t flat_blocks(int group) const { return flat_elements_[group] / kBlockElements; }
  int64_t total_flat_elements() const;

  const ParameterPlace& place(int parameter) const { return places_[parameter]; }
  // Index of the parameter of this name, or -1.
  int FindParameter(const std::string& name) const;

  // All chunks in order of (group, begin); their index here is their number on the wire.
  absl::Span<const Chunk> chunks() const { return chunks_; }
  absl::Span<const int> chunks_of_rank(int rank) const { return chunks_of_rank_[rank]; }
  int64_t partition_elements(int rank) const;

  // The parameters in a chunk in order of offset; padding belongs to none. Cost: logarithmic in the
  // parameters of the group plus the pieces returned.
  std::vector<ChunkPiece> Pieces(int chunk) const;
  // The same, given to visit(piece) one by one: no memory is allocated.
  template <class Visit>
  void VisitPieces(int chunk, Visit&& visit) const;
  // Elements [begin, end) of a trainable parameter, given to visit(piece) in their order.
  template <class Visit>
  void VisitRange(int parameter, int64_t begin, int64_t end, Visit&& visit) const;
  // All padding that chunks hold.
  absl::Span<const ChunkPiece> padding() const { return padding_; }
  // The trainable parameters of a group that have elements, in the order of declaration.
  absl::Span<const int> parameters_of_group(int group) const { return group_parameters_[group]; }
  // The chunks that hold the elements of a trainable parameter, as an index range [first, last).
  std::pair<int, int> ChunksOfParameter(int parameter) const;
  // The chunk that holds `element` of `group`'s flat space.
  int ChunkAt(int group, int64_t element) const;
  // The parameter at `element` of `group`'s flat space, or -1 in the padding.
  int ParameterAt(int group, int64_t element) const;

  // Empty if the two agree, else one line that names the first difference, `this` first.
  std::string FirstDifference(const Layout& other) const;

 private:
  Layout() = default;
  // Index in group_parameters_[chunk.group] of the first parameter that may lie in the chunk.
  size_t FirstParameterOf(const Chunk& chunk) const;

  LayoutSpec spec_;
  std::vector<ParameterPlace> places_;
  std::vector<int64_t> flat_elements_;
  std::vector<std::vector<int>> group_parameters_;  // Per group: trainable, not empty, by offset.
  std::vector<Chunk> chunks_;
  std::vector<std::vector<int>> chunks_of_rank_;
  std::vector<ChunkPiece> padding_;
  absl::flat_hash_map<std::string, int> by_name_;
};

template <class Visit>
void Layout::VisitPieces(int chunk_index, Visit&& visit) const {
  const Chunk& chunk = chunks_[chunk_index];
  const int64_t end = chunk.begin + chunk.elements;
  const std::vector<int>& parameters = group_parameters_[chunk.group];
  for (size_t i = FirstParameterOf(chunk); i < parameters.size(); ++i) {
    const ParameterPlace& place = places_[parameters[i]];
    if (place.offset >= end) break;
    const int64_t piece_begin = std::max(place.offset, chunk.begin);
    const int64_t piece_end = std::min(place.offset + place.elements, end);
    if (piece_begin >= piece_end) continue;
    visit(ChunkPiece{.chunk = chunk_index,
                     .parameter = parameters[i],
                     .parameter_offset = piece_begin - place.offset,
                     .chunk_offset = piece_begin - chunk.begin,
                     .elements = piece_end - piece_begin});
  }
}

template <class Visit>
void Layout::VisitRange(int parameter, int64_t begin, int64_t end, Visit&& visit) const {
  if (begin >= end) return;
  const int64_t offset = places_[parameter].offset;
  int index = ChunkAt(spec_.parameters[parameter].group, offset + begin);
  for (int64_t at = begin; at < end; ++index) {
    const Chunk& chunk = chunks_[index];
    const int64_t piece_end = std::min(end, chunk.begin + chunk.elements - offset);
    visit(ChunkPiece{.chunk = index,
                     .parameter = parameter,
                     .parameter_offset = at,
                     .chunk_offset = offset + at - chunk.begin,
                     .elements = piece_end - at});
    at = piece_end;
  }
}

// Sizes of the flat spaces that `parameters` make, padded to whole blocks.
std::vector<int64_t> FlatElements(absl::Span<const ParameterSpec> parameters, int group_count);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_LAYOUT_H_
