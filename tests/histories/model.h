// What should happen, in plain scalar code: the references of cpu_optimizer_service/common/ and
// nothing else of the service. It knows no ranks, chunks, threads, streams or modes, because no
// result depends on them.
//
// Thread-compatible.
#ifndef BALLAST_TESTS_HISTORIES_MODEL_H_
#define BALLAST_TESTS_HISTORIES_MODEL_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/plane.h"
#include "tests/histories/history.h"

namespace ballast::histories {

struct ParameterState {
  std::map<Plane, std::vector<float>> planes;  // Those of its group.
  int64_t updates = 0;
};

// What a checkpoint keeps.
struct ModelState {
  uint64_t committed_step = 0;
  std::vector<ParameterState> parameters;  // By index; of frozen ones nothing.
  std::vector<HyperParameters> in_force;   // By group.
  // Of the last committed step: what the trainer wants to find again.
  std::string trainer_state;
  bool last_step_applied = true;
};

// What a decided step says of itself.
struct ModelOutcome {
  Decision decision;
  std::vector<std::string> unused_parameters;
  std::string culprit;  // The parameter that the reason for skipping names; empty: none.
  bool abandoned = false;
  bool given_up = false;  // The step could not be kept; false: it was decided by votes.
  std::vector<HyperParameters> hyper_parameters;  // As used.
};

// What the refusal of a seal says.
struct ModelRefusal {
  absl::string_view reason = {};            // Empty: any.
  std::string parameter = {};               // The first that it names; empty: any.
  std::optional<uint32_t> micro_step = {};  // Of the rank that seals; nullopt: any.
};

class Model {
 public:
  explicit Model(const JobPlan& job);

  StateFormat format(const ParameterPlan& parameter) const { return formats_.at(parameter.id); }
  const ModelState& state() const { return state_; }
  uint64_t applied_steps() const { return applied_steps_; }
  uint64_t skipped_steps() const { return skipped_steps_; }

  // set-group: in force from the next Begin on, and after the overrides of the step in progress.
  void ChangeGroup(int group, const HyperParameterOverrides& changes);
  // The first rank begins a step. Forgets an attempt before it.
  void Begin(const Attempt& attempt);
  // Why no seal can make this attempt whole; nullopt: one can.
  std::optional<ModelRefusal> Refusal(const Attempt& attempt) const;
  // Why this rank's seal can not be taken: one of its first `micro_steps` backwards reached
  // nothing.
  std::optional<ModelRefusal> Refusal(const Attempt& attempt, int rank, uint32_t micro_steps) const;
  // All ranks have sealed a whole step. variant: of O (VaryOrthogonal).
  ModelOutcome Commit(const Attempt& attempt, int variant = 0);
  // What the ranks are told before they vote.
  double Norm(const Attempt& attempt) const;
  std::vector<double> GroupNorms(const Attempt& attempt) const;
  // The step cannot be kept, and is skipped.
  ModelOutcome GiveUp(const Attempt& attempt);
  // A checkpoint's.
  void Load(const ModelState& state) {
    state_ = state;
    previous_.reset();
  }
  // The ranks write what WriteOf says.
  void Write(const Attempt& attempt);
  // What LeftOutOf says begins anew.
  void Derive(const Attempt& attempt);
  // The last committed step, if it can be undone.
  std::optional<uint64_t> undoable_step() const;
  // Undoes it.
  void Undo();

 private:
  // As what is stored of them, in the parameter's format.
  void Settle(const ParameterPlan& parameter, ParameterState& state) const;
  // All planes but the master weights, as before the first update.
  void ForgetMoments(const ParameterPlan& parameter, ParameterState& state) const;
  bool IsUnused(const Attempt& attempt, int parameter) const;
  // The sums over the segments, by parameter.
  std::vector<std::vector<float>> SumGradients(const Attempt& attempt) const;
  std::vector<double> GroupSums(const std::vector<std::vector<float>>& gradients) const;
  // In force from the next step on, once this one is over.
  void EndStep(const Attempt& attempt, bool voted);
  std::string Culprit(const std::vector<std::vector<float>>& gradients) const;
  // The first parameter with state that is not finite; empty: there is none.
  std::string Overflowed(const std::vector<ParameterState>& parameters) const;
  void Update(const ParameterPlan& parameter, ParameterState& state,
              const std::vector<float>& gradient, const HyperParameters& values, float multiplier,
              int variant) const;

  // Of packed state. false: it would not be finite.
  bool UpdatePacked(const ParameterPlan& parameter, ParameterState& state, RuleRun run) const;

  const JobPlan job_;
  std::map<int, StateFormat> formats_;  // By parameter's id.
  ModelState state_;
  std::optional<ModelState> previous_;                  // Before the last committed step.
  std::vector<HyperParameters> terms_;                  // Of the step in progress.
  std::vector<HyperParameterOverrides> later_changes_;  // By group.
  bool in_step_ = false;
  uint64_t applied_steps_ = 0;
  uint64_t skipped_steps_ = 0;
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_MODEL_H_
