// What a benchmark measured, in the form in which run.py reads it:
//
//   {"name": "worker", "figures": {"total_seconds": {"median": 0.05, "min": 0.04, "max": 0.06,
//    "p99": 0.06, "unit": "s"}}, "info": {...}}
#ifndef BALLAST_TESTS_BENCH_FIGURES_H_
#define BALLAST_TESTS_BENCH_FIGURES_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ballast::bench {

class Figures {
 public:
  explicit Figures(std::string name) : name_(std::move(name)) {}

  // Median, smallest, largest and 99th percentile of `samples`; with `keep`, the samples too.
  // Nothing if there are none.
  void Add(absl::string_view key, const std::vector<double>& samples, absl::string_view unit,
           bool keep = false);
  // Anything else that is worth telling.
  nlohmann::json& info() { return info_; }

  nlohmann::json ToJson() const;
  // The file appears whole or not at all.
  absl::Status Write(const std::string& path) const;

 private:
  const std::string name_;
  nlohmann::json figures_ = nlohmann::json::object();
  nlohmann::json info_ = nlohmann::json::object();
};

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_FIGURES_H_
