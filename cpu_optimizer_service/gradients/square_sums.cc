#include "cpu_optimizer_service/gradients/square_sums.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {
namespace {

// A task's share of what is cut: many times what it costs to start one.
constexpr int64_t kCutBlocksOfTask = 256;
constexpr int64_t kCutSpansOfTask = 256;

const std::byte* At(const GradientView& gradient, int64_t element) {
  return static_cast<const std::byte*>(gradient.data) + element * SizeBytes(gradient.dtype);
}

// Of `elements` elements, fewer than a block.
double SumShortBlock(const std::byte* gradient, DType dtype, int64_t elements) {
  // Kernels take whole blocks. Zeros behind the elements change no bit (gradient_norm.h).
  alignas(64) std::byte padded[kBlockElements * sizeof(float)];
  const int64_t bytes = elements * SizeBytes(dtype);
  std::memcpy(padded, gradient, bytes);
  std::memset(padded + bytes, 0, kBlockElements * SizeBytes(dtype) - bytes);
  double sum = 0;
  BlockSumsOfSquares(padded, dtype, {&sum, 1});
  return sum;
}

// Calls body(begin, end) for all of [0, count), by tasks where there is enough for several.
void ForEachShare(int64_t count, int64_t share, SquareSums::ForEach for_each,
                  absl::FunctionRef<void(int64_t begin, int64_t end)> body) {
  // How the work is cut into tasks changes no bit: each block and each span is summed by itself.
  if (count <= share) return body(0, count);
  for_each(DivideUp(count, share),
           [&](int64_t task) { body(task * share, std::min((task + 1) * share, count)); });
}

}  // namespace

SquareSums::SquareSums(const Layout& layout)
    : layout_(layout),
      blocks_(layout),
      block_sums_(blocks_.blocks(), 0.0),
      span_sums_(blocks_.spans(), 0.0) {}

double SquareSums::SumOfSpan(int64_t span) const {
  const NormBlocks::Range blocks = blocks_.BlocksOfSpan(span);
  return SumInOrder(
      absl::MakeConstSpan(block_sums_).subspan(blocks.begin, blocks.end - blocks.begin));
}

void SquareSums::SumChunk(int chunk, const GradientView& gradient) {
  layout_.VisitPieces(chunk, [&](const ChunkPiece& piece) {
    const NormBlocks::WholeBlocks whole = blocks_.WholeIn(piece);
    const absl::Span<double> sums =
        absl::MakeSpan(block_sums_)
            .subspan(whole.blocks.begin, whole.blocks.end - whole.blocks.begin);
    if (sums.empty()) return;
    const int64_t full = whole.elements / kBlockElements;
    BlockSumsOfSquares(At(gradient, whole.chunk_offset), gradient.dtype, sums.first(full));
    if (const int64_t rest = whole.elements % kBlockElements; rest != 0) {
      sums.back() = SumShortBlock(At(gradient, whole.chunk_offset + full * kBlockElements),
                                  gradient.dtype, rest);
    }
    // All blocks of these spans have just been summed. Spans that a chunk's edge cuts wait for
    // Combine.
    for (int64_t span = whole.spans.begin; span < whole.spans.end; ++span) {
      span_sums_[span] = SumOfSpan(span);
    }
  });
}

void SquareSums::ZeroChunk(int chunk) {
  layout_.VisitPieces(chunk, [&](const ChunkPiece& piece) {
    const NormBlocks::WholeBlocks whole = blocks_.WholeIn(piece);
    std::fill(block_sums_.begin() + whole.blocks.begin, block_sums_.begin() + whole.blocks.end,
              0.0);
    std::fill(span_sums_.begin() + whole.spans.begin, span_sums_.begin() + whole.spans.end, 0.0);
  });
}

double SquareSums::SumInChunk(int chunk) const {
  double total = 0;
  layout_.VisitPieces(chunk, [&](const ChunkPiece& piece) {
    const NormBlocks::Range blocks = blocks_.WholeIn(piece).blocks;
    for (int64_t block = blocks.begin; block < blocks.end; ++block) total += block_sums_[block];
  });
  return total;
}

void SquareSums::SumCutBlock(int64_t block, ViewOf view) {
  const NormBlocks::Place place = blocks_.PlaceOfBlock(block);
  // In fp32, since its parts may have arrived in different formats; fp32 has all values of each.
  alignas(64) float elements[kBlockElements] = {};
  layout_.VisitRange(place.parameter, place.begin, place.end, [&](const ChunkPiece& piece) {
    const GradientView gradient = view(piece.chunk);
    ConvertToFloat(At(gradient, piece.chunk_offset), gradient.dtype,
                   elements + (piece.parameter_offset - place.begin), piece.elements);
  });
  BlockSumsOfSquares(elements, DType::kFloat32, {&block_sums_[block], 1});
}

std::vector<double> SquareSums::Combine(ViewOf view, ForEach for_each) {
  // Blocks before spans: a cut span needs the sums of all its blocks, and some of them may be cut.
  const absl::Span<const int64_t> cut_blocks = blocks_.cut_blocks();
  ForEachShare(static_cast<int64_t>(cut_blocks.size()), kCutBlocksOfTask, for_each,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) SumCutBlock(cut_blocks[i], view);
               });
  const absl::Span<const int64_t> cut_spans = blocks_.cut_spans();
  ForEachShare(static_cast<int64_t>(cut_spans.size()), kCutSpansOfTask, for_each,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   span_sums_[cut_spans[i]] = SumOfSpan(cut_spans[i]);
                 }
               });
  return blocks_.GroupSums(span_sums_);
}

}  // namespace ballast
