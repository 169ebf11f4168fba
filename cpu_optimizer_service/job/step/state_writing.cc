#include "cpu_optimizer_service/job/step/state_writing.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/packed/packed_state.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {

absl::Status BadValue(absl::string_view what, Plane plane, float value, int64_t element) {
  return absl::InvalidArgumentError(
      absl::StrCat(what, " is ", value, " at element ", element, "; expected a finite value",
                   IsOfSquares(plane) ? ", 0 or more" : "",
                   std::isfinite(value) && std::fabs(value) > kMostPackedMoment
                       ? ", and in packed state at most 8.5e+37"
                       : ""));
}

StateWriting::StateWriting(StateWrite write, const Layout& layout)
    : write_(std::move(write)),
      layout_(layout),
      chunks_(ChunksOf(write_, layout)),
      parts_(layout.world_size()) {
  begins_.push_back(0);
  for (const int chunk : chunks_) {
    begins_.push_back(begins_.back() +
                      static_cast<int64_t>(write_.planes.size()) * layout.chunks()[chunk].elements);
  }
}

void StateWriting::UseMemory(std::string label, std::unique_ptr<Arena> memory,
                             MemoryBudget::Reservation reservation) {
  label_ = std::move(label);
  memory_ = std::move(memory);
  reservation_ = std::move(reservation);
}

bool StateWriting::Writes(int parameter) const {
  return std::binary_search(write_.parameters.begin(), write_.parameters.end(), parameter);
}

float* StateWriting::At(int chunk) const {
  const auto found = std::lower_bound(chunks_.begin(), chunks_.end(), chunk);
  if (found == chunks_.end() || *found != chunk) return nullptr;
  return reinterpret_cast<float*>(memory_->data()) + begins_[found - chunks_.begin()];
}

absl::Status StateWriting::CheckValues(int parameter, Plane plane, absl::Span<const float> values,
                                       int64_t first) const {
  const std::optional<int64_t> bad = FirstBadValue(plane, layout_.format(parameter), values);
  return bad.has_value() ? BadValue(absl::StrCat(Name(plane), " of ",
                                                 layout_.spec().parameters[parameter].name),
                                    plane, values[*bad], first + *bad)
                         : absl::OkStatus();
}

absl::Status StateWriting::WriteChunk(int chunk, absl::Span<const float> values) {
  const int64_t elements = layout_.chunks()[chunk].elements;
  float* const to = At(chunk);
  Check(to != nullptr && values.size() == write_.planes.size() * elements,
        "the chunk is one of those that are written");
  for (size_t i = 0; i < write_.planes.size(); ++i) {
    const auto plane = values.subspan(i * elements, elements);
    absl::Status status;
    layout_.VisitPieces(chunk, [&](const ChunkPiece& piece) {
      if (!status.ok() || !Writes(piece.parameter)) return;
      status =
          CheckValues(piece.parameter, write_.planes[i],
                      plane.subspan(piece.chunk_offset, piece.elements), piece.parameter_offset);
    });
    BALLAST_RETURN_IF_ERROR(status);
  }
  std::copy(values.begin(), values.end(), to);
  return absl::OkStatus();
}

absl::Status StateWriting::WriteRange(int parameter, Plane plane, int64_t offset,
                                      absl::Span<const float> values) {
  BALLAST_RETURN_IF_ERROR(CheckValues(parameter, plane, values, offset));
  const auto place = std::find(write_.planes.begin(), write_.planes.end(), plane);
  Check(place != write_.planes.end() && Writes(parameter), "the plane is one that is written");
  const int64_t end = offset + static_cast<int64_t>(values.size());
  layout_.VisitRange(parameter, offset, end, [&](const ChunkPiece& piece) {
    const int64_t before = (place - write_.planes.begin()) * layout_.chunks()[piece.chunk].elements;
    std::copy_n(values.data() + (piece.parameter_offset - offset), piece.elements,
                At(piece.chunk) + before + piece.chunk_offset);
  });
  return absl::OkStatus();
}

void StateWriting::CopyTo(int chunk, const Slot& slot) const {
  const float* from = At(chunk);
  for (const Plane plane : write_.planes) {
    layout_.VisitParts(chunk, [&](const ChunkPart& part) {
      if (Writes(part.parameter)) {
        WritePlane(slot, plane, part.chunk_offset,
                   absl::MakeConstSpan(from + part.chunk_offset, part.elements));
      }
      return true;
    });
    from += layout_.chunks()[chunk].elements;
  }
}

StateWriting::Ended StateWriting::BeginPart(int rank, uint64_t id) {
  Ended before = DropPart(rank);
  Part& part = parts_[rank];
  part.id = id;
  std::copy_if(chunks_.begin(), chunks_.end(), std::back_inserter(part.missing),
               [&](int chunk) { return layout_.chunks()[chunk].rank == rank; });
  return before;
}

StateWriting::Part* StateWriting::FindPart(int rank, uint64_t id) {
  return parts_[rank].id == id ? &parts_[rank] : nullptr;
}

StateWriting::Ended StateWriting::DropPart(int rank) {
  return std::exchange(parts_[rank], Part()).done;
}

std::vector<int> StateWriting::RanksThat(bool take_part) const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < parts_.size(); ++rank) {
    if ((parts_[rank].id != 0) == take_part) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

bool StateWriting::complete() const {
  return std::all_of(parts_.begin(), parts_.end(),
                     [](const Part& part) { return part.done != nullptr; });
}

std::vector<StateWriting::Ended> StateWriting::TakeDones() {
  std::vector<Ended> dones;
  for (Part& part : parts_) {
    if (part.done != nullptr) dones.push_back(std::exchange(part.done, nullptr));
  }
  return dones;
}

}  // namespace ballast
