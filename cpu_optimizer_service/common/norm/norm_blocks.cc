#include "cpu_optimizer_service/common/norm/norm_blocks.h"

#include <limits>

#include "cpu_optimizer_service/common/rounding.h"

namespace ballast {
namespace {

// The parameter to which `number` belongs, by the first number of each.
int OwnerOf(absl::Span<const int64_t> first, int64_t number) {
  // A parameter without blocks has the same first number as the next one. upper_bound passes over
  // it.
  return static_cast<int>(std::upper_bound(first.begin(), first.end(), number) - first.begin()) - 1;
}

// The blocks that lie whole in elements [begin, end) of a parameter of `elements`.
NormBlocks::Range BlocksWithin(int64_t begin, int64_t end, int64_t elements) {
  // A block that began before `begin` is cut. One that ends with the parameter is whole, also if it
  // is short. Where all of [begin, end) lies within one block, `last` is not above `first`: none is
  // whole.
  const int64_t first = DivideUp(begin, kBlockElements);
  const int64_t last = end == elements ? DivideUp(end, kBlockElements) : end / kBlockElements;
  return {first, std::max(first, last)};
}

// The blocks of a parameter that have elements of the range.
NormBlocks::Range BlocksAround(const ElementRange& range) {
  return {range.begin / kBlockElements, DivideUp(range.end, kBlockElements)};
}

}  // namespace

int64_t NormBlocks::CountOf(const Layout& layout) {
  int64_t count = 0;
  for (int group = 0; group < layout.group_count(); ++group) {
    for (const int parameter : layout.parameters_of_group(group)) {
      count += BlocksAround(layout.RangeOfParameter(parameter)).count();
    }
  }
  return count;
}

int64_t NormBlocks::Bytes(const Layout& layout) {
  // Twice what is cut, since tables grow by doubling: in flat spaces one by each chunk at most,
  // but columns may cut all.
  const int64_t cuts = layout.has_mesh() ? std::numeric_limits<int64_t>::max()
                                         : static_cast<int64_t>(layout.chunks().size());
  const int64_t numbers = 2 * std::min(cuts, CountOf(layout)) +
                          2 * static_cast<int64_t>(layout.spec().parameters.size()) + 1;
  return numbers * int64_t{sizeof(int64_t)};
}

NormBlocks::NormBlocks(const Layout& layout) : layout_(layout) {
  const auto parameters = static_cast<int>(layout.spec().parameters.size());
  first_block_.reserve(parameters + 1);
  first_block_.push_back(0);
  skipped_blocks_.reserve(parameters);
  for (int p = 0; p < parameters; ++p) {
    // A frozen parameter has no gradient, and so no blocks.
    const Range blocks =
        layout.spec().parameters[p].trainable ? BlocksAround(layout.RangeOfParameter(p)) : Range();
    first_block_.push_back(first_block_.back() + blocks.count());
    skipped_blocks_.push_back(blocks.begin);
  }
  // What is cut has a piece that begins or ends within it.
  for (int chunk = 0; chunk < static_cast<int>(layout.chunks().size()); ++chunk) {
    layout.VisitPieces(chunk, [&](const ChunkPiece& piece) {
      const auto cut_at = [&](int64_t edge) {
        // The end of the parameter cuts nothing: its last block may be short.
        if (edge % kBlockElements == 0 || edge == layout.place(piece.parameter).elements) return;
        const int64_t block = BlockOf(piece.parameter, edge);
        // Many pieces in a row may begin and end within the same.
        if (cut_blocks_.empty() || cut_blocks_.back() != block) cut_blocks_.push_back(block);
      };
      cut_at(piece.parameter_offset);
      cut_at(piece.parameter_offset + piece.elements);
    });
  }
  // Chunks come rank by rank, so numbers are not in order; and a block with several
  // cuts has come several times.
  std::sort(cut_blocks_.begin(), cut_blocks_.end());
  cut_blocks_.erase(std::unique(cut_blocks_.begin(), cut_blocks_.end()), cut_blocks_.end());
  cut_blocks_.shrink_to_fit();
}

NormBlocks::WholeBlocks NormBlocks::WholeIn(const ChunkPiece& piece) const {
  const int64_t begin = piece.parameter_offset;
  const int64_t end = begin + piece.elements;
  const int64_t elements = layout_.place(piece.parameter).elements;
  const Range blocks = BlocksWithin(begin, end, elements);
  const int64_t first_block = first_block_[piece.parameter] - skipped_blocks_[piece.parameter];
  // Pieces of a parameter that is sharded by columns are often shorter than a block.
  if (blocks.begin == blocks.end) {
    return {.blocks = {first_block + blocks.begin, first_block + blocks.begin},
            .chunk_offset = piece.chunk_offset + piece.elements};
  }
  const int64_t whole_end = std::min(blocks.end * kBlockElements, elements);
  return {.blocks = {first_block + blocks.begin, first_block + blocks.end},
          .chunk_offset = piece.chunk_offset + blocks.begin * kBlockElements - begin,
          .elements = whole_end - blocks.begin * kBlockElements};
}

NormBlocks::Place NormBlocks::PlaceOfBlock(int64_t block) const {
  const int parameter = OwnerOf(first_block_, block);
  const int64_t begin =
      (block - first_block_[parameter] + skipped_blocks_[parameter]) * kBlockElements;
  return {.parameter = parameter,
          .begin = begin,
          .end = std::min(begin + kBlockElements, layout_.place(parameter).elements)};
}

}  // namespace ballast
