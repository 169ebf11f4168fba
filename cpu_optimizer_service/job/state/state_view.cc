#include "cpu_optimizer_service/job/state/state_view.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/packed/packed_state.h"
#include "cpu_optimizer_service/common/plan/memory_need.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/sha256.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {

absl::Status StateView::CheckThere() const {
  if (core_.first_weights.complete()) return absl::OkStatus();
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat("job ", core_.spec().name, " has no weights yet")),
      reason::kNoWeightsYet);
}

absl::StatusOr<Snapshot> StateView::SnapshotOf(absl::Span<const int> parameters,
                                               absl::Span<const int> chunks,
                                               std::shared_ptr<const Job> keep_alive,
                                               ChunkStore::Room* room) const {
  BALLAST_RETURN_IF_ERROR(CheckThere());
  Snapshot snapshot;
  snapshot.layout_ = &core_.layout;
  snapshot.keep_alive_ = std::move(keep_alive);
  snapshot.planes_ = PlanesByGroup(core_.spec());
  BALLAST_ASSIGN_OR_RETURN(std::vector<ChunkPin> pins, memory_.store->Pin(chunks, room));
  for (size_t i = 0; i < chunks.size(); ++i) {
    snapshot.pins_.emplace(chunks[i], std::move(pins[i]));
  }
  for (const int parameter : parameters) {
    snapshot.update_counts_[parameter] = core_.record.update_counts[parameter];
  }
  snapshot.step_ = core_.record.committed_step;
  snapshot.generation_ = core_.record.generation;
  snapshot.state_writes_ = core_.record.state_writes;
  snapshot.loads_ = core_.record.loads;
  return snapshot;
}

void StateView::Read(int parameter, Plane plane, int64_t offset, absl::Span<float> out) const {
  const int64_t end = offset + static_cast<int64_t>(out.size());
  core_.layout.VisitRange(parameter, offset, end, [&](const ChunkPiece& piece) {
    ReadPlane(memory_.store->Published(piece.chunk), plane, piece.chunk_offset,
              out.subspan(piece.parameter_offset - offset, piece.elements));
  });
}

void StateView::ReadWeights(int index, std::byte* out) const {
  const Chunk& chunk = core_.layout.chunks()[index];
  ballast::ReadWeights(memory_.store->Published(index), 0, chunk.elements,
                       core_.spec().groups[chunk.group].return_dtype, out);
}

void StateView::ReadStored(int parameter, Plane stored, int64_t first,
                           absl::Span<std::byte> out) const {
  CopyStoredOut(core_.layout, parameter, stored, first, out,
                [&](int chunk) -> const Slot& { return memory_.store->Published(chunk); });
}

CheckpointIndex StateView::MakeIndex(const JobRecord& record) const {
  CheckpointIndex index = {.job = core_.spec().name, .uid = core_.identity.uid};
  index.step = record.committed_step;
  index.epoch = record.generation.epoch;
  index.generation = record.generation.count;
  index.trainer_state = record.trainer_state;
  if (const auto& steps = record.history.recent_steps; !steps.empty()) {
    index.last_step = steps.back();
  }
  for (int group = 0; group < core_.layout.group_count(); ++group) {
    index.groups.push_back({.name = core_.spec().groups[group].name,
                            .hyper_parameters = record.hyper_parameters[group]});
  }
  for (int p = 0; p < static_cast<int>(core_.spec().layout.parameters.size()); ++p) {
    const ParameterSpec& parameter = core_.spec().layout.parameters[p];
    // A frozen parameter has no state in the service, so there is nothing to save of it.
    if (!parameter.trainable) continue;
    index.parameters.push_back({.name = parameter.name,
                                .shape = parameter.shape,
                                .group = core_.spec().groups[parameter.group].name,
                                .elements = core_.layout.place(p).elements,
                                .update_count = record.update_counts[p],
                                .format = core_.layout.format(p)});
  }
  return index;
}

std::string StateView::Hash(const CheckpointIndex& index) const {
  Sha256 sha256;
  // 256 KiB at a time, whatever the size of a parameter.
  std::vector<float> buffer(1 << 16);
  // By parameter and in row-major order, and without padding: how elements lie in chunks must not
  // show.
  for (const CheckpointIndex::Parameter& parameter : index.parameters) {
    sha256.AddValue(parameter.update_count);
    const int p = core_.layout.FindParameter(parameter.name);
    const GroupSpec& group = core_.spec().groups[core_.spec().layout.parameters[p].group];
    for (const Plane plane : PlanesOf(group.hyper_parameters)) {
      for (int64_t offset = 0; offset < parameter.elements;
           offset += static_cast<int64_t>(buffer.size())) {
        const auto piece = absl::MakeSpan(buffer).first(
            std::min<int64_t>(static_cast<int64_t>(buffer.size()), parameter.elements - offset));
        Read(p, plane, offset, piece);
        sha256.Add(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(piece.data()),
                                       piece.size() * sizeof(float)));
      }
    }
  }
  return sha256.Hex();
}

}  // namespace ballast
