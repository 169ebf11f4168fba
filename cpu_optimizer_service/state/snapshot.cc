#include "cpu_optimizer_service/state/snapshot.h"

#include <algorithm>
#include <cstring>

#include "cpu_optimizer_service/common/packed/packed_state.h"

namespace ballast {

void CopyStoredOut(const Layout& layout, int parameter, Plane stored, int64_t first,
                   absl::Span<std::byte> out, absl::FunctionRef<const Slot&(int chunk)> slot_of) {
  const StateFormat format = layout.format(parameter);
  const int64_t group = ElementsPerNumber(stored);
  const int64_t count = static_cast<int64_t>(out.size()) / StoredBytes(format, stored, 1);
  const int64_t begin = first * group;
  const int64_t end = std::min((first + count) * group, layout.place(parameter).elements);
  layout.VisitRange(parameter, begin, end, [&](const ChunkPiece& piece) {
    const int64_t to = StoredBytes(format, stored, piece.parameter_offset - begin);
    std::memcpy(out.data() + to,
                slot_of(piece.chunk).As<std::byte>(stored) +
                    StoredBytes(format, stored, piece.chunk_offset),
                StoredBytes(format, stored, piece.elements));
  });
}

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

void Snapshot::ReadStored(int parameter, Plane stored, int64_t first,
                          absl::Span<std::byte> out) const {
  CopyStoredOut(*layout_, parameter, stored, first, out,
                [&](int chunk) -> const Slot& { return pins_.at(chunk).slot(); });
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
