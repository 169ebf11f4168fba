// Update rules: the formula of each, with its hyper-parameters, its planes and its bounds, is a row
// of one table. Everything else goes over the table.
//
// A rule lies in common/rules/: the formula in the order of operations that counts, and its scalar
// reference. kernels/ has the vector version, with the same bits.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULE_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/plane.h"
#include "cpu_optimizer_service/common/state_bounds.h"

namespace ballast {

// Most rules update an element by its own gradient alone, in one round. A rule of two rounds needs the
// whole matrix in between: its first round updates the state, of which with the gradient a direction
// is made, and its second round takes what became of that, in place of a gradient.
enum class Round : uint8_t { kFirst, kSecond };

// `elements` consecutive elements with equal update counts. Sources and destinations are the same
// arrays (in place) or do not overlap. One exception: the shard may replace a gradient of its
// element size. Pointers need only their element type's alignment.
struct RuleRun {
  int64_t elements = 0;
  const void* gradient = nullptr;  // of gradient_dtype
  DType gradient_dtype = DType::kFloat32;
  // By a plane's place; null for places that the group does not have.
  std::array<const float*, kMaxPlanes> from = {};
  std::array<float*, kMaxPlanes> to = {};
  void* shard = nullptr;  // of shard_dtype; null: not wanted
  DType shard_dtype = DType::kBFloat16;
  const HyperParameters* values = nullptr;
  int64_t update_count = 1;  // The number of this update for these elements, from 1.
  float multiplier = 1;      // The group's in the decision (gradient_norm.h).
  Round round = Round::kFirst;
};

struct RuleRow {
  absl::string_view name;   // "sgd": in files, flags and messages.
  absl::string_view title;  // "SGD": for people.
  // The fields of HyperParameters that it has.
  absl::Span<const absl::string_view> hyper_parameters;
  HyperParameters defaults;
  PlaneList (*planes)(const HyperParameters& values);
  // INVALID_ARGUMENT, with the first value's name.
  absl::Status (*validate)(const HyperParameters& values);
  // Without an overflow, the bounds after an update of elements within `before`, for any update
  // count, and of elements that do not change. All unknown if a value of the formula might overflow.
  // `gradient` is a bound of the scaled gradient.
  StateBounds (*bounds_after)(const StateBounds& before, const HyperParameters& values,
                              double gradient);
  // The specification, one element at a time. The vector version is UpdateByRule in kernels.h.
  void (*reference)(const RuleRun& run);
  int rounds = 1;

  bool has(absl::string_view hyper_parameter) const {
    return std::ranges::find(hyper_parameters, hyper_parameter) != hyper_parameters.end();
  }
};

// All rules, by their number.
absl::Span<const RuleRow> Rules();
const RuleRow& RowOf(Rule rule);
std::optional<Rule> FindRule(absl::string_view name);
std::string RuleNames();  // "adam, sgd, ...".
inline HyperParameters DefaultsOf(Rule rule) { return RowOf(rule).defaults; }
inline bool HasTwoRounds(Rule rule) { return RowOf(rule).rounds == 2; }

// As ForEachHyperParameter, for the rule's fields.
template <typename Each, typename... Values>
void ForEachOf(Rule rule, Each&& each, Values&... values) {
  const RuleRow& row = RowOf(rule);
  ForEachHyperParameter(
      [&](const char* name, auto&... fields) {
        if (row.has(name)) each(name, fields...);
      },
      values...);
}

// INVALID_ARGUMENT, with the first value's name, if torch would refuse it too, or if it does not
// fit fp32.
absl::Status Validate(const HyperParameters& values);
// The same of `values` after the changes. Also if a change is of a hyper-parameter that the rule
// does not have, or one that decides which planes there are.
absl::Status ValidateChanges(const HyperParameters& values, const HyperParameterOverrides& changes);

// INVALID_ARGUMENT: the rule, or one of its options, has no state in that format. A moment in bf16 is
// rounded to nearest. So Adam's beta2 is at most kMostBeta2OfBFloat16, and what another moment is
// multiplied by at most kMostBetaOfBFloat16: of more an update changes it by less than half a step, and
// it stays where it is.
inline constexpr double kMostBeta2OfBFloat16 = 0.98;
inline constexpr double kMostBetaOfBFloat16 = 0.99;
absl::Status CheckStateFormat(const HyperParameters& values, StateFormat format);

// The planes of a group, ascending.
PlaneList PlanesOf(const HyperParameters& values);
inline bool HasPlane(const HyperParameters& values, Plane plane) {
  return std::ranges::count(PlanesOf(values), plane) > 0;
}
// What a plane other than the master weights holds before the first update.
inline float InitialValue(const HyperParameters& values, Plane plane) {
  return plane == Plane::kSum ? static_cast<float>(values.initial_accumulator_value) : 0.0f;
}
// "master, exp_avg, exp_avg_sq".
std::string NamesOf(PlaneList planes);

// `sum_of_squares` is that of the group's gradient as received (gradient_norm.h).
StateBounds BoundsAfter(const StateBounds& before, const HyperParameters& values,
                        double sum_of_squares, float multiplier);

inline void UpdateReference(const RuleRun& run) { RowOf(run.values->rule).reference(run); }

// Why state with the values `a` does not fit one with `b`: "the rule of group w is sgd here and lion
// there". Empty: their rules and planes are the same. `what`: "group w".
std::string DifferenceOfPlanes(absl::string_view what, const HyperParameters& a,
                               const HyperParameters& b);

// "AdamW", "SGD": which optimizer of torch these are.
absl::string_view TitleOf(const HyperParameters& values);
// "adam lr=0.001 beta1=0.9 ...", every field of the rule, shortest digits that read back the same.
std::string ToString(const HyperParameters& values);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULE_H_
