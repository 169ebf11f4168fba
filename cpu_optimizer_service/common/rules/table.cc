#include <array>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/rules/adagrad.h"
#include "cpu_optimizer_service/common/rules/adam.h"
#include "cpu_optimizer_service/common/rules/arithmetic.h"
#include "cpu_optimizer_service/common/rules/lion.h"
#include "cpu_optimizer_service/common/rules/muon.h"
#include "cpu_optimizer_service/common/rules/sgd.h"
#include "cpu_optimizer_service/common/rules/sign_sgd.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/amounts.h"

namespace ballast {
namespace {

std::string Text(double value) { return FormatExactly(value); }
std::string Text(bool value) { return value ? "true" : "false"; }
std::string Text(int32_t value) { return absl::StrCat(value); }

}  // namespace

absl::Span<const RuleRow> Rules() {
  // In the order of Rule.
  static const std::array rules = {kAdamRow, kSgdRow, kLionRow, kAdagradRow, kSignSgdRow, kMuonRow};
  return rules;
}

const RuleRow& RowOf(Rule rule) { return Rules()[static_cast<size_t>(rule)]; }

std::optional<Rule> FindRule(absl::string_view name) {
  for (const RuleRow& row : Rules()) {
    if (row.name == name) return row.defaults.rule;
  }
  return std::nullopt;
}

std::string RuleNames() {
  return absl::StrJoin(
      Rules(), ", ", [](std::string* out, const RuleRow& row) { absl::StrAppend(out, row.name); });
}

absl::Status Validate(const HyperParameters& values) { return RowOf(values.rule).validate(values); }

absl::Status ValidateChanges(const HyperParameters& values,
                             const HyperParameterOverrides& changes) {
  const RuleRow& row = RowOf(values.rule);
  absl::Status status;
  ForEachHyperParameter(
      [&](const char* name, const auto& change) {
        if (!change.has_value() || row.has(name) || !status.ok()) return;
        status = absl::InvalidArgumentError(
            absl::StrCat("rule ", row.name, " has no ", name, "; it has ",
                         absl::StrJoin(row.hyper_parameters, ", ")));
      },
      changes);
  BALLAST_RETURN_IF_ERROR(status);
  const HyperParameters after = Apply(values, changes);
  BALLAST_RETURN_IF_ERROR(Validate(after));
  if (PlanesOf(after) == PlanesOf(values)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "momentum cannot change between 0 and another value: with 0 a group has no momentum_buffer; "
      "create the job with the other kind");
}

absl::Status CheckStateFormat(const HyperParameters& values, StateFormat format) {
  const auto refuse = [&](const auto&... why) {
    return absl::InvalidArgumentError(
        absl::StrCat("state ", Name(format), " is not for ", RowOf(values.rule).name, why...));
  };
  if (format == StateFormat::kFloat32) return absl::OkStatus();
  if (HasTwoRounds(values.rule)) return refuse("; use fp32");
  if (format == StateFormat::k8Bit) {
    if (values.rule != Rule::kAdam) return refuse(", only for adam; use bf16 or fp32");
    if (values.amsgrad) return refuse(" with amsgrad; use bf16 or fp32");
    return absl::OkStatus();
  }
  const auto check = [&](absl::string_view name, double beta, double most,
                         absl::string_view others) -> absl::Status {
    if (beta <= most) return absl::OkStatus();
    return refuse(" with ", name, " ", beta, ": above ", most,
                  " its moment would not follow the gradients; use ", others);
  };
  switch (values.rule) {
    case Rule::kAdam:
      BALLAST_RETURN_IF_ERROR(check("beta1", values.beta1, kMostBetaOfBFloat16, "8bit or fp32"));
      return check("beta2", values.beta2, kMostBeta2OfBFloat16, "8bit or fp32");
    case Rule::kLion:
      return check("beta2", values.beta2, kMostBetaOfBFloat16, "fp32");
    case Rule::kSgd:
      return check("momentum", values.momentum, kMostBetaOfBFloat16, "fp32");
    default:
      return absl::OkStatus();
  }
}

PlaneList PlanesOf(const HyperParameters& values) { return RowOf(values.rule).planes(values); }

std::string NamesOf(PlaneList planes) {
  return absl::StrJoin(planes, ", ",
                       [](std::string* out, Plane plane) { absl::StrAppend(out, Name(plane)); });
}

std::string DifferenceOfPlanes(absl::string_view what, const HyperParameters& a,
                               const HyperParameters& b) {
  if (a.rule != b.rule) {
    return absl::StrCat("the rule of ", what, " is ", RowOf(a.rule).name, " here and ",
                        RowOf(b.rule).name, " there");
  }
  if (PlanesOf(a) == PlanesOf(b)) return "";
  return absl::StrCat("the planes of ", what, " are ", NamesOf(PlanesOf(a)), " here and ",
                      NamesOf(PlanesOf(b)), " there");
}

StateBounds BoundsAfter(const StateBounds& before, const HyperParameters& values,
                        double sum_of_squares, float multiplier) {
  if (!before.finite()) return {};
  // No element is larger: a sum of squares, rounded at each addition, is not below any of them.
  const double gradient = kRounding * std::sqrt(sum_of_squares) * std::fabs(multiplier);
  return RowOf(values.rule).bounds_after(before, values, gradient);
}

absl::string_view TitleOf(const HyperParameters& values) {
  if (values.rule == Rule::kAdam && values.decoupled_weight_decay) return "AdamW";
  return RowOf(values.rule).title;
}

std::string ToString(const HyperParameters& values) {
  std::string text(RowOf(values.rule).name);
  ForEachOf(
      values.rule,
      [&](const char* name, const auto& value) {
        absl::StrAppend(&text, " ", name, "=", Text(value));
      },
      values);
  return text;
}

}  // namespace ballast
