#include "cpu_optimizer_service/common/norm_blocks.h"

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

// Units of `size` elements that lie whole in elements [begin, end) of a parameter of `elements`.
NormBlocks::Range WholeUnits(int64_t begin, int64_t end, int64_t elements, int64_t size) {
  // A unit that began before `begin` is cut. One that ends with the parameter is whole, also if it
  // is short. Where all of [begin, end) lies within one unit, `last` is not above `first`: none is
  // whole.
  const int64_t first = DivideUp(begin, size);
  const int64_t last = end == elements ? DivideUp(end, size) : end / size;
  return {first, std::max(first, last)};
}

// Many pieces in a row may end within the same.
void Add(int64_t number, std::vector<int64_t>& numbers) {
  if (numbers.empty() || numbers.back() != number) numbers.push_back(number);
}

void SortOnce(std::vector<int64_t>& numbers) {
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  numbers.shrink_to_fit();
}

}  // namespace

int64_t NormBlocks::CountOf(const Layout& layout, int64_t unit_elements) {
  int64_t count = 0;
  for (int group = 0; group < layout.group_count(); ++group) {
    for (const int parameter : layout.parameters_of_group(group)) {
      count += DivideUp(layout.place(parameter).elements, unit_elements);
    }
  }
  return count;
}

int64_t NormBlocks::Bytes(const Layout& layout) {
  // Twice what is cut, since tables grow by doubling: in flat spaces one by each chunk at most,
  // but columns may cut all.
  const int64_t cuts = layout.has_mesh() ? std::numeric_limits<int64_t>::max()
                                         : static_cast<int64_t>(layout.chunks().size());
  const int64_t numbers = 2 * std::min(cuts, CountOf(layout, kBlockElements)) +
                          2 * std::min(cuts, CountOf(layout, kSpanElements)) +
                          2 * (static_cast<int64_t>(layout.spec().parameters.size()) + 1);
  return numbers * int64_t{sizeof(int64_t)};
}

NormBlocks::NormBlocks(const Layout& layout) : layout_(layout) {
  const auto parameters = static_cast<int>(layout.spec().parameters.size());
  first_block_.reserve(parameters + 1);
  first_span_.reserve(parameters + 1);
  first_block_.push_back(0);
  first_span_.push_back(0);
  for (int p = 0; p < parameters; ++p) {
    // A frozen parameter has no gradient, and so no blocks.
    const int64_t elements =
        layout.spec().parameters[p].trainable ? layout.place(p).elements : int64_t{0};
    first_block_.push_back(first_block_.back() + DivideUp(elements, kBlockElements));
    first_span_.push_back(first_span_.back() + DivideUp(elements, kSpanElements));
  }
  // What is cut has a piece that ends within it.
  for (int chunk = 0; chunk < static_cast<int>(layout.chunks().size()); ++chunk) {
    layout.VisitPieces(chunk, [&](const ChunkPiece& piece) {
      const int64_t end = piece.parameter_offset + piece.elements;
      // The end of the parameter cuts nothing: its last block and span may be short.
      if (end == layout.place(piece.parameter).elements) return;
      if (end % kBlockElements != 0) {
        Add(first_block_[piece.parameter] + end / kBlockElements, cut_blocks_);
      }
      if (end % kSpanElements != 0) {
        Add(first_span_[piece.parameter] + end / kSpanElements, cut_spans_);
      }
    });
  }
  // With a mesh, chunks come rank by rank, so numbers are not in order; and a unit with several
  // cuts has come several times.
  SortOnce(cut_blocks_);
  SortOnce(cut_spans_);
}

NormBlocks::WholeBlocks NormBlocks::WholeIn(const ChunkPiece& piece) const {
  const int64_t begin = piece.parameter_offset;
  const int64_t end = begin + piece.elements;
  const int64_t elements = layout_.place(piece.parameter).elements;
  const Range blocks = WholeUnits(begin, end, elements, kBlockElements);
  const Range spans = WholeUnits(begin, end, elements, kSpanElements);
  const int64_t first_block = first_block_[piece.parameter];
  const int64_t first_span = first_span_[piece.parameter];
  // Pieces of a parameter that is sharded by columns are often shorter than a block.
  if (blocks.begin == blocks.end) {
    return {.blocks = {first_block + blocks.begin, first_block + blocks.begin},
            .chunk_offset = piece.chunk_offset + piece.elements};
  }
  const int64_t whole_end = std::min(blocks.end * kBlockElements, elements);
  return {.blocks = {first_block + blocks.begin, first_block + blocks.end},
          .spans = {first_span + spans.begin, first_span + spans.end},
          .chunk_offset = piece.chunk_offset + blocks.begin * kBlockElements - begin,
          .elements = whole_end - blocks.begin * kBlockElements};
}

NormBlocks::Place NormBlocks::PlaceOfBlock(int64_t block) const {
  const int parameter = OwnerOf(first_block_, block);
  const int64_t begin = (block - first_block_[parameter]) * kBlockElements;
  return {.parameter = parameter,
          .begin = begin,
          .end = std::min(begin + kBlockElements, layout_.place(parameter).elements)};
}

NormBlocks::Range NormBlocks::BlocksOfSpan(int64_t span) const {
  const int parameter = OwnerOf(first_span_, span);
  const int64_t begin = first_block_[parameter] + (span - first_span_[parameter]) * kSpanBlocks;
  return {begin, std::min(begin + kSpanBlocks, first_block_[parameter + 1])};
}

std::vector<double> NormBlocks::GroupSums(absl::Span<const double> span_sums) const {
  // Each parameter is summed by itself first, in the order of declaration, as gradient_norm.h says.
  // Any other grouping may round otherwise.
  std::vector<double> group_sums;
  std::vector<double> parameter_sums;
  for (int group = 0; group < layout_.group_count(); ++group) {
    parameter_sums.clear();
    for (const int parameter : layout_.parameters_of_group(group)) {
      const Range spans = SpansOfParameter(parameter);
      parameter_sums.push_back(SumInOrder(span_sums.subspan(spans.begin, spans.end - spans.begin)));
    }
    group_sums.push_back(SumInOrder(parameter_sums));
  }
  return group_sums;
}

}  // namespace ballast
