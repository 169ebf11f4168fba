#include "cpu_optimizer_service/common/job_spec.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

absl::string_view Name(UnusedPolicy policy) {
  switch (policy) {
    case UnusedPolicy::kError:
      return "error";
    case UnusedPolicy::kSkip:
      return "skip";
    case UnusedPolicy::kZero:
      return "zero";
  }
  return "unknown";
}

absl::string_view Name(OnAbort on_abort) { return on_abort == OnAbort::kSkip ? "skip" : "redo"; }

template <typename T>
bool IsAscending(const std::vector<T>& values) {
  return std::adjacent_find(values.begin(), values.end(), std::greater_equal<T>()) == values.end();
}

absl::Status CheckMembers(const JobSpec& spec) {
  if (spec.members.size() > kMaxMembers) {
    return absl::InvalidArgumentError(absl::StrCat("job ", spec.name, " has ", spec.members.size(),
                                                   " members; expected at most ", kMaxMembers));
  }
  // The layout has not been checked yet.
  const size_t homes = spec.members.empty() ? 0 : std::max(0, spec.layout.world_size);
  if (spec.homes.size() != homes) {
    return absl::InvalidArgumentError(absl::StrCat("job ", spec.name, " names the homes of ",
                                                   spec.homes.size(), " ranks; expected ", homes));
  }
  std::vector<bool> is_home(spec.members.size(), false);
  for (int rank = 0; rank < static_cast<int>(homes); ++rank) {
    const int home = spec.homes[rank];
    if (home < 0 || home >= static_cast<int>(spec.members.size())) {
      return absl::InvalidArgumentError(absl::StrCat("the home of rank ", rank, " is member ", home,
                                                     "; expected 0 to ", spec.members.size() - 1));
    }
    is_home[home] = true;
  }
  std::set<absl::string_view> addresses;
  for (size_t member = 0; member < spec.members.size(); ++member) {
    const std::string& address = spec.members[member].address;
    if (address.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("member ", member, " has no address"));
    }
    if (address.size() > kMaxAddressBytes) {
      return absl::InvalidArgumentError(absl::StrCat("the address of member ", member, " has ",
                                                     address.size(), " bytes; expected at most ",
                                                     kMaxAddressBytes));
    }
    if (!addresses.insert(address).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("two members have the address ", address, "; name each once"));
    }
    if (!is_home[member]) {
      return absl::InvalidArgumentError(
          absl::StrCat("member ", address, " is the home of no rank; leave it out"));
    }
  }
  return absl::OkStatus();
}

// A rule of two rounds takes whole matrices.
absl::Status CheckMatrices(const JobSpec& spec) {
  for (const ParameterSpec& parameter : spec.layout.parameters) {
    const auto groups = static_cast<int>(spec.groups.size());
    // Layout::Create refuses a group that does not exist.
    if (!parameter.trainable || parameter.group < 0 || parameter.group >= groups) continue;
    const GroupSpec& group = spec.groups[parameter.group];
    const RuleRow& row = RowOf(group.hyper_parameters.rule);
    if (!HasTwoRounds(group.hyper_parameters.rule)) continue;
    if (parameter.shape.size() != 2) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rule ", row.name, " of group ", group.name, " takes matrices, but ", parameter.name,
          " has ", parameter.shape.size(), " dimensions; put it into a group of another rule"));
    }
    if (spec.member_count() > 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rule ", row.name, " of group ", group.name, " needs whole matrices in one service, but ",
          spec.member_count(), " hold the job; use one service"));
    }
  }
  return absl::OkStatus();
}

std::string Differ(absl::string_view what, const auto& x, const auto& y) {
  return absl::StrCat(what, " is ", x, " here and ", y, " there");
}

// Of jobs with as many ranks.
std::string FirstDifferenceOfMembers(const JobSpec& a, const JobSpec& b) {
  if (a.members.size() != b.members.size()) {
    return Differ("the number of members", a.members.size(), b.members.size());
  }
  for (size_t i = 0; i < a.members.size(); ++i) {
    if (a.members[i] != b.members[i]) {
      return Differ(absl::StrCat("the address of member ", i), a.members[i].address,
                    b.members[i].address);
    }
  }
  for (size_t rank = 0; rank < std::min(a.homes.size(), b.homes.size()); ++rank) {
    if (a.homes[rank] != b.homes[rank]) {
      return Differ(absl::StrCat("the home of rank ", rank), a.homes[rank], b.homes[rank]);
    }
  }
  if (a.homes.size() == b.homes.size()) return "";
  return Differ("the number of homes", a.homes.size(), b.homes.size());
}

}  // namespace

bool IsJobName(absl::string_view name) {
  // The byte is taken as unsigned: std::isalnum must not get a negative number, which a char of
  // UTF-8 may be.
  const auto allowed = [](unsigned char c) {
    return std::isalnum(c) || c == '.' || c == '_' || c == '-';
  };
  return !name.empty() && name.size() <= kMaxJobNameBytes && name[0] != '.' &&
         std::all_of(name.begin(), name.end(), allowed);
}

absl::Status CheckJobName(absl::string_view name) {
  if (IsJobName(name)) return absl::OkStatus();
  // A name that came over the wire may be megabytes long. The message quotes only its beginning.
  return absl::InvalidArgumentError(
      absl::StrCat("job name '", name.substr(0, kMaxJobNameBytes),
                   "' is not 1 to 128 letters, digits, '.', '_' or '-', beginning without '.'"));
}

absl::Status Validate(const JobSpec& spec) {
  BALLAST_RETURN_IF_ERROR(CheckJobName(spec.name));
  if (spec.layout.group_count != static_cast<int>(spec.groups.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("the layout's group_count is ", spec.layout.group_count, ", but ",
                     spec.groups.size(), " groups are described; set it to their number"));
  }
  BALLAST_RETURN_IF_ERROR(CheckMembers(spec));
  std::set<absl::string_view> names;
  for (const GroupSpec& group : spec.groups) {
    if (group.name.empty() || group.name.find('/') != std::string::npos) {
      return absl::InvalidArgumentError(absl::StrCat(
          "group name '", group.name.substr(0, kMaxGroupNameBytes), "' is empty or holds a '/'"));
    }
    if (group.name.size() > kMaxGroupNameBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("group name '", group.name.substr(0, 64), "...' has ", group.name.size(),
                       " bytes; expected at most ", kMaxGroupNameBytes));
    }
    if (!names.insert(group.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("two groups are named ", group.name, "; names must differ"));
    }
    BALLAST_RETURN_IF_ERROR(
        Annotate(Validate(group.hyper_parameters), absl::StrCat("group ", group.name)));
  }
  for (int group = 0; group < spec.layout.group_count; ++group) {
    BALLAST_RETURN_IF_ERROR(Annotate(
        CheckStateFormat(spec.groups[group].hyper_parameters, spec.layout.state(group).format),
        absl::StrCat("group ", spec.groups[group].name)));
  }
  return CheckMatrices(spec);
}

absl::Status ValidateChanges(const JobSpec& spec, int group, const HyperParameters& now,
                             const HyperParameterOverrides& changes) {
  absl::Status status = ValidateChanges(now, changes);
  status.Update(CheckStateFormat(Apply(now, changes), spec.layout.state(group).format));
  return Annotate(status, absl::StrCat("group ", spec.groups[group].name));
}

absl::string_view Name(Orthogonalizer newton_schulz) {
  return newton_schulz == Orthogonalizer::kWorkers ? "workers" : "service";
}

std::vector<int> JobSpec::RanksOf(int member) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < layout.world_size; ++rank) {
    if (home(rank) == member) ranks.push_back(rank);
  }
  return ranks;
}

absl::Status Validate(const FirstState& state, const JobSpec& spec) {
  const std::vector<ParameterSpec>& parameters = spec.layout.parameters;
  const size_t expected = state.step == 0 ? 0 : parameters.size();
  if (state.step > kMaxFirstStep || state.update_counts.size() != expected) {
    return absl::InvalidArgumentError(
        absl::StrCat("the first state of job ", spec.name, " is of step ", state.step, " (at most ",
                     kMaxFirstStep, ") with ", state.update_counts.size(),
                     " update counts; expected ", expected, " counts"));
  }
  for (size_t p = 0; p < expected; ++p) {
    const int64_t count = state.update_counts[p];
    // One step updates a parameter at most once, and a frozen one never.
    const auto most = static_cast<int64_t>(parameters[p].trainable ? state.step : 0);
    if (count >= 0 && count <= most) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "the first state of job ", spec.name, " has ", count, " updates of ", parameters[p].name,
        parameters[p].trainable ? "" : ", which is frozen", "; expected 0 to ", most));
  }
  return absl::OkStatus();
}

absl::Status Validate(const StateWrite& write, const JobSpec& spec) {
  const std::vector<ParameterSpec>& parameters = spec.layout.parameters;
  const auto wrong = [&](const auto&... why) {
    return absl::InvalidArgumentError(
        absl::StrCat("a state write of job ", spec.name, " ", why...));
  };
  if (write.parameters.empty() || (write.planes.empty() && write.update_counts.empty())) {
    return wrong("names no parameter, or neither planes nor update counts");
  }
  if (!IsAscending(write.parameters) || !IsAscending(write.planes)) {
    return wrong("names parameters or planes that are not in ascending order");
  }
  if (write.parameters.front() < 0 ||
      write.parameters.back() >= static_cast<int>(parameters.size())) {
    return wrong("names parameter ", write.parameters.back(), ", but the job has ",
                 parameters.size());
  }
  if (!write.update_counts.empty() && write.update_counts.size() != write.parameters.size()) {
    return wrong("has ", write.update_counts.size(), " update counts for ", write.parameters.size(),
                 " parameters");
  }
  for (size_t i = 0; i < write.parameters.size(); ++i) {
    const ParameterSpec& parameter = parameters[write.parameters[i]];
    if (!parameter.trainable) return wrong("names ", parameter.name, ", which is frozen");
    const HyperParameters& values = spec.groups[parameter.group].hyper_parameters;
    for (const Plane plane : write.planes) {
      if (HasPlane(values, plane)) continue;
      return wrong("names ", Name(plane), " of ", parameter.name, ", whose group has ",
                   NamesOf(PlanesOf(values)));
    }
    if (write.step == 0 && HoldsFirstUpdate(write)) {
      return wrong("names momentum_buffer of ", parameter.name,
                   ", which the first step sets; write it afterwards");
    }
    if (write.update_counts.empty()) continue;
    const int64_t count = write.update_counts[i];
    if (count < 0 || static_cast<uint64_t>(count) > write.step) {
      return wrong("gives ", parameter.name, " ", count, " updates; expected 0 to ", write.step,
                   " at step ", write.step);
    }
  }
  return absl::OkStatus();
}

bool HoldsFirstUpdate(const StateWrite& write) {
  return write.update_counts.empty() &&
         std::ranges::count(write.planes, Plane::kMomentumBuffer) > 0;
}

std::string WhatIsWritten(const StateWrite& write, const JobSpec& spec) {
  std::string text = write.planes.empty()
                         ? "the update count"
                         : absl::StrJoin(write.planes, " and ", [](std::string* out, Plane plane) {
                             absl::StrAppend(out, Name(plane));
                           });
  absl::StrAppend(&text, " of ", spec.layout.parameters[write.parameters.front()].name);
  const size_t more = write.parameters.size() - 1;
  if (more > 0) absl::StrAppend(&text, " and ", more, " more");
  return text;
}

std::vector<int> ChunksOf(const StateWrite& write, const Layout& layout) {
  std::vector<int> chunks;
  if (write.planes.empty()) return chunks;
  for (const int parameter : write.parameters) {
    const std::vector<int> of_parameter = layout.ChunksOfParameter(parameter);
    chunks.insert(chunks.end(), of_parameter.begin(), of_parameter.end());
  }
  std::sort(chunks.begin(), chunks.end());
  chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
  return chunks;
}

bool AreValuesOf(const JobSpec& spec, const std::vector<HyperParameters>& values) {
  return std::ranges::equal(
      values, spec.groups, [](const HyperParameters& each, const GroupSpec& group) {
        const HyperParameters& of_group = group.hyper_parameters;
        return each.rule == of_group.rule && PlanesOf(each) == PlanesOf(of_group);
      });
}

std::string FirstDifference(const JobSpec& a, const JobSpec& b) {
  if (a.groups.size() != b.groups.size()) {
    return Differ("the number of groups", a.groups.size(), b.groups.size());
  }
  for (size_t i = 0; i < a.groups.size(); ++i) {
    const GroupSpec& p = a.groups[i];
    const GroupSpec& q = b.groups[i];
    if (p.name != q.name) return Differ(absl::StrCat("the name of group ", i), p.name, q.name);
    // Both ends compute the sizes of payloads, and the places in shared memory, from the two
    // formats.
    if (p.wire_dtype != q.wire_dtype) {
      return Differ(absl::StrCat("wire_dtype of group ", p.name), Name(p.wire_dtype),
                    Name(q.wire_dtype));
    }
    if (p.return_dtype != q.return_dtype) {
      return Differ(absl::StrCat("return_dtype of group ", p.name), Name(p.return_dtype),
                    Name(q.return_dtype));
    }
  }
  for (size_t i = 0; i < a.groups.size(); ++i) {
    const GroupSpec& p = a.groups[i];
    const GroupSpec& q = b.groups[i];
    // Between Adam and AdamW a group may change during a run. They are compared all the same, since
    // they say which optimizer the trainer means.
    if (TitleOf(p.hyper_parameters) != TitleOf(q.hyper_parameters)) {
      return Differ(absl::StrCat("the optimizer of group ", p.name), TitleOf(p.hyper_parameters),
                    TitleOf(q.hyper_parameters));
    }
    const std::string planes =
        DifferenceOfPlanes(absl::StrCat("group ", p.name), p.hyper_parameters, q.hyper_parameters);
    if (!planes.empty()) return planes;
    // Like the planes it cannot change.
    if (p.hyper_parameters.initial_accumulator_value !=
        q.hyper_parameters.initial_accumulator_value) {
      return Differ(absl::StrCat("initial_accumulator_value of group ", p.name),
                    p.hyper_parameters.initial_accumulator_value,
                    q.hyper_parameters.initial_accumulator_value);
    }
  }
  if (a.unused_policy != b.unused_policy) {
    return Differ("unused_policy", Name(a.unused_policy), Name(b.unused_policy));
  }
  if (a.max_micro_steps != b.max_micro_steps) {
    return Differ("max_micro_steps", a.max_micro_steps, b.max_micro_steps);
  }
  if (a.on_abort != b.on_abort) return Differ("on_abort", Name(a.on_abort), Name(b.on_abort));
  if (a.newton_schulz != b.newton_schulz) {
    return Differ("newton_schulz", Name(a.newton_schulz), Name(b.newton_schulz));
  }
  if (a.keep_previous != b.keep_previous) {
    return Differ("keep_previous", a.keep_previous, b.keep_previous);
  }
  const std::string of_layouts = FirstDifference(a.layout, b.layout);
  return of_layouts.empty() ? FirstDifferenceOfMembers(a, b) : of_layouts;
}

}  // namespace ballast
