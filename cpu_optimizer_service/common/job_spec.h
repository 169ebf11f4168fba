// The description of a job, for client and service.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_JOB_SPEC_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_JOB_SPEC_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/plane.h"

namespace ballast {

// The maximal number of micro-steps of a step, whatever the job allows.
inline constexpr uint32_t kMaxMicroSteps = 1 << 16;
// The maximal number of a rank's attempts at a step. The last one cannot be discarded.
inline constexpr uint32_t kMaxAttempts = 1 << 12;
inline constexpr size_t kMaxJobNameBytes = 128;
inline constexpr size_t kMaxGroupNameBytes = 256;

// What happens to a parameter without a gradient from any rank in any micro-step of a step.
enum class UnusedPolicy : uint8_t {
  kError,  // The seal is refused and names it.
  kSkip,   // Its state and update count do not change, as in torch.
  kZero,   // It is updated with a gradient of zero, as in ZeRO.
};

// When chunks are updated; the bits are the same.
enum class UpdateMode : uint8_t {
  kWait,       // After the decision.
  kSpeculate,  // When a chunk's final contribution is in, into a second version, as if nothing were
               // clipped or unused; the decision publishes it, or it is computed again.
};

// What happens to a lost step that all ranks have begun: a rank was replaced, or an operator aborts
// it. A step that some rank has not begun is always repeated.
enum class OnAbort : uint8_t {
  kRedo,  // Every rank reads the committed weights and repeats the step.
  kSkip,  // It is decided as a skip, with its reason, on all ranks: for trainers that cannot
          // repeat.
};

// Who orthogonalizes the directions of rules with two rounds (common/rule.h).
enum class Orthogonalizer : uint8_t {
  kService,  // In fp32, with the bits of its reference.
  kWorkers,  // Ranks read their directions, make O of whole matrices on their devices, and give it.
};

absl::string_view Name(Orthogonalizer newton_schulz);  // "service".

// The format of its state is in the layout (LayoutSpec::states).
struct GroupSpec {
  std::string name;  // Unique in the job, not empty.
  HyperParameters hyper_parameters;
  DType wire_dtype = DType::kBFloat16;    // Of gradients to the service.
  DType return_dtype = DType::kBFloat16;  // Of weights back.

  bool operator==(const GroupSpec&) const = default;
};

// A service that holds a part of a job.
struct MemberSpec {
  std::string address;  // As ranks and other members reach it: "gpu3:7070", "[fd00::1]:7070".

  bool operator==(const MemberSpec&) const = default;
};
inline constexpr size_t kMaxMembers = 1024;
inline constexpr size_t kMaxAddressBytes = 300;  // A host's name has at most 253.

struct JobSpec {
  std::string name;  // [A-Za-z0-9._-]{1,128}, not beginning with '.': it becomes a directory name.
  std::vector<GroupSpec> groups;
  LayoutSpec layout;  // group_count equals groups.size().
  UnusedPolicy unused_policy = UnusedPolicy::kError;
  // The maximal number of micro-steps of a step; 0: kMaxMicroSteps. With 1 no accumulators are
  // allocated.
  uint32_t max_micro_steps = 0;
  // kSpeculate requests memory for second versions; if it does not fit, the job waits.
  UpdateMode update_mode = UpdateMode::kWait;
  OnAbort on_abort = OnAbort::kRedo;
  // The state before the last committed step is kept, so that the step can be undone. This costs
  // memory for one more version of all state.
  bool keep_previous = false;
  Orthogonalizer newton_schulz = Orthogonalizer::kService;
  // The services that hold the job together. Empty: one, which has no name here.
  std::vector<MemberSpec> members = {};
  std::vector<int> homes = {};  // By rank: the member that holds its part. Empty without members.
  // Of its generations. The service that creates the job chooses it: higher than that of any earlier
  // job of the name, if the service is in a cluster.
  uint64_t epoch = 1;

  bool operator==(const JobSpec&) const = default;

  uint32_t most_micro_steps() const {
    return max_micro_steps == 0 ? kMaxMicroSteps : std::min(max_micro_steps, kMaxMicroSteps);
  }
  int member_count() const { return std::max(1, static_cast<int>(members.size())); }
  int home(int rank) const { return homes.empty() ? 0 : homes[rank]; }
  // The member that decides: rank 0's home.
  int lead() const { return home(0); }
  std::vector<int> RanksOf(int member) const;  // Ascending.
};

// The start of a new job beside its first weights: its step, and each parameter's number of
// updates. Step 0: update_counts is empty, and moments are zeros. A later step: the first weights
// come with their moments.
struct FirstState {
  uint64_t step = 0;
  std::vector<int64_t> update_counts;  // By parameter, at most `step`; 0 for a frozen one.

  bool operator==(const FirstState&) const = default;
};
// The largest that a job's words per chunk can hold.
inline constexpr uint64_t kMaxFirstStep = uint64_t{1} << 30;

inline constexpr size_t kJobUidCharacters = 32;  // 128 random bits in hex.
inline constexpr size_t kMostAncestors = 64;     // That a derived job lists.

// The origin of a new job, if any. Parameters of the same name and shape keep weights, moments and
// update counts; others come with first weights. The step continues.
struct Derivation {
  // The job of the same name, which the new one replaces once it has all its weights. Empty: no
  // origin.
  std::string uid;
  // A checkpoint, or a folder of them, with the state instead of that job. Empty: that job has it.
  std::string checkpoint;

  bool is_from_nothing() const { return uid.empty() && checkpoint.empty(); }
  bool operator==(const Derivation&) const = default;
};

// Planes of parameters to write between two steps. The step's number and the generation do not
// change.
struct StateWrite {
  uint64_t step = 0;  // The committed step before it.
  // Counts the ranks' writes of a job, from 1. A rank whose answer was lost repeats it.
  uint64_t number = 0;
  std::vector<Plane> planes;    // Ascending. Empty: only the update counts.
  std::vector<int> parameters;  // Ascending, at least one.
  // One for each of those, 0 to `step`. Empty: no change.
  std::vector<int64_t> update_counts;

  bool operator==(const StateWrite&) const = default;
};

// 1 to 128 letters, digits, '.', '_' or '-', not beginning with '.': so it can also name a folder.
bool IsJobName(absl::string_view name);
// INVALID_ARGUMENT unless IsJobName.
absl::Status CheckJobName(absl::string_view name);

// INVALID_ARGUMENT for names and hyper-parameters, which Layout::Create does not check.
absl::Status Validate(const JobSpec& spec);
// As in rule.h, for a group with these values now, and its state's format. Names the group.
absl::Status ValidateChanges(const JobSpec& spec, int group, const HyperParameters& now,
                             const HyperParameterOverrides& changes);
absl::Status Validate(const FirstState& state, const JobSpec& spec);
absl::Status Validate(const StateWrite& write, const JobSpec& spec);
// SGD's first update sets momentum_buffer. So one that is written without update counts is that of a
// first update: a count of 0 becomes 1, as in torch, which goes by whether the buffer is there.
bool HoldsFirstUpdate(const StateWrite& write);
// "exp_avg and exp_avg_sq of h.0.w and 3 more".
std::string WhatIsWritten(const StateWrite& write, const JobSpec& spec);
// The chunks that hold elements of the write, ascending.
std::vector<int> ChunksOf(const StateWrite& write, const Layout& layout);

// Whether these may be the groups' values at some step: of their rules, with their planes. Before it
// is true, no values from elsewhere may be used.
bool AreValuesOf(const JobSpec& spec, const std::vector<HyperParameters>& values);

// Empty if the two describe the same training; else one line with the first difference, `a` first.
// Hyper-parameters may differ, because they change during a run. The update mode may differ,
// because it does not affect the bits.
std::string FirstDifference(const JobSpec& a, const JobSpec& b);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_JOB_SPEC_H_
