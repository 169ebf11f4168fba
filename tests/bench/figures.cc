#include "tests/bench/figures.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast::bench {
namespace {

// The element below which the share `fraction` of `samples` lies, by nearest rank.
double Quantile(std::vector<double> samples, double fraction) {
  std::sort(samples.begin(), samples.end());
  const double rank = std::ceil(fraction * static_cast<double>(samples.size()));
  const size_t index = rank < 1 ? 0 : static_cast<size_t>(rank) - 1;
  return samples[std::min(index, samples.size() - 1)];
}

// Of an even number, the mean of the middle two.
double Median(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const size_t middle = samples.size() / 2;
  if (samples.size() % 2 == 1) return samples[middle];
  return (samples[middle - 1] + samples[middle]) / 2;
}

}  // namespace

void Figures::Add(absl::string_view key, const std::vector<double>& samples, absl::string_view unit,
                  bool keep) {
  if (samples.empty()) return;
  nlohmann::json figure = {{"median", Median(samples)},
                           {"min", *std::min_element(samples.begin(), samples.end())},
                           {"max", *std::max_element(samples.begin(), samples.end())},
                           {"p99", Quantile(samples, 0.99)},
                           {"unit", std::string(unit)}};
  if (keep) figure["samples"] = samples;
  figures_[std::string(key)] = std::move(figure);
}

nlohmann::json Figures::ToJson() const {
  return {{"name", name_}, {"figures", figures_}, {"info", info_}};
}

absl::Status Figures::Write(const std::string& path) const {
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary, std::ios::trunc);
  file << ToJson().dump(1) << "\n";
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const absl::Status status = absl::UnavailableError(
        absl::StrCat("cannot write the figures to ", path, ": ", std::strerror(errno)));
    static_cast<void>(std::remove(temporary.c_str()));
    return status;
  }
  return absl::OkStatus();
}

}  // namespace ballast::bench
