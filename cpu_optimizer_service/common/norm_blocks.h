// The places of the blocks and spans that sum up the norm (gradient_norm.h).
//
//   parameter  |  block 0  |  block 1  |  block 2  |  3  |    256 elements each, the last is short
//   chunks     |----- 4 -------|------------ 9 ----------|     block 1 is cut
//
// A block or span inside one chunk is summed with the chunk. A block cut by the edge of a chunk can
// be summed only once all of the parameter's gradient is there: sums of its parts are not enough.
//
// Pure arithmetic; constant, and so thread-safe.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_NORM_BLOCKS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_NORM_BLOCKS_H_

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
  // Numbers [begin, end) of blocks or spans.
  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
  };
  // Consecutive blocks inside one piece, from `chunk_offset` on. Only the last may be short.
  struct WholeBlocks {
    Range blocks;
    Range spans;  // Those inside them.
    int64_t chunk_offset = 0;
    int64_t elements = 0;
  };
  // A block's elements [begin, end) of its parameter.
  struct Place {
    int parameter = 0;
    int64_t begin = 0;
    int64_t end = 0;
  };

  // The number of units of `unit_elements` in a job's parameters: kBlockElements for its blocks,
  // kSpanElements for its spans.
  static int64_t CountOf(const Layout& layout, int64_t unit_elements);
  // The maximal size of the tables.
  static int64_t Bytes(const Layout& layout);

  // `layout` outlives it.
  explicit NormBlocks(const Layout& layout);

  // All blocks of trainable parameters are numbered through, parameter after parameter in the order
  // of declaration. So are all spans.
  int64_t blocks() const { return first_block_.back(); }
  int64_t spans() const { return first_span_.back(); }
  Range BlocksOfParameter(int parameter) const {
    return {first_block_[parameter], first_block_[parameter + 1]};
  }
  Range SpansOfParameter(int parameter) const {
    return {first_span_[parameter], first_span_[parameter + 1]};
  }
  // The blocks inside the piece.
  WholeBlocks WholeIn(const ChunkPiece& piece) const;
  // Those inside no chunk, ascending.
  absl::Span<const int64_t> cut_blocks() const { return cut_blocks_; }
  absl::Span<const int64_t> cut_spans() const { return cut_spans_; }

  Place PlaceOfBlock(int64_t block) const;
  Range BlocksOfSpan(int64_t span) const;
  // By group, from the sums of all spans.
  std::vector<double> GroupSums(absl::Span<const double> span_sums) const;

 private:
  const Layout& layout_;
  std::vector<int64_t> first_block_;  // By parameter, and the end of the last one.
  std::vector<int64_t> first_span_;
  std::vector<int64_t> cut_blocks_;
  std::vector<int64_t> cut_spans_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_NORM_BLOCKS_H_
