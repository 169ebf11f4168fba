// Which parameters got a gradient in which micro-steps of a step, from some ranks together.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_USES_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_USES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "cpu_optimizer_service/common/step_settings.h"

namespace ballast {

class StepUses {
 public:
  StepUses() = default;
  explicit StepUses(int64_t parameters) : used_(parameters, false) {}

  // A rank's in a micro-step. False, and nothing is added: there would be more than kMaxUsedSets
  // different sets.
  bool Add(uint32_t micro_step, const UsedParameters& used);
  // Those of other ranks. False, and some are added: as above.
  bool Merge(const StepUses& other);
  void Clear();

  // All of it, to send.
  struct Sent {
    std::vector<std::vector<bool>> sets;  // By parameter.
    // By micro-step: which set; or one of these two.
    std::vector<uint32_t> uses;
    static constexpr uint32_t kNone = 0xffffffff;
    static constexpr uint32_t kAll = 0xfffffffe;
  };
  Sent ToSent() const;
  // nullopt: it is not of so many parameters, or too large.
  static std::optional<StepUses> FromSent(int64_t parameters, const Sent& sent);

  int64_t parameters() const { return static_cast<int64_t>(used_.size()); }
  // In some micro-step.
  bool used(int parameter) const { return used_[parameter]; }
  // The first micro-step in [begin, end) in which it was.
  std::optional<uint32_t> FirstUse(int parameter, uint32_t begin, uint32_t end) const;

 private:
  // By parameter. Adjacent micro-steps with equal uses share it.
  using Set = std::shared_ptr<const std::vector<bool>>;
  struct Uses {
    bool all = false;  // Then `some` is not kept.
    Set some;          // Null: no parameter.
  };
  void CopySets();
  void AddAll(uint32_t micro_step);
  // As Add.
  bool AddSome(uint32_t micro_step, absl::FunctionRef<void(std::vector<bool>& set)> add);

  std::vector<bool> used_;  // By parameter.
  std::vector<Uses> uses_;  // By micro-step.
  size_t sets_ = 0;         // Different ones, alive.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_USES_H_
