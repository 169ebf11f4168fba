// A consistent view of parameters at one committed step, while training goes on. Chunks pinned by a
// snapshot are updated into fresh slots; writers never wait for readers.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SNAPSHOT_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SNAPSHOT_H_

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/norm/plane_summary.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/state/chunk_store.h"

namespace ballast {

class Snapshot {
 public:
  // Which state it is of. Parts of one state at several members agree in these.
  uint64_t step() const { return step_; }
  Generation generation() const { return generation_; }
  uint64_t state_writes() const { return state_writes_; }
  uint64_t loads() const { return loads_; }  // And undos.
  // The parameter's number of updates; 0 for a frozen one.
  int64_t update_count(int parameter) const { return update_counts_.at(parameter); }
  PlaneList planes(int parameter) const;  // Empty for a frozen one.
  bool has_plane(int parameter, Plane plane) const;

  // Elements [offset, offset + out.size()) of a plane of one of the snapshot's parameters. The
  // range must lie within the parameter, and the plane must exist.
  void Read(int parameter, Plane plane, int64_t offset, absl::Span<float> out) const;
  // What is stored of it (packed/codes.h), from its number `first` on.
  void ReadStored(int parameter, Plane stored, int64_t first, absl::Span<std::byte> out) const;

 private:
  friend class StateView;
  const Layout* layout_ = nullptr;
  std::shared_ptr<const void> keep_alive_;
  uint64_t step_ = 0;
  Generation generation_;
  uint64_t state_writes_ = 0;
  uint64_t loads_ = 0;
  std::unordered_map<int, int64_t> update_counts_;
  std::unordered_map<int, ChunkPin> pins_;  // By chunk.
  std::vector<PlaneList> planes_;           // By group.
};

// What is stored of a plane of a parameter, from its number `first` on, out of the slots of its chunks.
void CopyStoredOut(const Layout& layout, int parameter, Plane stored, int64_t first,
                   absl::Span<std::byte> out, absl::FunctionRef<const Slot&(int chunk)> slot_of);

// Statistics of these elements of a plane, computed without copying them out.
PlaneSummary Summarize(const Snapshot& snapshot, int parameter,
                       absl::Span<const ElementRange> ranges, Plane plane);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SNAPSHOT_H_
