#include "cpu_optimizer_service/job/step/step_uses.h"

#include <algorithm>
#include <map>
#include <utility>

#include "cpu_optimizer_service/common/job_spec.h"

namespace ballast {

bool StepUses::Add(uint32_t micro_step, const UsedParameters& used) {
  // One rank may be micro-steps ahead of the others. How many there can be has been checked.
  if (uses_.size() <= micro_step) uses_.resize(micro_step + 1);
  if (used.all) {
    AddAll(micro_step);
    return true;
  }
  const auto add = [&](std::vector<bool>& set) {
    for (const int parameter : used.parameters) set[parameter] = true;
  };
  // Before anything else is changed, so that a refusal changes nothing.
  if (!used.parameters.empty() && !AddSome(micro_step, add)) return false;
  add(used_);
  return true;
}

void StepUses::CopySets() {
  std::map<const std::vector<bool>*, Set> copies;
  for (Uses& uses : uses_) {
    if (uses.some == nullptr) continue;
    Set& copy = copies[uses.some.get()];
    if (copy == nullptr) copy = std::make_shared<const std::vector<bool>>(*uses.some);
    uses.some = copy;
  }
}

bool StepUses::Merge(const StepUses& other) {
  CopySets();  // Who shares a set with this one would be counted with it.
  if (uses_.size() < other.uses_.size()) uses_.resize(other.uses_.size());
  for (uint32_t m = 0; m < other.uses_.size(); ++m) {
    const Uses& theirs = other.uses_[m];
    if (theirs.all) AddAll(m);
    if (theirs.some == nullptr) continue;
    const auto add = [&](std::vector<bool>& set) {
      for (size_t p = 0; p < set.size(); ++p) set[p] = set[p] || (*theirs.some)[p];
    };
    if (!AddSome(m, add)) return false;
    add(used_);
  }
  return true;
}

void StepUses::AddAll(uint32_t micro_step) {
  used_.assign(used_.size(), true);
  // The set goes where no neighbour shares it.
  sets_ -= uses_[micro_step].some.use_count() == 1 ? 1 : 0;
  uses_[micro_step] = {.all = true, .some = nullptr};
}

bool StepUses::AddSome(uint32_t micro_step, absl::FunctionRef<void(std::vector<bool>& set)> add) {
  Uses& uses = uses_[micro_step];
  if (uses.all) return true;
  std::vector<bool> some = uses.some != nullptr ? *uses.some : std::vector<bool>(used_.size());
  add(some);
  if (uses.some != nullptr && *uses.some == some) return true;
  // A set that a neighbour shares stays after it has been replaced here.
  const size_t freed = uses.some.use_count() == 1 ? 1 : 0;
  // Most models use the same parameters in each micro-step, so that one set serves all of them.
  const Set before = micro_step > 0 ? uses_[micro_step - 1].some : nullptr;
  if (before != nullptr && *before == some) {
    sets_ -= freed;
    uses.some = before;
    return true;
  }
  if (sets_ - freed >= kMaxUsedSets) return false;
  sets_ += 1 - freed;
  uses.some = std::make_shared<const std::vector<bool>>(std::move(some));
  return true;
}

void StepUses::Clear() {
  used_.assign(used_.size(), false);
  uses_.clear();
  sets_ = 0;
}

StepUses::Sent StepUses::ToSent() const {
  Sent sent;
  std::map<const std::vector<bool>*, uint32_t> sets;
  for (const Uses& uses : uses_) {
    if (uses.some == nullptr) {
      sent.uses.push_back(uses.all ? Sent::kAll : Sent::kNone);
      continue;
    }
    const auto [set, is_new] =
        sets.try_emplace(uses.some.get(), static_cast<uint32_t>(sent.sets.size()));
    if (is_new) sent.sets.push_back(*uses.some);
    sent.uses.push_back(set->second);
  }
  return sent;
}

std::optional<StepUses> StepUses::FromSent(int64_t parameters, const Sent& sent) {
  StepUses made(parameters);
  if (sent.uses.size() > kMaxMicroSteps) return std::nullopt;
  made.uses_.resize(sent.uses.size());
  std::vector<Set> sets;
  for (const std::vector<bool>& set : sent.sets) {
    if (static_cast<int64_t>(set.size()) != parameters) return std::nullopt;
    sets.push_back(std::make_shared<const std::vector<bool>>(set));
    for (size_t p = 0; p < set.size(); ++p) made.used_[p] = made.used_[p] || set[p];
  }
  if (sets.size() > kMaxUsedSets) return std::nullopt;
  made.sets_ = sets.size();
  for (uint32_t m = 0; m < sent.uses.size(); ++m) {
    const uint32_t use = sent.uses[m];
    if (use == Sent::kNone) continue;
    if (use != Sent::kAll && use >= sets.size()) return std::nullopt;
    if (use == Sent::kAll) made.used_.assign(parameters, true);
    made.uses_[m] = {.all = use == Sent::kAll, .some = use == Sent::kAll ? nullptr : sets[use]};
  }
  return made;
}

std::optional<uint32_t> StepUses::FirstUse(int parameter, uint32_t begin, uint32_t end) const {
  for (uint32_t m = begin; m < std::min<size_t>(end, uses_.size()); ++m) {
    if (uses_[m].all || (uses_[m].some != nullptr && (*uses_[m].some)[parameter])) return m;
  }
  return std::nullopt;
}

}  // namespace ballast
