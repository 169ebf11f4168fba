// A rank's report about a step, for people who look at the job. It affects no decision.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_HISTORY_RANK_REPORT_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_HISTORY_RANK_REPORT_H_

#include <cstddef>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ballast {

inline constexpr size_t kMostNumbers = 16;          // In a step, and names that a job keeps.
inline constexpr size_t kMostNumberNameBytes = 64;  // Letters, digits, '.', '_', '/' and '-'.

// How a rank spent its time from its last seal, or its start, to this one.
struct RankSeconds {
  double compute = 0;  // Forward, backward and everything else.
  double reduce = 0;   // Waiting for collectives among ranks.
  double send = 0;     // Giving gradients to the service.
  double wait = 0;     // Waiting for the decision and the weights.
};

struct RankReport {
  std::map<std::string, double> numbers;  // By name. A value may be NaN.
  std::optional<RankSeconds> seconds;

  bool empty() const { return numbers.empty() && !seconds.has_value(); }
};

// INVALID_ARGUMENT: the name is empty, too long, or has other characters.
absl::Status CheckNumberName(absl::string_view name);
// The same for every name, and for more than kMostNumbers.
absl::Status CheckReport(const RankReport& report);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_HISTORY_RANK_REPORT_H_
