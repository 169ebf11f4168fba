// What a benchmark measured, in the form in which report.py reads it:
//
//   {"name": "wire", "figures": {"raw_tcp_up_gb_s": {"median": 5.0, "min": 4.8, "max": 5.1,
//    "p99": 5.1, "unit": "GB/s"}}, "info": {...}}
#ifndef BALLAST_TESTS_BENCH_FIGURES_H_
#define BALLAST_TESTS_BENCH_FIGURES_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ballast::bench {

// The element below which the share `fraction` of `samples` lies, by nearest rank; 0 of none.
double Quantile(std::vector<double> samples, double fraction);
double Median(std::vector<double> samples);  // Of an even number, the mean of the middle two.

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
