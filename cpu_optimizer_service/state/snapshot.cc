#include "cpu_optimizer_service/state/snapshot.h"

#include <algorithm>

#include "cpu_optimizer_service/common/packed/packed_state.h"

namespace ballast {

PlaneList Snapshot::planes(int parameter) const {
  const ParameterSpec& spec = layout_->spec().parameters[parameter];
  return spec.trainable ? planes_[spec.group] : PlaneList();
}

bool Snapshot::has_plane(int parameter, Plane plane) const {
  return std::ranges::count(planes(parameter), plane) > 0;
}

void Snapshot::Read(int parameter, Plane plane, int64_t offset, absl::Span<float> out) const {
  const int64_t end = offset + static_cast<int64_t>(out.size());
  layout_->VisitRange(parameter, offset, end, [&](const ChunkPiece& piece) {
    ReadPlane(pins_.at(piece.chunk).slot(), plane, piece.chunk_offset,
              out.subspan(piece.parameter_offset - offset, piece.elements));
  });
}

PlaneSummary Summarize(const Snapshot& snapshot, int parameter,
                       absl::Span<const ElementRange> ranges, Plane plane) {
  constexpr int64_t kPiece = 1 << 16;  // 256 KiB.
  PlaneSummary summary;
  std::vector<float> piece(kPiece);
  int64_t filled = 0;
  // Columns of a matrix are many short ranges.
  for (const ElementRange& range : ranges) {
    for (int64_t offset = range.begin, some; offset < range.end; offset += some) {
      some = std::min(kPiece - filled, range.end - offset);
      snapshot.Read(parameter, plane, offset, absl::MakeSpan(piece).subspan(filled, some));
      filled += some;
      if (filled < kPiece) continue;
      summary.Add(piece);
      filled = 0;
    }
  }
  summary.Add(absl::MakeConstSpan(piece).first(filled));
  return summary;
}

}  // namespace ballast
