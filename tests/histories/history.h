// A history: a small training run with all that goes wrong in it, as plain data. It is made from a
// seed (generate.h), played against the engine or through client sessions (engine_player.h,
// session_player.h), compared with a model (model.h), and made smaller when it fails (shrink.h).
//
// Everything in it keeps its meaning when something else is taken away: parameters have ids that
// their values depend on, positions are fractions, and what does not apply is passed over.
#ifndef BALLAST_TESTS_HISTORIES_HISTORY_H_
#define BALLAST_TESTS_HISTORIES_HISTORY_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/step_settings.h"

namespace ballast::histories {

struct ParameterPlan {
  int id = 0;  // What its weights and gradients depend on.
  int64_t elements = 0;
  int group = 0;
  bool trainable = true;
};

struct GroupPlan {
  HyperParameters hyper_parameters;
  DType wire_dtype = DType::kBFloat16;
  DType return_dtype = DType::kBFloat16;
  StateSpec state = {};
};

// How parameters are given to ranks.
enum class ShardingPlan : uint8_t {
  kBuckets,
  kRows,            // Shard(0).
  kColumns,         // Shard(1).
  kReplicas,        // Replicate over two, if the world is even, and Shard(0) over the others.
  kRowsAndColumns,  // Shard(0) over two, if the world is even, and Shard(1) over the others.
};
inline constexpr int kShardingPlans = static_cast<int>(ShardingPlan::kRowsAndColumns) + 1;

struct JobPlan {
  int world_size = 1;
  ShardingPlan sharding = ShardingPlan::kBuckets;
  int threads = 1;  // Of the engine.
  int64_t bucket_elements = 1024;
  int64_t chunk_elements = 256;
  OnAbort on_abort = OnAbort::kRedo;
  Orthogonalizer newton_schulz = Orthogonalizer::kService;
  bool keep_previous = false;
  UnusedPolicy unused_policy = UnusedPolicy::kError;
  uint32_t max_micro_steps = 0;
  UpdateMode update_mode = UpdateMode::kWait;
  std::vector<GroupPlan> groups;
  std::vector<ParameterPlan> parameters;
  // Of Layer::kMembers; of other layers 0. Those that are no rank's home are left out.
  int members = 0;
  std::vector<int> homes;   // By rank, modulo members.
  int victim = 0;           // The home of this rank is the one that may die.
  uint64_t links_seed = 0;  // In which order words arrive.
};

enum class EventKind : uint8_t {
  kRepeat,         // A call is made twice, the second time `pick` calls later.
  kCut,            // The rank's stream breaks, and is opened again at once.
  kAway,           // The rank's stream breaks after its seal, and is opened again after the commit.
  kLate,           // The rank's messages are held back until the other ranks have sealed.
  kWithhold,       // Some of a chunk is sent only after a seal has been refused for it.
  kGap,            // A contribution that skips a micro-step.
  kOverlap,        // A contribution that covers an old micro-step and a new one.
  kForeignChunk,   // A contribution to a chunk of another rank.
  kWrongSize,      // A contribution that is one byte short.
  kWrongStep,      // A contribution to the step before or after.
  kEarlySeal,      // A seal before everything has been sent.
  kSealTakenBack,  // A seal of another number after one that was taken, and then the first again.
  kOtherSettings,  // A rank begins with another loss scale than those before, and then with theirs.
  kOperator,       // set-group.
  kSnapshot,       // Taken here and kept, while updates go on.
  kReadShards,     // The committed weights are read.
  kSave,
  kTellWaiting,
  kGhost,      // A stream of an older generation speaks.
  kDiscard,    // A rank takes back what it gave and tries again; so do the others, once they know.
  kEarlyVote,  // A rank votes before the norm is known.
  kBadVote,    // A rank votes what can never be.
  kOtherVote,  // A rank votes otherwise than the others, until all are told to vote again.
  kLinkCut,    // The link of the rank's home is cut (LinkCut), or that of another member.
  // The service dies at the (1 + `pick` % 16)th store that a later process could see; one time in
  // eight the one after it, too, while it takes over. One time in four, in the first weights, in a
  // write of state, or while the job is derived.
  kDeath,
};
inline constexpr int kEventKinds = static_cast<int>(EventKind::kOtherVote) + 1;  // Without deaths.

// Where in an attempt: the call at position `at` of kPositions.
inline constexpr int kPositions = 1000;

struct Event {
  EventKind kind = EventKind::kRepeat;
  int at = 0;
  int rank = 0;
  int pick = 0;
  HyperParameterOverrides changes;  // kOperator, of group `pick`.
};

// A gradient value that is not finite.
struct Poison {
  int parameter = 0;  // Its id.
  int64_t element = 0;
  int segment = 0;
  float value = 0;
  bool told = false;  // A worker found it before reducing, and says so.
};

// How an attempt at a step ends.
enum class End : uint8_t {
  kCommit,
  kAbort,            // abort-step at `end_at`.
  kAbortAtDecision,  // abort-step just after the last seal: either it or the decision comes first.
  kReplace,          // Another process takes rank `end_rank` at `end_at`.
  kRestart,          // The same, after the stream of the old one has ended.
  kLoad,             // The last save is loaded at `end_at`.
  kUndo,             // Aborted at `end_at`, and then the step before is undone, too.
};

// What makes a step that no seal can make whole.
enum class Spoil : uint8_t {
  kNone,
  kPadding,     // A gradient in the padding.
  kUndeclared,  // A parameter with a gradient that nobody says was used.
  kSentEmpty,   // A parameter said to be used, and a chunk of it sent as empty.
};

// One try at the next step.
struct Attempt {
  GradientScale scale;
  std::map<int, HyperParameterOverrides> overrides;
  // What the ranks vote; and whether they say so of clipping when they begin.
  StepVote vote;
  bool expects_clipping = true;
  // The ranks that look at the norm before they vote, as bits; the others vote with their seals.
  uint32_t looks = 0;
  // In how many tries the first rank that looks discards the attempt for what it sees.
  uint32_t spikes = 0;
  // Gradients are never said to be final, and may_guess it now and then, rightly or not.
  bool may_guess = false;
  uint32_t micro_steps = 1;
  // By group: the ends of the ranges of micro-steps that its contributions cover. {1, 2, 3}: summed
  // in the service; {3}: summed on the workers.
  std::vector<std::vector<uint32_t>> segments;
  // By parameter id, by micro-step: the ranks on which it received a gradient, as bits.
  std::map<int, std::vector<uint32_t>> used;
  uint64_t gradient_seed = 0;
  float gradient_size = 1;
  std::vector<Poison> poisons;
  uint64_t order_seed = 0;  // How the calls of the ranks interleave; 0: one rank after the other.
  std::vector<Event> events;
  uint64_t write_seed = 0;  // What of the state is written before it (WriteOf); 0: nothing.
  // Before it the job is derived twice: without some parameters (LeftOutOf), and with all; 0: not.
  uint64_t derive_seed = 0;
  uint64_t round_seed =
      0;  // What goes wrong while ranks give O (engine_directions.cc); 0: nothing.
  Spoil spoil = Spoil::kNone;
  End end = End::kCommit;
  int end_at = 0;
  int end_rank = 0;
};

enum class Layer : uint8_t {
  kEngine,
  kSession,
  kMembers,  // Sessions, and a service of several members.
};

struct History {
  uint64_t seed = 0;
  Layer layer = Layer::kEngine;
  JobPlan job;
  std::vector<Attempt> attempts;
};

// Whether the service dies in it.
bool HasDeath(const History& history);

JobSpec SpecOf(const JobPlan& job, const std::string& name);
// With a mesh, or a rule that needs them, parameters are matrices, tall or wide. The shorter side
// divides their elements, and is 16 at most.
std::vector<int64_t> ShapeOf(const JobPlan& job, const ParameterPlan& parameter);
std::string NameOf(const ParameterPlan& parameter);

// What the ranks give in their try of this number, from 0, in an attempt in which they discard:
// other gradients than in the tries before, with other settings.
Attempt TryOf(const Attempt& attempt, uint32_t number);

std::string TrainerState(const Attempt& attempt);
inline bool Looks(const Attempt& attempt, int rank) { return (attempt.looks >> rank & 1) != 0; }

// What the ranks write of a job at this step before the attempt. Of no parameters: nothing.
StateWrite WriteOf(const JobPlan& job, const Attempt& attempt, uint64_t step);
float WrittenValue(const Attempt& attempt, Plane plane, const ParameterPlan& parameter,
                   int64_t element);
// What of a job is left out once, by index; and what it begins with when it comes again.
std::vector<int> LeftOutOf(const JobPlan& job, const Attempt& attempt);
float WeightAfterwards(const Attempt& attempt, const ParameterPlan& parameter, int64_t element);
float FirstWeight(const ParameterPlan& parameter, int64_t element);
// Whether the parameter received a gradient on some rank in micro-steps [begin, end).
bool IsUsed(const JobPlan& job, const Attempt& attempt, int id, uint32_t begin, uint32_t end);
inline bool IsUsed(const JobPlan& job, const Attempt& attempt, int id) {
  return IsUsed(job, attempt, id, 0, attempt.micro_steps);
}
// What the ranks of a round's attempt make of O: devices differ. It has O in bf16.
void VaryOrthogonal(int variant, std::vector<uint16_t>& orthogonal);
// The gradient of a parameter, reduced over the ranks and over the micro-steps of a segment of its
// group, rounded to the wire: zeros if no rank used it in these.
std::vector<float> GradientOf(const JobPlan& job, const Attempt& attempt,
                              const ParameterPlan& parameter, int segment);
// The parameter that `attempt.spoil` spoils, or -1 if there is none to spoil.
int SpoiledParameter(const JobPlan& job, const Attempt& attempt);

// For a person to read.
std::string Describe(const History& history);

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_HISTORY_H_
