// The places of the blocks that sum up the norm (gradient_norm.h).
//
//   parameter  |  block 0  |  block 1  |  block 2  |  3  |    256 elements each, the last is short
//   chunks     |----- 4 -------|------------ 9 ----------|     block 1 is cut
//
// A block inside one chunk is summed with the chunk. A block cut by the edge of a chunk can be summed
// only once all of its elements are there: sums of its parts are not enough. In a layout of some
// ranks, blocks with other ranks' elements are among those.
//
// Pure arithmetic; constant, and so thread-safe.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_NORM_NORM_BLOCKS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_NORM_NORM_BLOCKS_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/layout.h"

namespace ballast {

class NormBlocks {
 public:
  // Numbers [begin, end) of blocks.
  struct Range {
    int64_t begin = 0;
    int64_t end = 0;

    int64_t count() const { return end - begin; }
  };
  // Consecutive blocks inside one piece, from `chunk_offset` on. Only the last may be short.
  struct WholeBlocks {
    Range blocks;
    int64_t chunk_offset = 0;
    int64_t elements = 0;
  };
  // A block's elements [begin, end) of its parameter.
  struct Place {
    int parameter = 0;
    int64_t begin = 0;
    int64_t end = 0;
  };

  // The number of blocks of a layout.
  static int64_t CountOf(const Layout& layout);
  // The maximal size of the tables.
  static int64_t Bytes(const Layout& layout);

  // `layout` outlives it.
  explicit NormBlocks(const Layout& layout);

  // The blocks of a trainable parameter from the first to the last that has elements in the layout.
  // They are numbered through, parameter after parameter in the order of declaration.
  int64_t blocks() const { return first_block_.back(); }
  Range BlocksOfParameter(int parameter) const {
    return {first_block_[parameter], first_block_[parameter + 1]};
  }
  // The blocks inside the piece.
  WholeBlocks WholeIn(const ChunkPiece& piece) const;
  // Those that have elements in chunks but lie inside none, ascending.
  absl::Span<const int64_t> cut_blocks() const { return cut_blocks_; }

  Place PlaceOfBlock(int64_t block) const;

 private:
  const Layout& layout_;
  // The number of the block that `element` of a parameter is in.
  int64_t BlockOf(int parameter, int64_t element) const {
    return first_block_[parameter] + element / kBlockElements - skipped_blocks_[parameter];
  }

  std::vector<int64_t> first_block_;     // By parameter, and the end of the last one.
  std::vector<int64_t> skipped_blocks_;  // By parameter: those before its first.
  std::vector<int64_t> cut_blocks_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_NORM_NORM_BLOCKS_H_
