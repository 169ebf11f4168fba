#include "cpu_optimizer_service/state/snapshot.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace ballast {

bool Snapshot::has_plane(int parameter, Plane plane) const {
  const ParameterSpec& spec = layout_->spec().parameters[parameter];
  if (!spec.trainable) return false;
  return plane != Plane::kMaxExpAvgSq || amsgrad_[spec.group];
}

void Snapshot::Read(int parameter, Plane plane, int64_t offset, absl::Span<float> out) const {
  const int64_t end = offset + static_cast<int64_t>(out.size());
  layout_->VisitRange(parameter, offset, end, [&](const ChunkPiece& piece) {
    std::memcpy(out.data() + (piece.parameter_offset - offset),
                pins_.at(piece.chunk).slot()[plane] + piece.chunk_offset,
                piece.elements * sizeof(float));
  });
}

namespace {

size_t Decade(double magnitude) {
  // Decades of PlaneSummary: the first is that of 1e-12.
  const double decade = std::floor(std::log10(magnitude)) + 12;
  return static_cast<size_t>(std::clamp(decade, 0.0, 15.0));
}

}  // namespace

PlaneSummary Summarize(const Snapshot& snapshot, int parameter, int64_t elements, Plane plane) {
  PlaneSummary summary;
  double sum = 0;
  double sum_of_squares = 0;
  int64_t finite = 0;
  // Pieces of 256 KiB. They come in the order of the parameter's elements, so that sums do not
  // depend on how ranks and chunks cut it.
  std::vector<float> buffer(std::min<int64_t>(elements, 1 << 16));
  for (int64_t offset = 0; offset < elements; offset += static_cast<int64_t>(buffer.size())) {
    const auto piece = absl::MakeSpan(buffer).first(
        std::min<int64_t>(static_cast<int64_t>(buffer.size()), elements - offset));
    snapshot.Read(parameter, plane, offset, piece);
    for (const double value : piece) {
      if (!std::isfinite(value)) {
        ++summary.non_finite;
        continue;
      }
      summary.min = finite == 0 ? value : std::min(summary.min, value);
      summary.max = finite == 0 ? value : std::max(summary.max, value);
      ++finite;
      sum += value;
      sum_of_squares += value * value;
      if (value == 0) {
        ++summary.zeros;
      } else {
        ++summary.magnitude_histogram[Decade(std::abs(value))];
      }
    }
  }
  summary.norm = std::sqrt(sum_of_squares);
  summary.mean = finite > 0 ? sum / static_cast<double>(finite) : 0;
  return summary;
}

}  // namespace ballast
