#include "cpu_optimizer_service/gradients/square_sums.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {
namespace {

// A task's share of what is cut: many times what it costs to start one.
constexpr int64_t kCutBlocksOfTask = 256;

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
void ForEachShare(int64_t count, SquareSums::ForEach for_each,
                  absl::FunctionRef<void(int64_t begin, int64_t end)> body) {
  // How the work is cut into tasks changes no bit: blocks are summed by themselves, and added
  // without rounding.
  if (count <= kCutBlocksOfTask) return body(0, count);
  for_each(DivideUp(count, kCutBlocksOfTask), [&](int64_t task) {
    body(task * kCutBlocksOfTask, std::min((task + 1) * kCutBlocksOfTask, count));
  });
}

}  // namespace

SquareSums::SquareSums(const Layout& layout)
    : layout_(layout),
      blocks_(layout),
      block_sums_(blocks_.blocks(), 0.0),
      chunk_sums_(layout.chunks().size()) {}

void SquareSums::SumChunk(int chunk, const GradientView& gradient) {
  ExactSum chunk_sum;
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
    chunk_sum.Add(sums);
  });
  chunk_sums_[chunk] = chunk_sum;
}

void SquareSums::ZeroChunk(int chunk) {
  layout_.VisitPieces(chunk, [&](const ChunkPiece& piece) {
    const NormBlocks::WholeBlocks whole = blocks_.WholeIn(piece);
    std::fill(block_sums_.begin() + whole.blocks.begin, block_sums_.begin() + whole.blocks.end,
              0.0);
  });
  chunk_sums_[chunk] = {};
}

bool SquareSums::SumCutBlock(int64_t block, ViewOf view, std::vector<CutRun>& runs) {
  const NormBlocks::Place place = blocks_.PlaceOfBlock(block);
  // In fp32, since its parts may have arrived in different formats; fp32 has all values of each.
  alignas(64) float elements[kBlockElements] = {};
  int64_t count = 0;
  layout_.VisitRange(place.parameter, place.begin, place.end, [&](const ChunkPiece& piece) {
    const GradientView gradient = view(piece.chunk);
    ConvertToFloat(At(gradient, piece.chunk_offset), gradient.dtype,
                   elements + (piece.parameter_offset - place.begin), piece.elements);
    count += piece.elements;
  });
  BlockSumsOfSquares(elements, DType::kFloat32, {&block_sums_[block], 1});
  if (count == place.end - place.begin) return true;
  layout_.VisitRange(place.parameter, place.begin, place.end, [&](const ChunkPiece& piece) {
    const float* const first = elements + (piece.parameter_offset - place.begin);
    runs.push_back({.parameter = piece.parameter,
                    .begin = piece.parameter_offset,
                    .values = {first, first + piece.elements}});
  });
  return false;
}

PartSums SquareSums::Combine(ViewOf view, ForEach for_each) {
  PartSums sums = {.groups = std::vector<ExactSum>(layout_.group_count()), .cut = {}};
  for (size_t chunk = 0; chunk < chunk_sums_.size(); ++chunk) {
    sums.groups[layout_.chunks()[chunk].group].Add(chunk_sums_[chunk]);
  }
  Mutex mutex;
  const absl::Span<const int64_t> cut_blocks = blocks_.cut_blocks();
  ForEachShare(static_cast<int64_t>(cut_blocks.size()), for_each, [&](int64_t begin, int64_t end) {
    std::map<int, ExactSum> of_share;  // By group.
    std::vector<CutRun> runs;
    for (int64_t i = begin; i < end; ++i) {
      if (!SumCutBlock(cut_blocks[i], view, runs)) continue;
      const int parameter = blocks_.PlaceOfBlock(cut_blocks[i]).parameter;
      of_share[layout_.spec().parameters[parameter].group].Add(block_sums_[cut_blocks[i]]);
    }
    const MutexLock lock(mutex);
    for (const auto& [group, sum] : of_share) sums.groups[group].Add(sum);
    std::ranges::move(runs, std::back_inserter(sums.cut));
  });
  return sums;
}

}  // namespace ballast
