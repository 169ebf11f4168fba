// The description of a job, the same at both ends of the wire.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_JOB_SPEC_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_JOB_SPEC_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/layout.h"

namespace ballast {

// The most micro-steps that any step may have, whatever the job allows.
inline constexpr uint32_t kMaxMicroSteps = 1 << 16;
// The most attempts of a rank at one step, the last of which cannot be discarded.
inline constexpr uint32_t kMaxAttempts = 1 << 12;
inline constexpr size_t kMaxJobNameBytes = 128;
inline constexpr size_t kMaxGroupNameBytes = 256;

// What happens to a parameter that no rank gave a gradient in any micro-step of a step.
enum class UnusedPolicy : uint8_t {
  kError,  // The seal is refused and names it.
  kSkip,   // Its state and update count stay as they are, as in torch.
  kZero,   // It is updated with a gradient of zero, as in ZeRO.
};

// When chunks are updated; the bits are the same.
enum class UpdateMode : uint8_t {
  kWait,       // After the decision.
  kSpeculate,  // When a chunk's final contribution is in, into a second version, as if nothing were
               // clipped or unused; the decision publishes it, or it is computed again.
};

// What becomes of a step that all ranks have begun and that cannot be kept: a rank was replaced, or
// an operator aborts it. A step that some rank has not begun is always done again.
enum class OnAbort : uint8_t {
  kRedo,  // Every rank reads the committed weights and does the step again.
  kSkip,  // It is decided as a skip, with its reason, on all ranks: for trainers that cannot.
};

struct GroupSpec {
  std::string name;  // Unique in the job, not empty.
  HyperParameters hyper_parameters;
  DType wire_dtype = DType::kBFloat16;    // Of gradients on their way to the service.
  DType return_dtype = DType::kBFloat16;  // Of weights on their way back.

  bool operator==(const GroupSpec&) const = default;
};

struct JobSpec {
  std::string name;  // [A-Za-z0-9._-]{1,128}, not beginning with '.': it becomes a directory name.
  std::vector<GroupSpec> groups;
  LayoutSpec layout;  // group_count equals groups.size().
  UnusedPolicy unused_policy = UnusedPolicy::kError;
  // The most micro-steps that a step may have; 0: kMaxMicroSteps. With 1 no accumulators are
  // allocated.
  uint32_t max_micro_steps = 0;
  // kSpeculate asks for memory for second versions; where there is none, the job waits.
  UpdateMode update_mode = UpdateMode::kWait;
  OnAbort on_abort = OnAbort::kRedo;
  // The state before the last committed step is kept, so that the step can be undone; costs memory
  // for one more version of all state.
  bool keep_previous = false;

  bool operator==(const JobSpec&) const = default;

  uint32_t most_micro_steps() const {
    return max_micro_steps == 0 ? kMaxMicroSteps : std::min(max_micro_steps, kMaxMicroSteps);
  }
};

// Where a new job begins, next to its first weights: the step that it is at, and how often each
// parameter has been updated. Step 0: nothing was, update_counts is empty and moments are zeros. A
// later one: the first weights come with their moments.
struct FirstState {
  uint64_t step = 0;
  std::vector<int64_t> update_counts;  // By parameter, at most `step`; 0 for a frozen one.
};
// That the words in which a job's chunks are kept can say.
inline constexpr uint64_t kMaxFirstStep = uint64_t{1} << 31;

inline constexpr size_t kJobUidCharacters = 32;  // 128 random bits in hex.
inline constexpr size_t kMostAncestors = 64;     // That a derived job names.

// What a new job goes on from, if any: parameters of the same name and shape keep their weights,
// moments and update counts, others come with first weights, and the step goes on.
struct Derivation {
  // The job of the same name, whose place the new one takes once it has all its weights. Empty: there
  // is none.
  std::string uid;
  // Where the state comes from instead of that job: a checkpoint, or a folder of them. Empty: from it.
  std::string checkpoint;

  bool is_from_nothing() const { return uid.empty() && checkpoint.empty(); }
  bool operator==(const Derivation&) const = default;
};

// What the state of a parameter consists of, fp32.
enum class Plane : uint8_t { kMaster, kExpAvg, kExpAvgSq, kMaxExpAvgSq };
inline constexpr int kMaxPlanes = 4;
// "master", "exp_avg", ...
inline constexpr std::array<absl::string_view, kMaxPlanes> kPlaneNames = {
    "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
inline absl::string_view Name(Plane plane) { return kPlaneNames[static_cast<int>(plane)]; }

// Planes of parameters that are written between two steps, in place of what a step has left there.
// The step's number and the generation stay.
struct StateWrite {
  uint64_t step = 0;  // The committed step that it follows.
  // Counts the ranks' writes of a job, from 1. A rank whose answer was lost brings it again.
  uint64_t number = 0;
  std::vector<Plane> planes;    // Ascending. None: the update counts alone.
  std::vector<int> parameters;  // Ascending, at least one.
  // Of each of those, 0 to `step`. Empty: they stay.
  std::vector<int64_t> update_counts;

  bool operator==(const StateWrite&) const = default;
};

// 1 to 128 letters, digits, '.', '_' or '-', beginning without '.': so it can also name a folder.
bool IsJobName(absl::string_view name);
// INVALID_ARGUMENT unless IsJobName.
absl::Status CheckJobName(absl::string_view name);

// INVALID_ARGUMENT for what Layout::Create does not check: names, hyper-parameters.
absl::Status Validate(const JobSpec& spec);
absl::Status Validate(const FirstState& state, const JobSpec& spec);
absl::Status Validate(const StateWrite& write, const JobSpec& spec);
// "exp_avg and exp_avg_sq of h.0.w and 3 more".
std::string WhatIsWritten(const StateWrite& write, const JobSpec& spec);
// The chunks that hold elements of what is written, ascending.
std::vector<int> ChunksOf(const StateWrite& write, const Layout& layout);

// Empty if the two describe the same training, else one line naming the first difference, `a`
// first. Hyper-parameters may differ: they change during a run. So may the update mode: it changes
// no bit.
std::string FirstDifference(const JobSpec& a, const JobSpec& b);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_JOB_SPEC_H_
