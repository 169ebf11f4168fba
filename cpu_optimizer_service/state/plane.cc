#include "cpu_optimizer_service/state/plane.h"

namespace ballast {

absl::string_view Name(Plane plane) {
  switch (plane) {
    case Plane::kMaster:
      return "master";
    case Plane::kExpAvg:
      return "exp_avg";
    case Plane::kExpAvgSq:
      return "exp_avg_sq";
    case Plane::kMaxExpAvgSq:
      return "max_exp_avg_sq";
  }
  return "unknown";
}

}  // namespace ballast
